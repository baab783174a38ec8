"""Structured output under every family of tokenizers: the decoded text is what was asked for."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unicodedata import category

import jsonschema_rs
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from paceline.errors import InvalidInput
from paceline.models.config import ModelConfig, read_config
from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.requests.grammars import GrammarMasks
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.services.rollout_gateway.engines.requests.token_bytes import token_bytes
from paceline.services.rollout_gateway.engines.sampling import Sampling

DEMO = Path(__file__).parents[5] / "examples" / "demo" / "policy_start"
TEXTS = [
    'hello wörld, größe naïve 日本語 αβγ 😀👍🏽 {"a": [1, 2.5, true, null]} 0123456789-',
    "the cat sat on the mat 日本 猫 ñandú été \\ / : ; ! ? ( ) < > _ # % & * + = ~",
] * 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<unk>", "</s>"]
END = 1
PADDING = 37
FALLBACK = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def characters_for_bytes() -> Tokenizer:
    """As transformers' conversion of GGUF files writes Llama 3's."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Replace("▁", " "),
            decoders.ByteLevel(),
        ]
    )
    return tokenizer


def characters_left_as_they_are() -> Tokenizer:
    """GPT-2's alphabet behind a decoder that does not know it."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def sentence_piece(*, strip: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if strip else []), normalizers.Replace(" ", "▁")]
    )
    stages = [*FALLBACK, *([decoders.Strip(" ", 1, 0)] if strip else [])]
    tokenizer.decoder = decoders.Sequence(stages)
    trainer = trainers.BpeTrainer(
        vocab_size=430,
        special_tokens=[*SPECIAL, *BYTES],
        limit_alphabet=90,
        show_progress=False,
    )
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in TEXTS], trainer)
    return _bytes_unmarked(tokenizer)


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    state = json.loads(tokenizer.to_str())
    state["model"]["vocab"] += [[one, -20.0] for one in BYTES]
    state["model"]["byte_fallback"] = True
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    )
    return tokenizer


def _bytes_unmarked(tokenizer: Tokenizer) -> Tokenizer:
    """The byte tokens as the model's own, not as special ones."""
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [one for one in state["added_tokens"] if one["content"] in SPECIAL]
    return Tokenizer.from_str(json.dumps(state))


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "characters for bytes": characters_for_bytes,
    "SentencePiece": lambda: sentence_piece(strip=True),
    "SentencePiece without a prefix": lambda: sentence_piece(strip=False),
    "Unigram": unigram,
}


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def masks_of(tokenizer: Tokenizer, directory: Path) -> tuple[GrammarMasks, ModelConfig]:
    tokenizer.save(str(directory / "tokenizer.json"))
    size = max(tokenizer.get_vocab().values()) + 1 + PADDING
    config = replace(read_config(DEMO), vocab_size=size, eos_token_ids=(END,))
    return GrammarMasks(config, directory), config


def draw(masks: GrammarMasks, vocab: int, seed: int, **demand: Any) -> list[int]:
    """Tokens of a response, each drawn evenly among those allowed; its end token is left out."""
    sampling = Sampling(seed=seed, max_tokens=400, **demand)
    masks.check(sampling)
    sequence = RunningSequence(Request(seed, (0,), sampling), {END}, 400)
    chance = random.Random(seed)
    while True:
        masks.follow(sequence)
        bits = np.unpackbits(masks._followed[sequence].allowed, bitorder="little")
        allowed = np.nonzero(bits[:vocab])[0].tolist()
        ends = END in allowed and (len(sequence.tokens) > 60 or chance.random() < 0.3)
        token = END if ends or allowed == [END] else chance.choice([t for t in allowed if t != END])
        if token == END:
            masks.drop([sequence])
            return list(sequence.tokens)
        sequence.tokens.append(token)
        assert len(sequence.tokens) < 400


def _counted(text: str) -> str:
    """The text with `_` for every character that Unicode counts among those of words and
    Python's `re` does not: marks and circled letters.
    """
    circled = range(ord("Ⓐ"), ord("ⓩ") + 1)
    return "".join(
        "_" if category(one).startswith("M") or ord(one) in circled else one for one in text
    )


