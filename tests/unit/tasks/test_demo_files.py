"""The files of examples/demo: the tokenizer keeps every text; task files match the family."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from benchmarks.demo_runs import two_digits
from examples.demo import gcd_chain
from paceline.tasks.file import read_tasks

DEMO = Path(__file__).parents[3] / "examples" / "demo"
TOKENIZER = Tokenizer.from_file(str(DEMO / "policy_start" / "tokenizer.json"))
BOS, EOS, PAD = (TOKENIZER.token_to_id(token) for token in ("<bos>", "<eos>", "<pad>"))


@pytest.mark.parametrize(
    "text", ["48:36=", "🙂👩‍👩‍👧", "最大公约数", "naïve café", "<0x41>", " \n\t\r ", "\x00", ""]
)
def test_a_text_decodes_back_exactly(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert ids[0] == BOS
    assert TOKENIZER.decode([*ids, EOS, PAD], skip_special_tokens=True) == text


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_decodes_back_exactly(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=True) == text


def test_a_character_of_a_task_is_one_token_below_64_and_other_text_is_bytes() -> None:
    family = gcd_chain.THREE_DIGITS
    text = (
        family.prompt(48, 36)
        + family.solution(48, 36, "subtract")
        + family.solution(48, 36, "remainder")
    )
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert len(ids) == len(text)
    assert max(ids) < 64
    assert TOKENIZER.encode("é", add_special_tokens=False).ids == [
        64 + byte for byte in "é".encode()
    ]
    assert TOKENIZER.get_vocab_size() == 320


def test_a_user_message_renders_to_its_prompt_behind_bos() -> None:
    from jinja2 import Template

    config = json.loads((DEMO / "policy_start" / "tokenizer_config.json").read_text())
    rendered = Template(config["chat_template"]).render(
        messages=[{"role": "user", "content": "48:36="}], bos_token="<bos>"
    )
    assert rendered == "<bos>48:36="


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "family"),
    [(DEMO, gcd_chain.THREE_DIGITS), (two_digits().parent, gcd_chain.TWO_DIGITS)],
)
def test_the_task_files_hold_their_split_of_the_family(
    folder: Path, family: gcd_chain.Family
) -> None:
    heldout = read_tasks(folder / "tasks_heldout.jsonl")
    train = read_tasks(folder / "tasks_train.jsonl")
    assert heldout == family.sample_tasks(512, "heldout", seed=2)
    assert train == family.sample_tasks(2000, "train", seed=1)
    unordered = {frozenset(task.prompt.rstrip("=").split(":")) for task in heldout}
    assert not unordered & {frozenset(task.prompt.rstrip("=").split(":")) for task in train}
