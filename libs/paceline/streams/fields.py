"""Declares the entries of both streams: their header fields and the tensors of their payload.

Encoders and decoders use these tables, and docs/streams.md is generated from them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

from paceline.errors import DataLoss
from paceline.tagged_json import from_object, to_object
from paceline.tensors import NamedTensor
from paceline.trajectory import SpeculationStats

SCHEMA_VERSION = "5"


@dataclass(frozen=True, slots=True)
class TextForm:
    """Text form of a value in a header field."""

    word: str
    write: Callable[[Any], str]
    read: Callable[[str], Any]


TEXT = TextForm("text", str, str)
WHOLE = TextForm("integer", str, int)
NUMBER = TextForm("number", lambda value: repr(float(value)), float)
PERHAPS = TextForm(
    "number, or empty",
    lambda value: "" if value is None else repr(float(value)),
    lambda text: float(text) if text else None,
)
COUNTERS = TextForm(
    "JSON object",
    lambda stats: json.dumps(to_object(stats), separators=(",", ":")),
    lambda text: from_object(SpeculationStats, json.loads(text)),
)
_FLAGS = ("reused", "stale")


def _written_way(arm: str, numbers: str, *flags: bool) -> list[str]:
    return [arm, numbers, *(name for name, there in zip(_FLAGS, flags, strict=True) if there)]


def _read_way(arm: str, numbers: str, *flags: str) -> tuple[str, str, bool, bool]:
    if not set(flags) <= set(_FLAGS):
        raise ValueError(f"flags of a way: {flags}")
    return str(arm), str(numbers), "reused" in flags, "stale" in flags


NUMBERS = TextForm(
    "JSON object of numbers",
    lambda numbers: json.dumps(dict(numbers), separators=(",", ":")),
    lambda text: {name: float(number) for name, number in dict(json.loads(text)).items()},
)
WAYS = TextForm(
    "JSON list of lists: arm, number format, and the set flags among `reused` and `stale`",
    lambda ways: json.dumps([_written_way(*way) for way in ways], separators=(",", ":")),
    lambda text: [_read_way(*way) for way in json.loads(text)],
)


_getter = cache(attrgetter)  # by field name: about twenty names, each used in every entry


@dataclass(frozen=True, slots=True)
class HeaderField:
    """One field of an entry's header."""

    name: str
    form: TextForm
    meaning: str
    source: str = ""  # the noun's field, dotted; empty: computed by the encoder


@dataclass(frozen=True, slots=True)
class PayloadTensor:
    """One tensor of an entry's payload."""

    name: str
    dtype: str  # safetensors dtype name; empty: from the header
    shape: tuple[str, ...]
    meaning: str


