"""Structured output under every family of tokenizers: the decoded text matches the request."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unicodedata import category

import jsonschema_rs
import numpy as np
import pytest
from tokenizer_families import FAMILIES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from paceline.errors import InvalidInput
from paceline.models.config import ModelConfig, read_config
from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.requests.grammars import GrammarMasks
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.services.rollout_gateway.engines.requests.tokenizer import token_bytes
from paceline.services.rollout_gateway.engines.sampling import Sampling

DEMO = Path(__file__).parents[5] / "examples" / "demo" / "policy_start"
TEXTS = [
    'hello wörld, größe naïve 日本語 αβγ 😀👍🏽 {"a": [1, 2.5, true, null]} 0123456789-',
    "the cat sat on the mat 日本 猫 ñandú été \\ / : ; ! ? ( ) < > _ # % & * + = ~",
] * 4
SPECIAL = ["<unk>", "</s>"]
PADDING = 37


def family_of(name: str) -> Tokenizer:
    return FAMILIES[name](SPECIAL, TEXTS)


def end_of(tokenizer: Tokenizer) -> int:
    return int(tokenizer.token_to_id("</s>"))


def characters_left_as_they_are() -> Tokenizer:
    """GPT-2's alphabet behind a decoder that lacks it."""
    tokenizer = family_of("byte level")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


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
    config = replace(read_config(DEMO), vocab_size=size, eos_token_ids=(end_of(tokenizer),))
    return GrammarMasks(config, directory), config


def draw(masks: GrammarMasks, vocab: int, seed: int, **demand: Any) -> list[int]:
    """Draw the tokens of a response evenly among the allowed tokens; its end token is left out."""
    sampling = Sampling(seed=seed, max_tokens=400, **demand)
    masks.check(sampling)
    (end,) = masks._eos
    sequence = RunningSequence(Request(seed, (0,), sampling), {end}, 400)
    chance = random.Random(seed)
    while True:
        assert masks.follow(sequence), sequence.error
        bits = np.unpackbits(masks._followed[sequence].allowed, bitorder="little")
        allowed = np.nonzero(bits[:vocab])[0].tolist()
        ends = end in allowed and (len(sequence.tokens) > 60 or chance.random() < 0.3)
        token = end if ends or allowed == [end] else chance.choice([t for t in allowed if t != end])
        if token == end:
            masks.drop([sequence])
            return list(sequence.tokens)
        sequence.tokens.append(token)
        assert len(sequence.tokens) < 400


def _counted(text: str) -> str:
    """Write `_` for every word character of Unicode that Python's `re` does not count: marks and
    circled letters.
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
    tokenizer = family_of(family)
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


@pytest.mark.slow
def test_one_text_only_is_told_in_the_tokens_of_the_tokenizer(tmp_path: Path) -> None:
    for family in FAMILIES:
        tokenizer = family_of(family)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_of_tokens_are_those_of_the_text_that_the_decoder_makes(family: str) -> None:
    tokenizer = family_of(family)
    spelled = token_bytes(tokenizer)
    assert len(spelled) == max(tokenizer.get_vocab().values()) + 1
    chance = random.Random(7)
    for text in (*TEXTS[:2], "x 😀 y", "日本 ñ"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        joined = b"".join(spelled[one] for one in ids).decode()
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert joined.removeprefix(" ") == text.removeprefix(" ")
    special = {tokenizer.token_to_id(one) for one in SPECIAL}
    plain = [one for one in range(len(spelled)) if spelled[one].isascii() and one not in special]
    for _ in range(200):
        ids = chance.choices(plain, k=6)
        joined = b"".join(spelled[one] for one in ids[1:]).decode()
        assert tokenizer.decode(ids).endswith(joined)


def test_halves_of_characters_keep_their_own_bytes() -> None:
    for family in FAMILIES:
        spelled = token_bytes(family_of(family))
        assert {bytes([byte]) for byte in (0xF0, 0x9F, 0x98, 0x80)} <= set(spelled), family


def test_an_end_token_that_is_no_special_one_is_never_a_part_of_the_text(tmp_path: Path) -> None:
    state = json.loads(family_of("byte level").to_str())
    for one in state["added_tokens"]:
        one["special"] = one["content"] != "</s>" and one["special"]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    masks, config = masks_of(tokenizer, tmp_path)
    for seed in range(6):
        told = draw(masks, config.vocab_size, seed, regex="</s>x")
        assert tokenizer.decode(told) == "</s>x"
        assert end_of(tokenizer) not in told
    masks.close()
