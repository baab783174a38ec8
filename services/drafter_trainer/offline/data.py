"""Reads training data, JSONL or Parquet, into token sequences with a mask.

A record is one of
    {"messages": [{"role": ..., "content": ...}, ...]}     under the model's chat template
    {"prompt": "...", "response": "..."}                   as plain text
    {"input_ids": [...], "loss_mask": [...]}               ready made; 1 marks what the model said
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError, InvalidInput

FORMS = (
    '{"messages": [...]}',
    '{"prompt": "...", "response": "..."}',
    '{"input_ids": [...], "loss_mask": [...]}',
)
SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence of n tokens."""

    token_ids: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    """[n]: tokens the model said, which are what a drafter is to guess; False everywhere for a
    prompt alone.
    """

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def targets(self) -> int:
        """Positions a drafter can learn from: a draft needs two tokens before it."""
        return int(self.mask[2:].sum())

    @property
    def prompt(self) -> npt.NDArray[np.int64]:
        """What stands before the last answer; everything where there is none."""
        said = np.flatnonzero(self.mask)
        if not len(said):
            return self.token_ids
        gaps = np.flatnonzero(np.diff(said) > 1)
        return self.token_ids[: said[gaps[-1] + 1] if len(gaps) else said[0]]

    def cut(self, length: int) -> Example:
        """Its first `length` tokens."""
        return self if len(self) <= length else Example(self.token_ids[:length], self.mask[:length])


class TextEncoder(Protocol):
    """Text into tokens; made only when a record needs it.

    Both raise InvalidInput for text that cannot be encoded.
    """

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> Example:
        """A conversation."""
        ...

    def completion(self, prompt: str, response: str | None) -> Example:
        """A prompt and its answer."""
        ...


def read_samples(
    path: Path, encoder: Callable[[], TextEncoder], vocab_size: int, *, prompts: bool = False
) -> list[Example]:
    """All records of a file, or of the .jsonl and .parquet files of a directory in the order of
    their names.

    prompts: records without an answer are welcome. Raises InvalidInput naming file and line of a
    bad record, ConfigError for a path without data.
    """
    samples = []
    for file in data_files(path):
        unit = "row" if file.suffix == ".parquet" else "line"
        for number, record in _records(file):
            try:
                samples.append(_sample(record, encoder, vocab_size, prompts=prompts))
            except ConfigError:
                raise  # not this line's fault
            except InvalidInput as error:
                message = f"{file}, {unit} {number}: {error.message}"
                raise InvalidInput(message, seen=error.seen, allowed=error.allowed) from error
    if not samples:
        raise ConfigError("the data holds no record", seen=path, allowed=" or ".join(FORMS))
    return samples


def data_files(path: Path) -> list[Path]:
    """The files of a path. Raises ConfigError when there are none."""
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
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    raise InvalidInput(
                        f"{file}, line {number}: not JSON: {error}", seen=_short(line)
                    ) from error


def _parquet_rows(file: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet  # optional: only who has such files needs it
    except ImportError as error:
        raise ConfigError(
            "Parquet files need pyarrow", seen=file, allowed="pip install pyarrow, or JSONL"
        ) from error
    try:
        for batch in parquet.ParquetFile(file).iter_batches():
            # A table has all columns in each row; those without a value are not part of its record.
            yield from (
                {k: v for k, v in row.items() if v is not None} for row in batch.to_pylist()
            )
    except (ArrowException, OSError) as error:
        raise InvalidInput(f"{file} is no Parquet file: {error}") from error


def _sample(
    record: Any, encoder: Callable[[], TextEncoder], vocab_size: int, *, prompts: bool
) -> Example:
    if not isinstance(record, dict):
        raise InvalidInput(
            "a record must be an object", seen=_short(record), allowed=" or ".join(FORMS)
        )
    if "messages" in record:
        sample = encoder().chat(_messages(record["messages"]))
    elif "input_ids" in record:
        sample = _ready_made(record, prompts=prompts)
    elif "prompt" in record:
        sample = encoder().completion(_text(record, "prompt"), _response(record, prompts=prompts))
    else:
        raise InvalidInput(
            "a record of no known form", seen=sorted(record), allowed=" or ".join(FORMS)
        )
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


def _messages(value: object) -> list[dict[str, Any]]:
    allowed = "a list of objects with role and content"
    if not isinstance(value, list) or not value:
        raise InvalidInput("messages must be a list", seen=_short(value), allowed=allowed)
    for message in value:
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or "content" not in message
        ):
            raise InvalidInput("a message is not one", seen=_short(message), allowed=allowed)
    return value


def _ready_made(record: Mapping[str, Any], *, prompts: bool) -> Example:
    ids = _integers(record, "input_ids")
    mask = (
        np.zeros_like(ids)
        if prompts and "loss_mask" not in record
        else _integers(record, "loss_mask")
    )
    if len(mask) != len(ids):
        raise InvalidInput(
            "loss_mask and input_ids differ in length", seen=len(mask), allowed=len(ids)
        )
    if not np.isin(mask, (0, 1)).all():
        raise InvalidInput(
            "loss_mask holds other numbers than 0 and 1",
            seen=_short(record["loss_mask"]),
            allowed="0, 1",
        )
    return Example(ids, mask.astype(bool))


def _integers(record: Mapping[str, Any], key: str) -> npt.NDArray[np.int64]:
    value = record.get(key, "(none)")
    if (
        not isinstance(value, list)
        or not value
        or any(type(one) not in (int, bool) for one in value)
    ):
        raise InvalidInput(
            f"{key} must be a list of integers", seen=_short(value), allowed=FORMS[-1]
        )
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError as error:
        raise InvalidInput(f"{key} holds a number beyond 64 bits", seen=_short(value)) from error


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"{key} must be text", seen=_short(value), allowed=FORMS[1])
    return value


def _response(record: Mapping[str, Any], *, prompts: bool) -> str | None:
    return None if prompts and "response" not in record else _text(record, "response")


def _short(value: object) -> str:
    text = value.decode(errors="replace").strip() if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
