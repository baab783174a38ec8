"""Reads training data, JSONL or Parquet, into token sequences with a mask.

A record has one of these forms:

    {"messages": [{"role": ..., "content": ...}, ...]}     under the model's chat template
    {"prompt": "...", "response": "..."}                   as plain text
    {"input_ids": [...], "loss_mask": [...]}               as tokens; 1 marks the model's tokens
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import jinja2
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import ConfigError, InvalidInput
from paceline.tasks.rows import check_values, read_json

FORMS = (
    '{"messages": [...]}',
    '{"prompt": "...", "response": "..."}',
    '{"input_ids": [...], "loss_mask": [...]}',
)
SUFFIXES = (".jsonl", ".parquet")


class Record(BaseModel):
    """The fields of a record in the file."""

    model_config = ConfigDict(strict=True)


class MessageRecord(Record):
    """One message of a conversation; chat templates may read further fields."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: Any


class Conversation(Record):
    """A conversation under the model's chat template."""

    messages: list[MessageRecord] = Field(min_length=1)


class Completion(Record):
    """A prompt, with its answer if there is one."""

    prompt: str = Field(min_length=1)
    response: str | None = Field(default=None, min_length=1)


class TokenRecord(Record):
    """A tokenised sequence."""

    input_ids: list[Annotated[int, Field(lt=1 << 63)]] = Field(min_length=1)
    loss_mask: list[Literal[0, 1] | bool] | None = None


_KINDS: Mapping[str, type[Conversation | Completion | TokenRecord]] = {
    "messages": Conversation,
    "input_ids": TokenRecord,
    "prompt": Completion,
}
"""Record classes by their distinctive key."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence of n tokens."""

    token_ids: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    """[n] bool: the model's own tokens, which a drafter must predict; all False for a prompt
    without an answer.
    """

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def targets(self) -> int:
        """Number of positions that a drafter can learn from: a draft needs two tokens before it."""
        return int(self.mask[2:].sum())

    @property
    def prompt(self) -> npt.NDArray[np.int64]:
        """The tokens before the last answer; all tokens without an answer."""
        said = np.flatnonzero(self.mask)
        if not len(said):
            return self.token_ids
        gaps = np.flatnonzero(np.diff(said) > 1)
        return self.token_ids[: said[gaps[-1] + 1] if len(gaps) else said[0]]

    def cut(self, length: int) -> Example:
        """The first `length` tokens."""
        return self if len(self) <= length else Example(self.token_ids[:length], self.mask[:length])


class TextEncoder(Protocol):
    """Encodes text as tokens; it is created only when a record needs it.

    Both methods raise InvalidInput for text that cannot be encoded.
    """

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> Example:
        """Encodes a conversation."""
        ...

    def completion(self, prompt: str, response: str | None) -> Example:
        """Encodes a prompt and its answer."""
        ...


def read_samples(
    path: Path, encoder: Callable[[], TextEncoder], vocab_size: int, *, prompts: bool = False
) -> list[Example]:
    """All records of a file, or of a directory's .jsonl and .parquet files in order of name.

    `prompts`: accept records without an answer. Raises InvalidInput with file and line of a bad
    record, ConfigError for a path without data.
    """
    samples = []
    for file in data_files(path):
        unit = "row" if file.suffix == ".parquet" else "line"
        for number, record in _records(file):
            try:
                samples.append(_sample(record, encoder, vocab_size, prompts=prompts))
            except ConfigError:
                raise  # not a fault of this line
            except InvalidInput as error:
                message = f"{file}, {unit} {number}: {error.message}"
                raise InvalidInput(message, seen=error.seen, allowed=error.allowed) from error

    if not samples:
        raise ConfigError("the data holds no record", seen=path, allowed=" or ".join(FORMS))
    return samples


def data_files(path: Path) -> list[Path]:
    """The files of a path. Raises ConfigError for a path without files."""
    files = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files or not files[0].is_file() or files[0].suffix not in SUFFIXES:
        raise ConfigError(
            "no training data there", seen=path, allowed=f"a file or a directory of {SUFFIXES}"
        )
    return files