SCHEMA = {
    "type": "object",
    "properties": {
        "größe": {"enum": ["日本語", "été", "😀👍🏽", "plain"]},
        "said": {"type": "string", "minLength": 2, "maxLength": 5},
    },
    "required": ["größe", "said"],
    "additionalProperties": False,
}
REGEXES = (r"\w{4}", r"[^a-z]{3}", r".{2,4}", r" ?[😀-😏é日]{2}x")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_response_is_what_was_asked_for_in_characters(family: str, tmp_path: Path) -> None:
    tokenizer = FAMILIES[family]()
    masks, config = masks_of(tokenizer, tmp_path)
    valid = jsonschema_rs.validator_for(SCHEMA)
    try:
        for seed in range(12):
            for regex in REGEXES:
                text = tokenizer.decode(draw(masks, config.vocab_size, seed, regex=regex))
                assert re.fullmatch(regex, _counted(text)), (regex, text)
            told = draw(masks, config.vocab_size, seed, json_schema=json.dumps(SCHEMA))
            assert valid.is_valid(json.loads(tokenizer.decode(told))), tokenizer.decode(told)
            choice = ("größer", "日本語😀", "grau", " naïve")[: 3 if seed % 2 else 4]
            told = draw(masks, config.vocab_size, seed, choice=choice)
            assert tokenizer.decode(told) in choice
    finally:
        masks.close()


def test_one_text_only_is_told_in_the_tokens_of_the_tokenizer(tmp_path: Path) -> None:
    for family, build in FAMILIES.items():
        tokenizer = build()
        masks, config = masks_of(tokenizer, tmp_path)
        text = "größe日本語"
        told = draw(masks, config.vocab_size, 1, choice=(text,))
        masks.close()
        first = tokenizer.encode("x" + text, add_special_tokens=False).ids
        tail = told[2:]
        assert first[-len(tail) :] == tail, family


def test_characters_that_a_decoder_leaves_as_they_are_count_as_they_are(tmp_path: Path) -> None:
    tokenizer = characters_left_as_they_are()
    masks, config = masks_of(tokenizer, tmp_path)
    for seed in range(12):
        text = tokenizer.decode(draw(masks, config.vocab_size, seed, regex=r"\w{4}"))
        assert re.fullmatch(r"\w{4}", _counted(text)), text
    masks.close()


@pytest.mark.parametrize("decoder", ["WordPiece", "null", "CTC", "BPEDecoder"])
def test_a_decoder_of_no_bytes_is_refused_by_name(decoder: str, tmp_path: Path) -> None:
    tokenizer = word_piece()
    state = json.loads(tokenizer.to_str())
    if decoder != "WordPiece":
        made = {"CTC": decoders.CTC(), "BPEDecoder": decoders.BPEDecoder("</w>"), "null": None}
        one = made[decoder]
        state["decoder"] = None if one is None else json.loads(one.__getstate__())
    masks, _ = masks_of(Tokenizer.from_str(json.dumps(state)), tmp_path)
    with pytest.raises(InvalidInput, match=rf"structured_outputs.regex.*\b{decoder}\b"):
        masks.check(Sampling(seed=1, max_tokens=8, regex="a+"))


@pytest.mark.parametrize("family", [*FAMILIES, "WordPiece"])
def test_bytes_of_tokens_are_those_of_the_text_that_the_decoder_makes(family: str) -> None:
    tokenizer = word_piece() if family == "WordPiece" else FAMILIES[family]()
    spelled = token_bytes(tokenizer)
    assert len(spelled) == max(tokenizer.get_vocab().values()) + 1
    chance = random.Random(7)
    for text in (*TEXTS[:2], "x 😀 y", "日本 ñ"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        joined = b"".join(spelled[one] for one in ids).decode()
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert joined.removeprefix(" ") == text.removeprefix(" ")
    plain = [one for one in range(len(spelled)) if spelled[one].isascii() and one > 1]
    for _ in range(200):
        ids = chance.choices(plain, k=6)
        joined = b"".join(spelled[one] for one in ids[1:]).decode()
        assert tokenizer.decode(ids).endswith(joined)


def test_halves_of_characters_keep_their_own_bytes() -> None:
    for family, build in FAMILIES.items():
        spelled = token_bytes(build())
        assert {bytes([byte]) for byte in (0xF0, 0x9F, 0x98, 0x80)} <= set(spelled), family


def test_an_end_token_that_is_no_special_one_is_never_a_part_of_the_text(tmp_path: Path) -> None:
    state = json.loads(byte_level().to_str())
    for one in state["added_tokens"]:
        one["special"] = one["id"] != END and one["special"]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    masks, config = masks_of(tokenizer, tmp_path)
    for seed in range(6):
        told = draw(masks, config.vocab_size, seed, regex="</s>x")
        assert tokenizer.decode(told) == "</s>x"
        assert END not in told
    masks.close()