@dataclass(frozen=True, slots=True)
class EntryLayout:
    """One kind of entry."""

    stream: str
    group: str  # the consumer group that reads it
    header: tuple[HeaderField, ...]
    payload: tuple[PayloadTensor, ...]  # in the order of their bytes

    def write_header(self, noun: object, **computed: object) -> dict[str, str]:
        """The header of a noun's entry; `computed` holds the fields without a source."""
        computed["schema_version"] = SCHEMA_VERSION
        return {
            one.name: one.form.write(
                _getter(one.source)(noun) if one.source else computed[one.name]
            )
            for one in self.header
        }

    def read_header(self, fields: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Values by the noun's field, and computed values by name.

        Raises DataLoss when the header has another layout or lacks a field, ValueError when a field
        has another form.
        """
        if fields.get("schema_version") != SCHEMA_VERSION:
            seen = fields.get("schema_version")
            raise DataLoss("entry has another layout", seen=seen, allowed=SCHEMA_VERSION)
        missing = [one.name for one in self.header if one.name not in fields]
        if missing:
            raise DataLoss(f"an entry of {self.stream} lacks fields", seen=", ".join(missing))
        read = [(one, one.form.read(fields[one.name])) for one in self.header]
        return (
            {one.source: value for one, value in read if one.source},
            {one.name: value for one, value in read if not one.source},
        )

    def read_tensor(
        self, tensors: Mapping[str, NamedTensor], name: str, dtype: str = "", **sizes: int
    ) -> NamedTensor:
        """A tensor of the payload in its declared form; `sizes` are the values of its shape
        letters.

        Raises DataLoss otherwise.
        """
        (declared,) = (one for one in self.payload if one.name == name)
        tensor = tensors.get(name)
        if tensor is None:
            raise DataLoss(f"payload lacks tensor {name}", seen=sorted(tensors))
        fits = len(tensor.shape) == len(declared.shape) and all(
            size == (int(letter) if letter.isdecimal() else sizes.get(letter, size))
            for size, letter in zip(tensor.shape, declared.shape, strict=True)
        )
        dtype = declared.dtype or dtype
        if tensor.dtype != dtype or not fits:
            raise DataLoss(
                f"tensor {name} has another form",
                seen=(tensor.dtype, tensor.shape),
                allowed=(dtype, declared.shape, sizes),
            )

        return tensor


_VERSION = HeaderField("schema_version", TEXT, "layout of the entry")
_TRACE = HeaderField("traceparent", TEXT, "trace context of the span that made it, or empty")

TRAJECTORIES = EntryLayout(
    "trajectories",
    "policy",
    header=(
        _VERSION,
        HeaderField("run", TEXT, "run", "key.run_id"),
        HeaderField("session", TEXT, "session", "key.session_id"),
        HeaderField("branch", TEXT, "branch or turn of the session", "key.branch_id"),
        HeaderField(
            "branch_count", WHOLE, "branches of the session that are trained", "branch_count"
        ),
        HeaderField("step", WHOLE, "RL step of the task", "step"),
        HeaderField("task", TEXT, "task", "task_id"),
        HeaderField("group", TEXT, "group of siblings", "group_id"),
        HeaderField("group_size", WHOLE, "number of siblings in the group", "group_size"),
        HeaderField("task_index", WHOLE, "position of the task in its step", "task_index"),
        HeaderField("sample_index", WHOLE, "position among the siblings", "sample_index"),
        HeaderField("reward", PERHAPS, "reward; empty is not 0", "reward"),
        HeaderField(
            "reward_parts", NUMBERS, "unweighted reward of each rule of a mixture", "reward_parts"
        ),
        HeaderField("seed", WHOLE, "seed of the request", "seed"),
        HeaderField("temperature", NUMBER, "temperature of the draws", "temperature"),
        HeaderField("finish_reason", TEXT, "`stop` or `length`", "finish_reason"),
        HeaderField("policy_version", WHOLE, "newest policy version among the tokens"),
        HeaderField("speculation", COUNTERS, "counters of draft and acceptance", "speculation"),
        HeaderField("ways", WAYS, "distinct ways in which tokens were drawn"),
        HeaderField("crc32", WHOLE, "CRC-32 of the payload"),
        _TRACE,
    ),
    payload=(
        PayloadTensor("token_ids", "I32", ("T",), "tokens of prompt and response together"),
        PayloadTensor(
            "loss_mask",
            "U8",
            ("T",),
            "1 if the policy generated the token, plus 2 if it was an accepted draft",
        ),
        PayloadTensor(
            "behavior_logprobs", "F32", ("T",), "log-prob of the draw; 0 where the mask is 0"
        ),
        PayloadTensor(
            "version_spans", "I64", ("N", "3"), "start, end and policy version of a span of tokens"
        ),
        PayloadTensor("draw_spans", "I64", ("D", "3"), "start, end and index in `ways`"),
    ),
)

FEATURES = EntryLayout(
    "features",
    "drafter",
    header=(
        _VERSION,
        HeaderField("run", TEXT, "run", "run_id"),
        HeaderField("step", WHOLE, "RL step", "step"),
        HeaderField("session", TEXT, "session", "session_id"),
        HeaderField("group", TEXT, "group of siblings", "group_id"),
        HeaderField("temperature", NUMBER, "temperature of the draws", "temperature"),
        HeaderField("policy_version", WHOLE, "policy version of the last row", "policy_version"),
        HeaderField("lm_head_hash", TEXT, "hash of that version's lm_head", "lm_head_hash"),
        HeaderField("layers", TEXT, "policy layers in a row", "layers"),
        HeaderField(
            "convention", TEXT, "`post_norm`: the final norm has been applied", "convention"
        ),
        HeaderField("dtype", TEXT, "`BF16` or `F32`, of the hidden states"),
        HeaderField("rows", WHOLE, "T"),
        HeaderField("hidden", WHOLE, "H"),
        _TRACE,
    ),
    # Ordered by falling element size, so that each tensor is aligned.
    payload=(
        PayloadTensor("versions", "I64", ("T",), "policy version that computed the row"),
        PayloadTensor("token_ids", "I32", ("T + 1",), "token of each row, and the last one"),
        PayloadTensor("positions", "I32", ("T",), "absolute position of the token"),
        PayloadTensor("hidden", "", ("T", "H"), "hidden state of the policy at the token"),
        PayloadTensor("mask", "U8", ("T",), "1 if the policy generated the token"),
    ),
)