def fingerprint(samples: Iterable[Example]) -> str:
    """Hash of tokens and masks."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.token_ids.tobytes() + sample.mask.tobytes())
    return digest.hexdigest()[:16]


def _records(file: Path) -> Iterator[tuple[int, Any]]:
    if file.suffix == ".parquet":
        yield from enumerate(_parquet_rows(file), start=1)
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                try:
                    found = read_json(line)
                except (ValueError, RecursionError) as error:
                    raise InvalidInput(
                        f"{file}, line {number}: not JSON: {error}", seen=_short(line)
                    ) from error
                if isinstance(found, dict):
                    check_values(f"{file}, line {number}", found)
                yield number, found


def _parquet_rows(file: Path) -> Iterator[dict[str, Any]]:
    # The import is slow, and only Parquet needs it.
    from pyarrow import ArrowException, parquet

    try:
        for batch in parquet.ParquetFile(file).iter_batches():
            # A table has all columns in each row; columns without a value do not belong to the
            # record.
            yield from (
                {k: v for k, v in row.items() if v is not None} for row in batch.to_pylist()
            )
    except (ArrowException, OSError) as error:
        raise InvalidInput(f"{file} is no Parquet file: {error}") from error


def _sample(
    found: Any, encoder: Callable[[], TextEncoder], vocab_size: int, *, prompts: bool
) -> Example:
    sample = _example(_record(found), encoder, prompts=prompts)
    if (
        len(sample)
        and not 0 <= int(sample.token_ids.min()) <= int(sample.token_ids.max()) < vocab_size
    ):
        seen = (int(sample.token_ids.min()), int(sample.token_ids.max()))
        raise InvalidInput(
            "tokens outside the model's vocabulary", seen=seen, allowed=f"0 to {vocab_size - 1}"
        )
    if not prompts and not sample.mask.any():
        raise InvalidInput(
            "nothing to learn from: the model says nothing", allowed="an answer, or --regenerate"
        )
    return sample


def _record(found: Any) -> Conversation | Completion | TokenRecord:
    if not isinstance(found, dict):
        raise InvalidInput(
            "a record must be an object", seen=_short(found), allowed=" or ".join(FORMS)
        )
    kind = next((kind for key, kind in _KINDS.items() if key in found), None)
    if kind is None:
        raise InvalidInput(
            "a record of no known form", seen=sorted(found), allowed=" or ".join(FORMS)
        )
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidInput(f"{where}: {first['msg']}", seen=_short(first["input"])) from error


def _example(
    record: Conversation | Completion | TokenRecord,
    encoder: Callable[[], TextEncoder],
    *,
    prompts: bool,
) -> Example:
    if isinstance(record, Conversation):
        return encoder().chat([message.model_dump() for message in record.messages])
    answer = record.response if isinstance(record, Completion) else record.loss_mask
    if answer is None and not prompts:
        raise InvalidInput("a record has no response, or no loss_mask", allowed=" or ".join(FORMS))
    if isinstance(record, Completion):
        return encoder().completion(record.prompt, record.response)
    ids, mask = record.input_ids, record.loss_mask
    bits = [False] * len(ids) if mask is None else mask
    if len(bits) != len(ids):
        raise InvalidInput(
            "loss_mask and input_ids differ in length", seen=len(bits), allowed=len(ids)
        )
    return Example(np.array(ids, dtype=np.int64), np.array(bits, dtype=bool))


def _short(value: object) -> str:
    text = value.decode(errors="replace").strip() if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class ModelText:
    """Tokenizer and chat template of a model directory. Raises ConfigError where there is none."""

    def __init__(self, directory: Path, eos_token_ids: Sequence[int]) -> None:
        """`eos_token_ids`: end tokens of the model; a completion's answer ends with the first."""
        from transformers import AutoTokenizer  # seconds of import, needed for text alone

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"no tokenizer can be loaded from {directory}: {reason}",
                allowed='records with "input_ids"',
            ) from error
        self._eos = tuple(eos_token_ids)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> Example:
        """The tokens of a conversation. An answer counts as the model's if the template renders its
        beginning independently of later messages. Raises InvalidInput if no answer counts.
        """
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if messages[-1]["role"] != "assistant":
            whole = self._render(messages, answer=True)
            answers = []
        else:
            whole = self._render(messages)

        parts, done = list[tuple[str, bool]](), 0
        for i in answers:
            before, after = self._render(messages[:i], answer=True), self._render(messages[: i + 1])
            if whole.startswith(after) and after.startswith(before) and len(before) >= done:
                parts += [
                    (whole[done : len(before)], False),
                    (whole[len(before) : len(after)], True),
                ]
                done = len(after)

        if answers and not parts:
            raise InvalidInput(
                "the chat template does not begin an answer as it ends a prompt", seen=whole[-80:]
            )

        parts.append((whole[done:], False))
        return self._join([(self._encode(text), said) for text, said in parts])

    def completion(self, prompt: str, response: str | None) -> Example:
        """The prompt as the tokenizer begins a text; the answer ends with the model's end token."""
        begun = self._tokenizer(prompt, add_special_tokens=True)["input_ids"]
        # Some tokenizers end every text.
        while len(begun) > 1 and begun[-1] in self._eos:
            begun = begun[:-1]
        said = [] if response is None else [*self._encode(response), *self._eos[:1]]
        return self._join([(begun, False), (said, True)])

    def _render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = False) -> str:
        try:
            plain = [dict(message) for message in messages]
            return str(
                self._tokenizer.apply_chat_template(
                    plain, tokenize=False, add_generation_prompt=answer
                )
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise InvalidInput(f"the chat template refused the messages: {error}") from error

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _join(self, parts: Sequence[tuple[list[int], bool]]) -> Example:
        ids, mask = list[int](), list[bool]()
        for part, said in parts:
            ids += part
            # What a template writes after the end token was never generated.
            end = next((i + 1 for i, token in enumerate(part) if token in self._eos), len(part))
            mask += [said and i < end for i in range(len(part))]
        return Example(np.array(ids, dtype=np.int64), np.array(mask, dtype=bool))
