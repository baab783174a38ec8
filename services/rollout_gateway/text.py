"""Text to token ids and back. Owns tokenizer, chat template and what the model directory says of end tokens.

What the model generated is kept as ids and never tokenised again; text is for people.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from paceline.errors import ConfigError, InvalidInput

CHARACTER_BYTES = 4
"""A character of UTF-8 is at most four byte tokens long."""
LONGEST_BROKEN = 16
"""Tokens held back at most while no whole character appears; broken bytes are given out after that."""


class TextCodec:
    """Tokenizer and chat template of one model directory."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError("no tokenizer in the model directory", seen=directory, allowed="tokenizer.json")
        self._tokenizer = Tokenizer.from_file(str(path))
        settings = _read_json(directory / "tokenizer_config.json")
        self._tokens = {key: _token_text(settings.get(key)) for key in ("bos_token", "eos_token", "pad_token")}
        self._template = _template(directory, settings)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text, with the special tokens the model puts around one (bos)."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, without special tokens; broken characters become U+FFFD."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """Text of one token, special ones by their name."""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Ids of a conversation under the model's chat template. Raises InvalidInput without one or when it refuses."""
        if self._template is None:
            raise InvalidInput("the model has no chat template", allowed="/v1/completions")
        try:
            text = self._template.render(messages=list(messages), add_generation_prompt=True, **self._tokens)
        except jinja2.TemplateError as error:
            raise InvalidInput(f"the chat template refused the messages: {error}") from error
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        with_special = self._tokenizer.encode("", add_special_tokens=True).ids
        # A template that does not write bos itself gets it from the tokenizer, once.
        front = with_special[:1] if with_special[:1] != ids[:1] else []
        return tuple(front + ids)

    def stream(self, stop: Sequence[str] = ()) -> TextStream:
        """Decoder of one growing response."""
        return TextStream(self, tuple(stop))


class TextStream:
    """Text of a growing response; holds back incomplete characters and what may become a stop string.

    Only a window of ids is decoded at a time: those of the last text given out, for what depends on them (spaces,
    bytes of one character), and those after it.
    """

    def __init__(self, codec: TextCodec, stop: tuple[str, ...]) -> None:
        self._codec = codec
        self._stop = stop
        self._window: list[int] = []
        self._known = 0  # ids of the window whose text is known
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these ids."""
        self._window += token_ids
        self._held += self._advance(final=False)
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def finish(self, matched_stop: str = "") -> str:
        """What `push` held back, cut before the stop string that ended the response."""
        text, self._held = self._held + self._advance(final=True), ""
        return text.partition(matched_stop)[0] if matched_stop else text

    def _advance(self, *, final: bool) -> str:
        """Text of the ids up to the last whole character; of all ids when final or when none is in sight."""
        before = self._codec.decode(self._window[: self._known])
        pending = len(self._window) - self._known
        for left_out in range(min(pending, CHARACTER_BYTES)):
            size = len(self._window) - left_out
            after = self._codec.decode(self._window[:size])
            if after.startswith(before) and not after.endswith("\N{REPLACEMENT CHARACTER}"):
                rest = self._give(size, after[len(before) :])
                return rest + self._advance(final=True) if final and left_out else rest
        if final or pending > LONGEST_BROKEN:
            return self._give(len(self._window), self._codec.decode(self._window[self._known :]))
        return ""

    def _give(self, size: int, text: str) -> str:
        """Ids below `size` have had their text given out; only the newest of them stay, as context."""
        self._window, self._known = self._window[self._known :], size - self._known
        return text


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` to hold back: from a whole `stop` inside, or a beginning of one at the end."""
    if stop in text:
        return len(text) - text.index(stop)
    return next((size for size in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _token_text(value: object) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _template(directory: Path, settings: Mapping[str, Any]) -> jinja2.Template | None:
    path = directory / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if not source:
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
    return environment.from_string(str(source))


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
