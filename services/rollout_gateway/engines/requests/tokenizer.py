"""Loads the tokenizer of a model directory, and spells single tokens in bytes.

A decoder's text cannot represent half a character, so this module applies the decoder's stages
itself. `token_bytes` compares the result with the decoder. Imports no torch.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

from paceline.errors import InvalidInput
from paceline.models.reading import TextFiles

Spelled = str | bytes
"""A token between two stages: bytes after a stage has converted it, text before."""
_Stage = Callable[[Spelled], Spelled]
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Byte for each character of GPT-2's alphabet.

    Printable bytes map to themselves; the remaining bytes follow in order from 256 on.
    """
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(itself)]
    found = {chr(byte): byte for byte in itself}
    found.update({chr(256 + index): byte for index, byte in enumerate(others)})
    assert set(found) == set(pre_tokenizers.ByteLevel.alphabet())
    return found


_ALPHABET = _byte_alphabet()


class TokenSpelling:
    """Spells the tokens of one tokenizer one at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises InvalidInput naming a decoder stage that is not supported."""
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        stages = _flat(json.loads(decoder.__getstate__()) if decoder else {"type": "null"})
        self.kinds = tuple(str(stage["type"]) for stage in stages)
        """Stages of the decoder by their type."""
        fused = self.kinds.index("Fuse") if "Fuse" in self.kinds else len(stages)
        self._stages = [_stage(one, fused=index > fused) for index, one in enumerate(stages)]

    def __call__(self, token_id: int) -> bytes:
        """Bytes of a token in the middle of a text.

        A special token gives the bytes of its name; an id without a token gives no bytes.
        """
        spelled: Spelled | None = self._tokenizer.id_to_token(token_id)
        if spelled is None:
            return b""
        for stage in self._stages:
            spelled = stage(spelled)
        return spelled.encode() if isinstance(spelled, str) else spelled


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """[V] bytes of every token id in the middle of a text; a special token gives its name.

    Raises InvalidInput naming the decoder where the tokenizer's own decoder gives another text.
    """
    spelling = TokenSpelling(tokenizer)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    found = [spelling(token) for token in range(max(vocabulary.values(), default=-1) + 1)]
    plain = _plain_token(tokenizer, found)
    texts = _texts(tokenizer, [[plain, token, plain] for token in range(len(found))])
    around = found[plain].decode()
    before = _texts(tokenizer, [[plain]])[0]
    for token, text in enumerate(texts):
        wanted = before + found[token].decode(errors="replace") + around
        if text != wanted and found[token]:
            stages = " + ".join(spelling.kinds)
            message = f"token {token} of the tokenizer cannot be spelled in bytes: its decoder"
            message += f" {stages} makes another text of it"
            raise InvalidInput(message, seen=repr(text), allowed=repr(wanted))
    return found


def lost_at_front(tokenizer: Tokenizer, spelled: Sequence[bytes]) -> list[int]:
    """Tokens with another text at the beginning of a text than `spelled` [V], their bytes in the
    middle.

    Many decoders omit the first space.
    """
    plain = _plain_token(tokenizer, spelled)
    texts = _texts(tokenizer, [[token, plain] for token in range(len(spelled))])
    behind = spelled[plain].decode()
    wanted = [one.decode(errors="replace") + behind for one in spelled]
    return [token for token, text in enumerate(texts) if text != wanted[token]]


def _flat(stage: dict[str, Any]) -> list[dict[str, Any]]:
    if stage.get("type") != "Sequence":
        return [stage]
    return [one for inner in stage["decoders"] for one in _flat(inner)]


def _texts(tokenizer: Tokenizer, ids: list[list[int]]) -> list[str]:
    texts: list[str] = tokenizer.decode_batch(ids, skip_special_tokens=False)
    return texts


def _plain_token(tokenizer: Tokenizer, spelled: Sequence[bytes]) -> int:
    """The shortest token of ASCII letters or digits, else of ASCII characters, to put around a
    token.

    Byte tokens are excluded, because a decoder joins neighbouring byte tokens into one character.
    """
    plain = [token for token, one in enumerate(spelled) if one and one.isascii()]
    names = {token: tokenizer.id_to_token(token) for token in plain}
    ascii_only = [token for token, name in names.items() if not _BYTE.fullmatch(name)]
    words = [token for token in ascii_only if spelled[token].strip().isalnum()]
    if not ascii_only:
        raise InvalidInput("the tokenizer holds no token of ASCII characters", allowed="some")
    return min(words or ascii_only, key=lambda token: len(spelled[token]))


# ---- stages


def _stage(settings: dict[str, Any], *, fused: bool) -> _Stage:
    """The function of a decoder stage. Raises InvalidInput for an unknown stage.

    fused: the stage gets the whole text at once.
    """
    match settings.get("type"):
        case "ByteLevel":
            return _byte_level
        case "ByteFallback":
            return _byte_fallback
        case "Fuse":
            return _same
        case "Metaspace":
            return _of_text(lambda token: token.replace(settings["replacement"], " "))
        case "Replace":
            return _replacing(settings["pattern"], settings["content"])
        case "Strip":  # after Fuse, it strips only the ends of the whole text
            return _same if fused else _of_text(lambda token: _stripped(token, settings))
        case kind:
            message = f"tokens cannot be spelled in bytes: the tokenizer's decoder is {kind}"
            allowed = "ByteLevel, ByteFallback, Fuse, Metaspace, Replace, Strip"
            raise InvalidInput(message, seen=kind, allowed=allowed)


def _of_text(change: Callable[[str], str]) -> _Stage:
    return lambda token: change(token) if isinstance(token, str) else token


def _same(token: Spelled) -> Spelled:
    return token


def _byte_level(token: Spelled) -> Spelled:
    if isinstance(token, bytes):
        return token
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:  # an added token
        return token.encode()


def _byte_fallback(token: Spelled) -> Spelled:
    match = _BYTE.fullmatch(token) if isinstance(token, str) else None
    return token if match is None else bytes([int(match[1], 16)])


def _replacing(pattern: dict[str, str], content: str) -> _Stage:
    if "String" in pattern:
        return _of_text(lambda token: token.replace(pattern["String"], content))
    stage = decoders.Replace(Regex(pattern["Regex"]), content)
    return _of_text(lambda token: str(stage.decode([token])))


def _stripped(token: str, settings: dict[str, Any]) -> str:
    content = settings["content"]
    for _ in range(settings["start"]):
        token = token.removeprefix(content)
    for _ in range(settings["stop"]):
        token = token.removesuffix(content)
    return token


def read_tokenizers(files: TextFiles) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer of a directory, and a twin for text in the middle of another text.

    The twin omits the space that some tokenizers put before a first word. Both are one object where
    nothing differs. Raises ConfigError for a directory without a tokenizer.
    """
    whole, spelled = files.tokenizer(), files.spelled
    stages = ("normalizer", "pre_tokenizer")
    within = {**spelled, **{name: _without_prefix(spelled.get(name)) for name in stages}}
    if all(within[name] == spelled.get(name) for name in stages):
        return whole, whole
    return whole, files.tokenizer(within)


def _without_prefix(stage: Any) -> Any:
    """A stage of a tokenizer that puts nothing before a text."""
    if not isinstance(stage, dict):
        return stage
    if stage.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    found = dict(stage)
    for inner in ("normalizers", "pretokenizers"):
        if inner in found:
            found[inner] = [_without_prefix(one) for one in found[inner]]
    if found.get("add_prefix_space"):
        found["add_prefix_space"] = False
    if found.get("type") == "Metaspace":
        found["prepend_scheme"] = "never"
    return found
