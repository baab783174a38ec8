"""The scripted engine answers by the content of a prompt, so that dialogues can be scripted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import Tokenizer

from examples.scripted_engine.engine import build_scripted
from examples.scripted_engine.script import (
    Script,
    ScriptedSpec,
    scripted_response,
)
from paceline.errors import ConfigError, InvalidInput
from paceline.services.rollout_gateway.engines.nouns import Chunk, Finish, Request
from paceline.services.rollout_gateway.engines.sampling import Sampling

TOKENIZER_FILE = Path(__file__).parents[4] / "examples/demo/policy_start/tokenizer.json"
TOKENIZER = Tokenizer.from_file(str(TOKENIZER_FILE))
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
DIALOGUE = [
    {"pattern": r"<tool_response>\s*5\s*</tool_response>", "texts": ["It is 5."]},
    {"pattern": r"add 2 and 3", "texts": [CALL]},
]


def spec(*replies: dict[str, Any], **settings: Any) -> ScriptedSpec:
    values = {
        "model_dir": str(TOKENIZER_FILE.parent),
        "max_sequence_tokens": 1 << 16,
        "arms": ("off",),
        **settings,
    }
    return ScriptedSpec.model_validate({"replies": list(replies), **values})


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=True).ids)


def chunks(
    settings: ScriptedSpec, prompt: tuple[int, ...], *, seed: int = 0, **sampling: Any
) -> list[Chunk]:
    engine = build_scripted(settings)
    options = {"max_tokens": 4096, **sampling}
    engine.enqueue(Request(1, prompt, Sampling(seed=seed, **options), stream=True))
    found: list[Chunk] = []
    while engine.has_work:
        found += engine.step()
    return found


def said(settings: ScriptedSpec, prompt: str | tuple[int, ...], **options: Any) -> tuple[int, ...]:
    """Token ids of the answer."""
    news = chunks(settings, ids(prompt) if isinstance(prompt, str) else prompt, **options)
    return tuple(token for chunk in news for token in chunk.token_ids)


def test_an_answer_is_its_text_encoded_and_the_end_token() -> None:
    assert said(spec(*DIALOGUE), "please add 2 and 3") == (
        *TOKENIZER.encode(CALL, add_special_tokens=False).ids,
        1,
    )


def test_a_token_that_only_tokenizer_config_adds_is_one_token_of_a_reply(tmp_path: Path) -> None:
    shutil.copy(TOKENIZER_FILE, tmp_path)
    added = {"320": {"content": "<call>", "special": True}}
    settings = json.dumps({"added_tokens_decoder": added})
    (tmp_path / "tokenizer_config.json").write_text(settings)
    reply = {"pattern": "2", "texts": ["<call>"]}
    words = {"model_dir": str(tmp_path), "vocab_size": 321}
    assert said(spec(reply, **words), "2") == (320, 1)
    assert said(spec({**reply, "pattern": "<call>$"}, **words), (320,)) == (320, 1)


def test_a_dialogue_goes_on_by_what_the_tools_said() -> None:
    turn = "please add 2 and 3" + CALL + "<tool_response>\n5\n</tool_response>"
    assert said(spec(*DIALOGUE), turn)[:-1] == tuple(
        TOKENIZER.encode("It is 5.", add_special_tokens=False).ids
    )


def test_the_first_reply_that_matches_answers() -> None:
    both = ({"pattern": "x", "texts": ["first"]}, {"pattern": "xy", "texts": ["second"]})
    assert TOKENIZER.decode(list(said(spec(*both), "xy"))) == "first"


def test_the_seed_picks_among_the_texts() -> None:
    one = spec({"pattern": "", "texts": ["a", "b", "c"]})
    assert [TOKENIZER.decode(list(said(one, "?", seed=seed))) for seed in range(4)] == [
        "a",
        "b",
        "c",
        "a",
    ]


def test_lines_of_exact_prompts_come_before_replies_and_draws_after_them() -> None:
    line = {"prompt": ids("exact"), "responses": [[9, 1]]}
    one = spec({"pattern": "exact", "texts": ["by text"]}, script=[line])
    assert said(one, "exact") == (9, 1)
    assert TOKENIZER.decode(list(said(one, "not exact"))) == "by text"
    assert said(one, "other", seed=3) == scripted_response(one, ids("other"), 3)


def test_special_tokens_can_be_searched_by_their_names() -> None:
    one = spec({"pattern": r"<eos>again$", "texts": ["yes"]})
    assert TOKENIZER.decode(list(said(one, (*ids("once"), 1, *ids("again")[1:])))) == "yes"


@given(
    st.text(max_size=40),
    st.integers(min_value=1, max_value=30),
    st.integers(min_value=0, max_value=60),
)
def test_only_the_end_of_a_prompt_is_searched(text: str, window: int, distance: int) -> None:
    one = spec({"pattern": "KEY", "texts": ["found"]}, reply_window_chars=window)
    prompt = text + "KEY" + "é" * distance
    found = TOKENIZER.decode(list(said(one, prompt))) == "found"
    assert found == (distance + len("KEY") <= window)


class CountingTokenizer:
    """The real tokenizer; records the tokens that it decodes."""

    def __init__(self) -> None:
        self.decoded = 0

    def encode(self, text: str, **options: Any) -> Any:
        return TOKENIZER.encode(text, **options)

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.decoded += len(token_ids)
        return str(TOKENIZER.decode(token_ids, **options))


def test_a_long_prompt_costs_its_window_only() -> None:
    counting = CountingTokenizer()
    script = Script(spec({"pattern": "nowhere", "texts": ["x"]}, reply_window_chars=100))
    script._tokenizer = counting
    script.answer(tuple(3 + index % 200 for index in range(1 << 16)), seed=0)
    assert counting.decoded <= 4 * (100 + 1)


@pytest.mark.parametrize("arm", ["off", "eagle:3_1_4"])
def test_a_reply_may_set_its_own_pace(arm: str) -> None:
    one = spec({"pattern": "", "texts": ["0123456789"], "tokens_per_round": 4}, arms=(arm,))
    news = chunks(one, ids("?"))
    assert [len(chunk.token_ids) for chunk in news] == [4, 4, 3]
    stats = news[-1].speculation
    assert stats.accepted_tokens <= stats.drafted_tokens


def test_stop_strings_end_a_reply_where_they_are_completed() -> None:
    one = spec({"pattern": "", "texts": ["ü" * 300 + "STOP and more"]})
    news = chunks(one, ids("?"), stop=("STOP",))
    assert (news[-1].finish, news[-1].matched_stop) == (Finish.STOP, "STOP")
    tokens = [token for chunk in news for token in chunk.token_ids]
    assert TOKENIZER.decode(tokens) == "ü" * 300 + "STOP"


@pytest.mark.parametrize(
    "bad",
    [
        {"pattern": "(", "texts": ["x"]},
        {"pattern": "x", "texts": []},
        {"pattern": "x"},
        {"pattern": "x", "texts": ["y"], "tokens_per_round": 0},
        {"pattern": "x", "texts": ["y"], "often": True},
    ],
)
def test_a_reply_that_cannot_work_is_refused_with_the_file_named(
    bad: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ValidationError):
        spec(bad)
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"replies": [bad]}))
    with pytest.raises(InvalidInput, match=r"script\.json"):
        ScriptedSpec(file=str(path))


def test_replies_need_a_tokenizer_whose_tokens_are_served() -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        build_scripted(spec(*DIALOGUE, model_dir=""))
    with pytest.raises(InvalidInput, match="add 2 and 3"):
        build_scripted(spec(DIALOGUE[1], vocab_size=20))
