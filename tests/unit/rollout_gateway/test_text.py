"""Streamed text equals the text decoded at once, whatever the cuts; stop strings never show."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError, InvalidInput
from rollout_gateway.text import TextCodec

DEMO = Path(__file__).parents[3] / "examples" / "demo" / "policy_start"
CODEC = TextCodec(DEMO)


def streamed(ids: list[int], cuts: list[int], stop: tuple[str, ...] = (), matched: str = "") -> str:
    stream = CODEC.stream(stop)
    text, rest = "", list(ids)
    for cut in cuts:
        text += stream.push(rest[:cut])
        rest = rest[cut:]
    return text + stream.push(rest) + stream.finish(matched)


@settings(max_examples=200, deadline=None)
@example(text="000\x80\u0800\u0800\U00010000\U00010000", cuts=[1, 1, 1, 2, 2, 3, 1, 4, 4])
@given(text=st.text(max_size=20), cuts=st.lists(st.integers(1, 4), max_size=30))
def test_streamed_text_equals_the_whole(text: str, cuts: list[int]) -> None:
    ids = list(CODEC.encode(text))
    assert streamed(ids, cuts) == CODEC.decode(ids) == text


def test_an_incomplete_character_is_held_back() -> None:
    stream = CODEC.stream()
    head, *tail = CODEC.encode("é")[1:]
    assert stream.push([head]) == ""
    assert stream.push(tail) == "é"


@given(ids=st.lists(st.integers(0, 319), max_size=60))
@settings(max_examples=50, deadline=None)
def test_any_ids_can_be_streamed(ids: list[int]) -> None:
    assert isinstance(streamed(ids, [1] * len(ids)), str)


@pytest.mark.parametrize("cuts", [[1] * 20, [3, 3], []])
def test_a_stop_string_is_cut_off_and_its_beginning_held_back(cuts: list[int]) -> None:
    ids = list(CODEC.encode("12 - 3 -- ")[1:])
    assert streamed(ids, cuts, stop=(" --",), matched=" --") == "12 - 3"
    assert streamed(ids, cuts, stop=("xyz",)) == "12 - 3 -- "


def test_a_chat_begins_with_bos_once() -> None:
    ids = CODEC.encode_chat([{"role": "user", "content": "1+1="}])
    assert ids == CODEC.encode("1+1=")


def write_template(directory: Path, template: str) -> TextCodec:
    shutil.copy(DEMO / "tokenizer.json", directory)
    settings_of = {"bos_token": {"content": "<bos>"}, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings_of))
    return TextCodec(directory)


def test_a_template_that_writes_bos_keeps_one(tmp_path: Path) -> None:
    codec = write_template(tmp_path, "{{ bos_token }}{{ messages[0]['content'] }}")
    assert codec.encode_chat([{"role": "user", "content": "7"}]) == codec.encode("7")


def test_a_template_cannot_leave_its_sandbox_and_may_refuse(tmp_path: Path) -> None:
    codec = write_template(tmp_path, "{{ messages.__class__.__mro__ }}")
    with pytest.raises(InvalidInput, match="refused"):
        codec.encode_chat([{"role": "user", "content": "7"}])
    codec = write_template(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidInput, match="roles must alternate"):
        codec.encode_chat([{"role": "user", "content": "7"}])


def test_a_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        TextCodec(tmp_path)
