"""Records on disk become tokens and masks; bad records give clear errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from paceline.errors import ConfigError, InvalidInput
from paceline.services.drafter_trainer.offline.data import Example, ModelText, read_samples

WORDS = ["<bos>", "<eos>", "<u>", "<a>", "add", "one", "two", "three", "four", "five"]
TEMPLATE = (
    "{% for m in messages %}{{ '<u> ' if m.role == 'user' else '<a> ' }}{{ m.content }} <eos> {% "
    "endfor %}"
    "{% if add_generation_prompt %}<a> {% endif %}"
)
# Drops earlier answers, as templates of thinking models do.
FORGETFUL = (
    "{% for m in messages %}{% if m.role == 'user' or loop.last %}"
    "{{ '<u> ' if m.role == 'user' else '<a> ' }}{{ m.content }} <eos> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a> {% endif %}"
)


def words(directory: Path, template: str) -> Callable[[], ModelText]:
    """A tokenizer of one token per word; the token after <eos> in TEMPLATE is the next turn's."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="five"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>")
    fast.chat_template = template
    fast.save_pretrained(directory)
    return lambda: ModelText(directory, [1])


def told(sample: Example) -> list[str]:
    """Words; the model's words are in capitals."""
    return [
        WORDS[i].upper() if said else WORDS[i]
        for i, said in zip(sample.token_ids, sample.mask, strict=True)
    ]


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def none() -> ModelText:
    raise AssertionError("no record needs text")


CHAT = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


def test_every_answer_of_a_conversation_is_the_models_up_to_its_end_token(tmp_path: Path) -> None:
    text = words(tmp_path, TEMPLATE)
    (sample,) = read_samples(write(tmp_path / "a.jsonl", {"messages": CHAT}), text, len(WORDS))
    expected = [
        "<u>",
        "one",
        "<eos>",
        "<a>",
        "TWO",
        "TWO",
        "<EOS>",
        "<u>",
        "three",
        "<eos>",
        "<a>",
        "FOUR",
        "<EOS>",
    ]
    assert told(sample) == expected


def test_answers_that_a_template_rewrites_later_are_not_learned_from_but_the_last_one_is(
    tmp_path: Path,
) -> None:
    text = words(tmp_path, FORGETFUL)
    (sample,) = read_samples(write(tmp_path / "a.jsonl", {"messages": CHAT}), text, len(WORDS))
    assert told(sample) == ["<u>", "one", "<eos>", "<u>", "three", "<eos>", "<a>", "FOUR", "<EOS>"]


def test_a_prompt_and_its_response_end_with_the_end_token(tmp_path: Path) -> None:
    record = {"prompt": "add one", "response": "two three"}
    (sample,) = read_samples(
        write(tmp_path / "a.jsonl", record), words(tmp_path, TEMPLATE), len(WORDS)
    )
    assert told(sample) == ["add", "one", "TWO", "THREE", "<EOS>"]


def test_records_without_an_answer_are_rejected(tmp_path: Path) -> None:
    for record in ({"prompt": "one"}, {"messages": CHAT[:1]}):
        path = write(tmp_path / "a.jsonl", record)
        with pytest.raises(InvalidInput, match=r"a\.jsonl, line 1: .*no answer"):
            read_samples(path, words(tmp_path, TEMPLATE), len(WORDS))


def test_a_directory_is_read_file_by_file_in_the_order_of_names(tmp_path: Path) -> None:
    for name, token in (("b", 2), ("a", 1)):
        write(tmp_path / f"{name}.jsonl", {"input_ids": [token, 5, 6], "loss_mask": [0, 1, 1]})
    (tmp_path / "readme.txt").write_text("no data")
    assert [int(s.token_ids[0]) for s in read_samples(tmp_path, none, 9)] == [1, 2]


