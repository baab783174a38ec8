"""Streamed text equals the text decoded at once, for any cuts; stop strings never show."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from chat_models import codec_of
from drawn_cases import case_count
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizer_families import add_bos, byte_level, metaspace, prepending
from tokenizers import AddedToken, Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from paceline.errors import ConfigError, InvalidInput
from paceline.services.rollout_gateway.chat.messages import ChatRequest, Message
from paceline.services.rollout_gateway.chat.stream import TextStream
from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.services.rollout_gateway.engines.requests.stop_texts import StopText, TokenNames

DEMO = Path(__file__).parents[4] / "examples" / "demo" / "policy_start"
CODEC = TextCodec(DEMO)


def streamed(ids: list[int], cuts: list[int], stop: tuple[str, ...] = (), matched: str = "") -> str:
    stream = CODEC.stream(stop)
    text, rest = "", list(ids)
    for cut in cuts:
        text += stream.push(rest[:cut])
        rest = rest[cut:]
    return text + stream.push(rest) + stream.finish(matched)


@settings(max_examples=case_count(200), deadline=None)
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


def test_every_id_is_decoded_once_where_texts_add_up_and_characters_are_whole() -> None:
    ids = list(CODEC.encode("as plain as it gets"))
    decoded: list[int] = []

    def decode(some: Sequence[int]) -> str:
        decoded.extend(some)
        return CODEC.decode(some)

    stream = TextStream(decode, (), adds_up=True)
    text = "".join(stream.push(ids[at : at + 4]) for at in range(0, len(ids), 4))
    assert (text, decoded) == ("as plain as it gets", ids)


@given(ids=st.lists(st.integers(0, 319), max_size=60))
@settings(max_examples=case_count(50), deadline=None)
def test_any_ids_can_be_streamed(ids: list[int]) -> None:
    assert isinstance(streamed(ids, [1] * len(ids)), str)


@pytest.mark.parametrize("cuts", [[1] * 20, [3, 3], []])
def test_a_stop_string_is_cut_off_and_its_beginning_held_back(cuts: list[int]) -> None:
    ids = list(CODEC.encode("12 - 3 -- ")[1:])
    assert streamed(ids, cuts, stop=(" --",), matched=" --") == "12 - 3"
    assert streamed(ids, cuts, stop=("xyz",)) == "12 - 3 -- "


@pytest.mark.parametrize("cuts", [[1] * 20, [3, 3], []])
def test_a_stop_string_may_be_kept_and_what_comes_behind_it_is_not(cuts: list[int]) -> None:
    ids = list(CODEC.encode("12 - 3 -- 4")[1:])
    stream, text = CODEC.stream((" --",)), ""
    for size in cuts or [len(ids)]:
        text += stream.push(ids[:size])
        ids = ids[size:]
    text += stream.push(ids)
    assert text + stream.finish(" --", keep=True) == "12 - 3 --"


@pytest.mark.parametrize("first", range(9))
def test_a_stop_string_that_comes_too_early_is_text_and_the_next_one_ends_it(first: int) -> None:
    text = "1#2#3#4"
    ids = list(CODEC.encode(text)[1:])
    stream = CODEC.stream(("#",))
    said = stream.push(ids[:first], early=True) + stream.push(ids[first:])
    end = text.find("#", first)
    whole = said + stream.finish("#" if end >= 0 else "")
    assert whole == (text[:end] if end >= 0 else text)


def chat(text: str) -> ChatRequest:
    return ChatRequest((Message("user", text),))


def test_a_chat_begins_with_bos_once() -> None:
    assert CODEC.encode_chat(chat("1+1=")) == CODEC.encode("1+1=")
    assert list(CODEC.encode("1+1=")).count(CODEC.encode("")[0]) == 1


BEGINNINGS = {
    "bos by template and tokenizer": ("{{ bos_token }}{{ messages[0].content }}", True, 1),
    "bos by the tokenizer": ("{{ messages[0].content }}", True, 0),
    "bos by the template": ("{{ bos_token }}{{ messages[0].content }}", False, 1),
    "no bos": ("{{ messages[0].content }}", False, 0),
}


@pytest.mark.parametrize("name", BEGINNINGS)
@pytest.mark.parametrize("tokenizer", ["byte-level", "metaspace first", "space by the normalizer"])
def test_a_chat_has_the_bos_that_its_template_writes_as_in_transformers(
    name: str, tokenizer: str
) -> None:
    template, adds, count = BEGINNINGS[name]
    made = Tokenizer.from_str(TOKENIZERS[tokenizer].to_str())
    if adds:
        add_bos(made, "<s>")
    codec = codec_of(made, chat_template=template, bos_token="<s>")
    theirs = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")
    messages = [{"role": "user", "content": "hello"}]
    told = theirs.apply_chat_template(messages, chat_template=template, return_dict=False)
    assert codec.encode_chat(chat("hello")) == tuple(told)
    assert told.count(made.token_to_id("<s>")) == count


@pytest.mark.parametrize("tokenizer", ["byte-level", "metaspace first", "space by the normalizer"])
@pytest.mark.parametrize("text", ["hello", "<s>hello", "<s>", " hello"])
@pytest.mark.parametrize("special", [True, False])
def test_a_text_is_encoded_with_and_without_special_tokens_as_in_transformers(
    tokenizer: str, text: str, special: bool
) -> None:
    made = Tokenizer.from_str(TOKENIZERS[tokenizer].to_str())
    add_bos(made, "<s>")
    theirs = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")
    told = theirs(text, add_special_tokens=special)["input_ids"]
    assert codec_of(made).encode(text, special=special) == tuple(told)
    assert told.count(made.token_to_id("<s>")) == special + text.count("<s>")


def write_template(directory: Path, template: str) -> TextCodec:
    shutil.copy(DEMO / "tokenizer.json", directory)
    settings_of = {"bos_token": {"content": "<bos>"}, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings_of))
    return TextCodec(directory)


def test_a_template_that_writes_bos_keeps_one(tmp_path: Path) -> None:
    codec = write_template(tmp_path, "{{ bos_token }}{{ messages[0]['content'] }}")
    assert codec.encode_chat(chat("7")) == codec.encode("7")


def test_a_template_cannot_leave_its_sandbox_and_may_refuse(tmp_path: Path) -> None:
    codec = write_template(tmp_path, "{{ messages.__class__.__mro__ }}")
    with pytest.raises(InvalidInput, match="refused"):
        codec.encode_chat(chat("7"))
    codec = write_template(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidInput, match="roles must alternate"):
        codec.encode_chat(chat("7"))


def test_a_model_without_a_template_has_no_conversations() -> None:
    with pytest.raises(InvalidInput, match="no default chat template; seen: none"):
        codec_of(byte_level([])).encode_chat(chat("7"))


@pytest.mark.parametrize(
    "encode", [CODEC.encode, CODEC.encode_piece, lambda text: CODEC.encode_chat(chat(text))]
)
@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_half_a_surrogate_pair_is_refused(
    encode: Callable[[str], tuple[int, ...]], text: str
) -> None:
    with pytest.raises(InvalidInput, match="UTF-8"):
        encode(text)


TOKENIZERS = {
    "byte-level": byte_level(["<s>", "</s>"]),
    "byte-level with a space first": byte_level(["<s>", "</s>"], prefix=True),
    "metaspace always": metaspace(["<s>", "</s>"], "always"),
    "metaspace first": metaspace(["<s>", "</s>"], "first"),
    "metaspace never": metaspace(["<s>", "</s>"], "never"),
    "space by the normalizer": prepending(["<s>", "</s>"]),
    "without special tokens": metaspace([], "always"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=case_count(40), deadline=None)
@example(text="hello")
@example(text=" hello")
@example(text="\nuser")
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=12))
def test_a_piece_gets_neither_bos_nor_a_space_before_it(name: str, text: str) -> None:
    codec = piece_codec(name)
    before = codec.encode("sum")
    whole = codec.decode_all([*before, *codec.encode_piece(text)])
    assert whole == codec.decode_all(before) + text


@functools.cache
def piece_codec(name: str) -> TextCodec:
    tokenizer = TOKENIZERS[name]
    if tokenizer.token_to_id("<s>") is not None:
        add_bos(tokenizer, "<s>")
    return codec_of(tokenizer)


@pytest.mark.parametrize("name", ["the demo's", *TOKENIZERS])
@settings(max_examples=case_count(20), deadline=None)
@example(text="\u00e9\U00010000 a", cuts=[1] * 8)
@given(text=st.text(max_size=20), cuts=st.lists(st.integers(1, 4), max_size=30))
def test_a_stream_gives_what_one_gives_that_always_looks_back(
    name: str, text: str, cuts: list[int]
) -> None:
    codec = piece_codec(name) if name in TOKENIZERS else CODEC
    ids = list(codec.encode(text))
    stream, looks_back = codec.stream(), TextStream(codec.decode, ())
    for cut in (*cuts, len(ids)):
        piece, ids = ids[:cut], ids[cut:]
        assert stream.push(piece) == looks_back.push(piece)
    assert stream.finish() == looks_back.finish()


@pytest.mark.parametrize("name", list(TOKENIZERS)[:-1])
def test_a_piece_behind_a_special_token_is_spelled_as_in_a_whole_text(name: str) -> None:
    codec = piece_codec(name)
    bos, *whole = codec.encode("</s><s>hello world")
    assert codec.token_text(bos) == "<s>"
    assert codec.encode_piece("</s><s>hello world") == tuple(whole)
    assert codec.encode_piece("") == ()


def test_a_tokenizer_that_ends_texts_does_not_begin_a_chat_with_the_end() -> None:
    tokenizer = byte_level(["</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    codec = codec_of(tokenizer, chat_template="{{ messages[0].content }}")
    assert codec.decode_all(codec.encode_chat(chat("hello"))) == "hello"


def test_lengths_left_in_a_tokenizer_file_cut_nothing() -> None:
    tokenizer = byte_level([])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    codec = codec_of(tokenizer)
    assert codec.decode(codec.encode("a longer text than that")) == "a longer text than that"


def test_what_follows_a_message_begins_behind_the_end_that_was_said() -> None:
    codec = codec_of(
        byte_level(["<|end|>"]),
        chat_template="{% for m in messages %}{{ m.content }}<|end|>\n{% endfor %}",
    )
    request = ChatRequest((Message("user", "a"), Message("assistant", "b"), Message("user", "c")))
    (end,) = codec.encode_piece("<|end|>")
    after = {
        said: codec.encode_after(request, 1, said) for said in [(65, end), (65,), (), (end, 65)]
    }
    assert [None if ids is None else codec.decode_all(ids) for ids in after.values()] == [
        "\nc<|end|>\n",
        "<|end|>\nc<|end|>\n",
        "<|end|>\nc<|end|>\n",
        "<|end|>\nc<|end|>\n",
    ]


@pytest.mark.parametrize("content", [b"{", b"{}", b"\xff", b"[]"])
def test_a_broken_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"no tokenizer"):
        TextCodec(tmp_path)


def test_a_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        TextCodec(tmp_path)


@pytest.mark.parametrize("encode", [CODEC.encode, CODEC.encode_piece])
def test_a_text_of_too_many_tokens_is_refused_and_of_just_as_many_taken(
    encode: Callable[[str, int], tuple[int, ...]],
) -> None:
    longest = len(encode("12 + 34 = ", 100))
    assert len(encode("12 + 34 = ", longest)) == longest
    with pytest.raises(InvalidInput, match=f"does not fit.*seen: {longest} tokens"):
        encode("12 + 34 = ", longest - 1)


def test_of_a_far_too_long_text_a_beginning_is_tokenised() -> None:
    codec, seen = TextCodec(DEMO), 0
    inner = codec._tokenizer

    class Counting:
        def encode(self, text: str, **options: bool) -> object:
            nonlocal seen
            seen += len(text)
            return inner.encode(text, **options)

    codec._tokenizer = codec._within = Counting()
    with pytest.raises(InvalidInput, match="seen: 6000000 characters; allowed: 1 to 255 tokens"):
        codec.encode("1 + 2 " * 1_000_000, 255)
    assert seen < 10_000


@given(text=st.text(max_size=60), longest=st.integers(1, 40), times=st.integers(1, 40))
def test_what_is_refused_for_its_parts_is_too_long_as_a_whole(
    text: str, longest: int, times: int
) -> None:
    whole = CODEC.encode(text * times)
    try:
        assert CODEC.encode(text * times, longest) == whole
    except InvalidInput:
        assert len(whole) > longest


MARKS = ["<|im_end|>", "<|eot_id|>", "<|bid|>"]
TURNS = "{% for m in messages %}{{ m.content }}<|eot_id|>\n{% endfor %}"


def codec_with_plain_marks(ends: Sequence[str], **settings_of: str) -> TextCodec:
    """A codec of added tokens that are not special, of which `ends` end an answer."""
    tokenizer = byte_level([])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    ids = [tokenizer.token_to_id(text) for text in ends]
    return codec_of(tokenizer, end_ids=[one for one in ids if one is not None], **settings_of)


@pytest.mark.parametrize("named", ["by the configuration", "by the tokenizer"])
def test_an_end_token_that_is_not_special_stands_in_no_content(named: str) -> None:
    by_config = named == "by the configuration"
    settings_of = {} if by_config else {"eos_token": "<|eot_id|>"}
    codec = codec_with_plain_marks(["<|eot_id|>"] if by_config else [], **settings_of)
    ids = [*codec.encode("Hello"), *codec.encode("<|eot_id|>")]
    for stop, keep in (((), ()), (("xyz",), ()), ((), ("<think>",))):
        stream = codec.stream(stop, keep)
        assert "".join(stream.push([one]) for one in ids) + stream.finish() == "Hello"
    assert codec.decode(ids) == "Hello"
    assert codec.decode_all(ids) == "Hello<|eot_id|>"
    assert codec.decode(codec.encode("<|im_end|>")) == "<|im_end|>"  # it ends nothing here


def test_an_end_token_that_was_said_does_not_stand_twice_in_the_next_prompt() -> None:
    codec = codec_with_plain_marks(["<|eot_id|>", "<|im_end|>"], chat_template=TURNS)
    (end,) = codec.encode("<|eot_id|>")
    said = Message("assistant", "Hello")
    asked = ChatRequest((Message("user", "Hi"), said, Message("user", "Bye")))
    for ids in ([*codec.encode("Hello"), end], [*codec.encode("Hello")]):
        after = codec.encode_after(asked, 1, ids)
        assert after is not None
        assert [*ids, *after].count(end) == 2  # of the answer and of the question behind it


def test_an_end_token_that_a_tool_format_reads_is_kept_for_it() -> None:
    codec = codec_with_plain_marks(["<|eot_id|>"])
    stream = codec.stream(keep=["<|eot_id|>"])
    assert stream.push(codec.encode("a<|eot_id|>")) + stream.finish() == "a<|eot_id|>"


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("stop", ["id", "<|", "|>", ">H", "o<|bid"])
def test_a_stop_string_is_not_found_inside_the_name_of_a_token(stop: str, special: bool) -> None:
    tokenizer = byte_level([])
    mark = AddedToken("<|bid|>", special=special, normalized=False)
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([mark])
    codec, matched = codec_of(tokenizer), StopText(tokenizer, (stop,), TokenNames(tokenizer))
    ids = [*codec.encode("Hello<|bid|>Hello ")]
    assert [matched.match(ids[:size]) for size in range(1, len(ids) + 1)] == [""] * len(ids)
    stream = codec.stream((stop,))
    shown = "".join(stream.push([one]) for one in ids) + stream.finish()
    assert shown == ("Hello" if special else "Hello<|bid|>") + "Hello "
    # Behind it the same text counts.
    ids += codec.encode(stop)
    stream = codec.stream((stop,))
    assert matched.match(ids) == stop
    kept = "".join(stream.push([one]) for one in ids) + stream.finish(stop)
    assert kept == ("Hello" if special else "Hello<|bid|>") + "Hello "


def test_a_stop_string_that_is_a_whole_name_or_stands_in_a_word_of_its_own_counts() -> None:
    tokenizer = byte_level(["<|bid|>"])
    tokenizer.add_tokens([AddedToken("candid", special=False, normalized=False)])
    codec = codec_of(tokenizer)
    for stop, text in (("<|bid|>", "a<|bid|>"), ("o<|bid|>", "Hello<|bid|>"), ("id", "candid")):
        matched = StopText(tokenizer, (stop,), TokenNames(tokenizer))
        assert matched.match(list(codec.encode(text))) == stop
