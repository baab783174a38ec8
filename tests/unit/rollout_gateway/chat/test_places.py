"""Places of tokens in a text, and their bytes, under every family of tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_models import codec_of, vocab_size
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from paceline.services.rollout_gateway.api.http.openai import TokenLabels
from paceline.services.rollout_gateway.chat.text import TextCodec

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "é", "▁é"]


def sentence_piece() -> Tokenizer:
    """Llama 2's form, with a bos."""
    vocab = {text: token for token, text in enumerate(["<s>", *BYTES, *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def characters() -> Tokenizer:
    vocab = {text: token for token, text in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


@pytest.fixture(params=[sentence_piece, characters])
def codec(request: pytest.FixtureRequest, tmp_path: Path) -> TextCodec:
    request.param().save(str(tmp_path / "tokenizer.json"))
    return TextCodec(tmp_path)


@pytest.mark.parametrize("text", ["a", "a b", " a  b", "ab é😀 日a", "😀😀", "é a"])
def test_a_whole_text_is_cut_at_the_places_of_its_tokens(codec: TextCodec, text: str) -> None:
    ids = codec.encode(text)
    places = codec.places().take(ids)
    said = codec.decode(ids)
    assert places[0] == 0
    for token, start, end in zip(ids, places, [*places[1:], len(said)], strict=True):
        part = codec.token_bytes(token)
        if part.isascii():
            assert said[start:end] in (part.decode(), part.decode().removeprefix(" "))
            assert start == 0 or said[start:end] == part.decode()
    assert codec.places_in(text, ids) == places


def test_half_characters_share_a_place_and_special_tokens_have_no_width(codec: TextCodec) -> None:
    bos, ids = codec.added_tokens["<s>"], codec.encode_piece("a😀b")
    assert codec.places(7).take([bos, *ids, bos]) == [7, 7, 8, 8, 8, 8, 9, 10]
    assert codec.places_in("a😀b", [bos, *ids]) == [0, 0, 1, 1, 1, 1, 2]
    assert codec.places_in("<s>a😀b", [bos, *ids]) == [0, 3, 4, 4, 4, 4, 5]


@given(data=st.data(), family=st.sampled_from([sentence_piece, characters]))
def test_places_never_decrease_in_news_of_any_size(data: st.DataObject, family: Any) -> None:
    codec = codec_of(family())
    ids = data.draw(st.lists(st.integers(0, vocab_size(codec) - 1), max_size=30))
    whole, apart = codec.places().take(ids), codec.places()
    assert whole == sorted(whole)
    assert whole == [place for one in ids for place in apart.take([one])]
    assert all(place <= len(codec.decode(ids)) for place in whole)


@pytest.mark.parametrize("decoder", ["WordPiece", "none"])
def test_bytes_under_a_decoder_of_no_bytes_are_those_in_a_text(decoder: str) -> None:
    vocab = {word: token for token, word in enumerate(["[UNK]", "play", "##ing", "on", "."])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if decoder == "WordPiece":
        tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    codec = codec_of(tokenizer)
    ids = codec.encode("playing on. on.")
    assert b"".join(map(codec.token_bytes, ids)).decode() == f" {codec.decode(ids)}"
    assert codec.token_text(codec.added_tokens["[SEP]"]) == "[SEP]"


def test_tokens_of_the_same_text_are_all_named_apart(tmp_path: Path) -> None:
    sentence_piece().save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec(tmp_path)
    vocab = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    a, byte, spaced, half = (vocab[one] for one in ("a", "<0x61>", "▁a", "<0xF0>"))
    row = [(byte, -0.5), (a, -1.0), (spaced, -2.0), (half, -3.0)]
    names = TokenLabels(codec, as_ids=False)
    assert names.keyed(a, row) == {
        f"token_id:{byte}": -0.5,
        "a": -1.0,
        " a": -2.0,
        "bytes:\\xf0": -3.0,
    }
    assert list(names.keyed(half, row)) == ["a", f"token_id:{a}", " a", "bytes:\\xf0"]
    listed = names.listed([half], [-3.0], [row])[0]
    assert listed["bytes"] == [0xF0]
    assert [one["token"] for one in listed["top_logprobs"]] == ["a", "a", " a", "\ufffd"]
    assert names.listed([a], [None], [])[0]["top_logprobs"] == []
    by_id = TokenLabels(codec, as_ids=True)
    assert list(by_id.keyed(a, row)) == [f"token_id:{one}" for one, _ in row]
