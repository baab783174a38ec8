"""Reads training data, JSONL or Parquet, into token sequences with a mask.

A record has one of these forms:

    {"messages": [{"role": ..., "content": ...}, ...]}     under the model's chat template
    {"prompt": "...", "response": "..."}                   as plain text
    {"input_ids": [...], "loss_mask": [...]}               as tokens; 1 marks the model's tokens
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jinja2
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import ConfigError, InvalidInput
from paceline.tasks.file import place_of, read_records

FORMS = (
    '{"messages": [...]}, {"prompt": "...", "response": "..."} or '
    '{"input_ids": [...], "loss_mask": [...]}'
)
SUFFIXES = (".jsonl", ".parquet")


class MessageRecord(BaseModel):
    """One message of a conversation; chat templates may read further fields."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: Any


class Record(BaseModel):
    """A record of one of the three forms; fields of the other forms are None."""

    model_config = ConfigDict(strict=True)
    messages: list[MessageRecord] | None = Field(default=None, min_length=1)
    prompt: str | None = Field(default=None, min_length=1)
    response: str | None = Field(default=None, min_length=1)
    input_ids: list[Annotated[int, Field(lt=1 << 63)]] | None = Field(default=None, min_length=1)
    loss_mask: list[Literal[0, 1] | bool] | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence of n tokens."""

    token_ids: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    """[n] bool: the model's own tokens, which a drafter must predict."""

    @classmethod
    def join(cls, parts: Sequence[tuple[Sequence[int], bool]]) -> Example:
        """A sequence from its parts: tokens, and whether the model wrote them."""
        ids = [token for part, _ in parts for token in part]
        mask = [own for part, own in parts for _ in part]
        return cls(np.array(ids, dtype=np.int64), np.array(mask, dtype=bool))

    def __len__(self) -> int:
        return len(self.token_ids)


def read_samples(path: Path, text: Callable[[], ModelText], vocab_size: int) -> list[Example]:
    """All records of a file, or of a directory's .jsonl and .parquet files in order of name.

    `text`: called for records of text. Raises InvalidInput with file and line of a bad record,
    ConfigError for a path without data.
    """
    files = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files or not files[0].is_file() or files[0].suffix not in SUFFIXES:
        message = "no training data there"
        raise ConfigError(message, seen=path, allowed=f"a file or a directory of {SUFFIXES}")
    samples = []
    for file in files:
        for number, found in read_records(file):
            try:
                samples.append(_sample(found, text, vocab_size))
            except ConfigError:
                raise  # not a fault of this line
            except InvalidInput as error:
                raise error.within(place_of(file, number)) from error

    if not samples:
        raise ConfigError("the data holds no record", seen=path, allowed=FORMS)
    return samples


def fingerprint(samples: Iterable[Example]) -> str:
    """Hash of tokens and masks."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.token_ids.tobytes() + sample.mask.tobytes())
    return digest.hexdigest()[:16]


def _sample(found: Mapping[str, object], text: Callable[[], ModelText], vocab_size: int) -> Example:
    try:
        record = Record.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        seen = repr(first["input"])[:80]
        raise InvalidInput(f"{where}: {first['msg']}", seen=seen) from error

    sample = _example(record, text, sorted(found))
    low, high = int(sample.token_ids.min(initial=0)), int(sample.token_ids.max(initial=0))
    if low < 0 or high >= vocab_size:
        span, allowed = (int(sample.token_ids.min()), high), f"0 to {vocab_size - 1}"
        raise InvalidInput("tokens outside the model's vocabulary", seen=span, allowed=allowed)
    if not sample.mask.any():
        allowed = "a response, or a loss_mask with ones"
        message = "no answer of the model to learn from"
        raise InvalidInput(message, seen=sorted(found), allowed=allowed)
    return sample


def _example(record: Record, text: Callable[[], ModelText], names: Sequence[str]) -> Example:
    if record.messages is not None:
        return text().chat([message.model_dump() for message in record.messages])
    if record.prompt is not None:
        return text().completion(record.prompt, record.response)
    if record.input_ids is None:
        raise InvalidInput("a record of no known form", seen=names, allowed=FORMS)
    mask = [False] * len(record.input_ids) if record.loss_mask is None else record.loss_mask
    if len(mask) != len(record.input_ids):
        seen, allowed = len(mask), len(record.input_ids)
        raise InvalidInput("loss_mask and input_ids differ in length", seen=seen, allowed=allowed)
    return Example(np.array(record.input_ids, dtype=np.int64), np.array(mask, dtype=bool))


class ModelText:
    """Tokenizer and chat template of a model directory. Raises ConfigError where there is none."""

    def __init__(self, directory: Path, eos_token_ids: Sequence[int]) -> None:
        """`eos_token_ids`: end tokens of the model; a completion's answer ends with the first."""
        from transformers import AutoTokenizer  # seconds of import, needed for text alone

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            message = f"no tokenizer can be loaded from {directory}: {reason}"
            raise ConfigError(message, allowed='records with "input_ids"') from error
        self._eos = tuple(eos_token_ids)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> Example:
        """The tokens of a conversation. An answer counts as the model's if the template renders its
        beginning independently of later messages. Raises InvalidInput if no answer of several
        counts.
        """
        whole, parts, done = self._render(messages), list[tuple[Sequence[int], bool]](), 0
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for i in answers:
            before, after = self._render(messages[:i], answer=True), self._render(messages[: i + 1])
            if whole.startswith(after) and after.startswith(before) and len(before) >= done:
                parts.append((self._encode(whole[done : len(before)]), False))
                own = self._encode(whole[len(before) : len(after)])
                # The template's text after the end token was never generated.
                end = next((i for i, token in enumerate(own, 1) if token in self._eos), len(own))
                parts += [(own[:end], True), (own[end:], False)]
                done = len(after)
        if answers and not parts:
            raise InvalidInput(
                "the chat template does not begin an answer as it ends a prompt", seen=whole[-80:]
            )
        return Example.join([*parts, (self._encode(whole[done:]), False)])

    def completion(self, prompt: str, response: str | None) -> Example:
        """The prompt as the tokenizer begins a text; the answer ends with the model's end token."""
        begun = self._tokenizer(prompt, add_special_tokens=True)["input_ids"]
        # Some tokenizers end every text.
        while len(begun) > 1 and begun[-1] in self._eos:
            begun = begun[:-1]
        own = [] if response is None else [*self._encode(response), *self._eos[:1]]
        return Example.join([(begun, False), (own, True)])

    def _render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = False) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=answer,
                )
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise InvalidInput(f"the chat template rejects the messages: {error}") from error

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
