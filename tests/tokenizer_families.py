"""Tiny tokenizers of the common model families, trained on a few lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = (
    "system user assistant tool the sum of 12 and 30 is 42, you are a calculator; think before "
    "you answer",
    '{"name": "add", "arguments": {"a": 12, "b": 30}} {"name": "look", "parameters": {"word": "über 東京"}}',
    "<tool_call>\n</tool_call> <tool_response>\n</tool_response> <think>\n\n</think> [INST] "
    "[/INST] hello world",
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
Family = Callable[[list[str], Sequence[str]], Tokenizer]
"""Makes a tokenizer with these special tokens, trained on these texts."""


def byte_level(
    special: list[str], texts: Sequence[str] = CORPUS, *, prefix: bool = False
) -> Tokenizer:
    """A tokenizer of GPT-2's kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return _with(tokenizer, special)


def characters_for_bytes(special: list[str], texts: Sequence[str] = CORPUS) -> Tokenizer:
    """GPT-2's alphabet behind a ByteFallback decoder, as transformers' conversion of GGUF files
    writes Llama 3's.
    """
    tokenizer = byte_level(special, texts)
    stages = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]
    tokenizer.decoder = decoders.Sequence([*stages, decoders.ByteLevel()])
    return tokenizer


def metaspace(special: list[str], scheme: str, texts: Sequence[str] = CORPUS) -> Tokenizer:
    """A tokenizer of SentencePiece's kind, with bytes for text without a piece."""
    tokenizer = _unknown_as_bytes(texts, strip=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return _with(tokenizer, special)


def prepending(special: list[str], texts: Sequence[str] = CORPUS) -> Tokenizer:
    """The same, but the normalizer puts the space before the text, as in the first Llamas."""
    tokenizer = _unknown_as_bytes(texts, strip=True)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return _with(tokenizer, special)


def unprefixed(special: list[str], texts: Sequence[str] = CORPUS) -> Tokenizer:
    """The same without a space before the text."""
    tokenizer = _unknown_as_bytes(texts, strip=False)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return _with(tokenizer, special)


def unigram(special: list[str], texts: Sequence[str] = CORPUS) -> Tokenizer:
    """A Unigram model with bytes for unknown characters."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    spelled = json.loads(tokenizer.to_str())
    spelled["model"]["vocab"] += [[one, -20.0] for one in BYTES]
    spelled["model"]["byte_fallback"] = True
    return _with(Tokenizer.from_str(json.dumps(spelled)), special)


FAMILIES: dict[str, Family] = {
    "byte level": byte_level,
    "characters for bytes": characters_for_bytes,
    "metaspace with bytes": lambda special, texts: metaspace(special, "first", texts),
    "prepended space with bytes": prepending,
    "bytes without a prefix": unprefixed,
    "unigram": unigram,
}


def _unknown_as_bytes(texts: Sequence[str], *, strip: bool) -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    spelled = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", *BYTES, *spelled["vocab"]]
    merges = [tuple(pair) for pair in spelled["merges"]]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*stages, *([decoders.Strip(" ", 1, 0)] * strip)])
    return tokenizer


def _with(tokenizer: Tokenizer, special: list[str]) -> Tokenizer:
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in special]
    )
    return tokenizer


def add_bos(tokenizer: Tokenizer, bos: str) -> None:
    """The tokenizer with this token before every text."""
    token_id = tokenizer.token_to_id(bos)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, token_id)]
    )