GOOD = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ("{nonsense", "not a JSON object"),
        ('{"prompt": "a", "response": NaN}', "NaN is no number of JSON"),
        ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' is repeated"),
        ('{"prompt": "cut \\ud83d", "response": "a"}', "'prompt' holds half of a surrogate pair"),
        (
            '{"messages": [{"role": "user", "content": "\\ud83d"}]}',
            r"'messages\[0\]\.content' holds",
        ),
        ("[1]", "not a JSON object"),
        ('{"text": "x"}', r"no known form; seen: \['text'\]; allowed: .*messages"),
        ('{"messages": "hi"}', "messages: .*valid list"),
        ('{"messages": [{"role": "user"}]}', "messages.0.content: Field required"),
        ('{"prompt": 3, "response": "x"}', "prompt: .*valid string"),
        ('{"prompt": "x", "response": ""}', "response: .*at least 1 character"),
        (
            '{"input_ids": [1, 2.5], "loss_mask": [0, 1]}',
            r"input_ids\.1: .*valid integer; seen: 2\.5",
        ),
        ('{"input_ids": [1, 2]}', "no answer of the model"),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "differ in length; seen: 1; allowed: 2"),
        ('{"input_ids": [1, 2], "loss_mask": [0, 2]}', r"loss_mask\.1\..*: .*0 or 1; seen: 2"),
        (
            '{"input_ids": [1, 9], "loss_mask": [0, 1]}',
            r"vocabulary; seen: \(1, 9\); allowed: 0 to 8",
        ),
        (
            '{"input_ids": [1, 36893488147419103232], "loss_mask": [0, 1]}',
            r"input_ids\.1: .*less than 9223372036854775808",
        ),
        ('{"input_ids": [1, 2], "loss_mask": [0, 0]}', "no answer of the model"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path: Path, bad: str, named: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + bad + "\n")
    with pytest.raises(InvalidInput, match=rf"data\.jsonl, line 3: .*{named}"):
        read_samples(path, lambda: words(tmp_path, TEMPLATE)(), 9)


def test_a_path_without_data_is_refused(tmp_path: Path) -> None:
    for path in (
        tmp_path,
        tmp_path / "no.jsonl",
        write(tmp_path / "data.csv", 1),
        write(tmp_path / "empty.jsonl"),
    ):
        with pytest.raises(ConfigError, match=r"no training data|no record"):
            read_samples(path, none, 9)


def test_text_without_a_tokenizer_says_what_works_without_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "one", "response": "two"})
    with pytest.raises(ConfigError, match=r"no tokenizer .*input_ids"):
        read_samples(path, lambda: ModelText(tmp_path, [1]), 9)


def test_parquet_rows_are_records_and_a_bad_one_is_named(tmp_path: Path) -> None:
    arrow = pytest.importorskip(
        "pyarrow", reason="optional: Parquet is read where pyarrow is installed"
    )
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [GOOD, {"messages": CHAT}, {"input_ids": [1, 99], "loss_mask": [0, 1]}]
    parquet.write_table(
        arrow.Table.from_pylist(rows[:2], schema=_schema(arrow)), tmp_path / "good.parquet"
    )
    ready, chat = read_samples(tmp_path / "good.parquet", words(tmp_path, TEMPLATE), len(WORDS))
    assert ready.token_ids.tolist() == GOOD["input_ids"]
    assert told(chat)[-2:] == ["FOUR", "<EOS>"]
    parquet.write_table(
        arrow.Table.from_pylist(rows, schema=_schema(arrow)), tmp_path / "bad.parquet"
    )
    with pytest.raises(InvalidInput, match=r"bad\.parquet, row 3: .*vocabulary"):
        read_samples(tmp_path / "bad.parquet", words(tmp_path, TEMPLATE), len(WORDS))
    (tmp_path / "broken.parquet").write_bytes(b"no table")
    with pytest.raises(InvalidInput, match=r"broken\.parquet: not a Parquet file"):
        read_samples(tmp_path / "broken.parquet", none, 9)


def _schema(arrow: Any) -> Any:
    message = arrow.struct([("role", arrow.string()), ("content", arrow.string())])
    integers = arrow.list_(arrow.int64())
    return arrow.schema(
        [("input_ids", integers), ("loss_mask", integers), ("messages", arrow.list_(message))]
    )
