"""Reads the remains of a run by code that shares nothing with the product.

It uses the standard library alone, down to the bytes of Redis' append-only log, safetensors files
and checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WEIGHTS, HASHES = "model.safetensors", "hashes.json"
Sample = tuple[int, str, int]
"""(RL step, group, number among its siblings)."""


@dataclass
class BranchHistory:
    """All entries ever written for one branch."""

    finals: int = 0  # number of final entries
    appended: int = 0  # entries of the stream of trajectories
    record: dict[str, Any] = field(default_factory=dict)  # the last record
    fates: list[str] = field(default_factory=list)  # in the order of writing
    tokens: bytes = b""  # int32, little-endian, of the stream's entry
    spans: list[tuple[int, int, int]] = field(default_factory=list)  # start, end, policy version

    @property
    def sample(self) -> Sample:
        """Step, group and index of the sample."""
        return self.record["step"], self.record["group_id"], self.record["sample_index"]


@dataclass
class Remains:
    """Remains of one run."""

    branches: dict[str, BranchHistory] = field(default_factory=dict)
    serving: list[dict[str, int]] = field(default_factory=list)  # version sets, in order
    began: dict[int, dict[str, int]] = field(default_factory=dict)  # step -> set that served
    finished: list[int] = field(default_factory=list)  # steps, in the order of their ends
    near_ties: dict[int, int] = field(default_factory=dict)  # by step
    spooled: dict[int, list[str]] = field(default_factory=dict)  # version -> sha256, in time
    saved: dict[int, list[str]] = field(default_factory=dict)
    batches: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # of checkpoints


def read_remains(directory: Path, run_id: str) -> Remains:
    """Reads all remains of an ended run. Raises ValueError for data of another form."""
    found = read_log(directory / "run" / "redis-durable", run_id)
    hashes = json.loads((directory / "kept" / HASHES).read_text())
    for path in sorted((directory / "kept").glob("*@*"), key=_number):
        _take_files(found, path, hashes.get(path.name))
    return found


def read_log(directory: Path, run_id: str) -> Remains:
    """Reads the part of a run in Redis' append-only log. Raises ValueError for data of another
    form.
    """
    found = Remains()
    prefix = f"paceline:{{{run_id}}}:"
    for words in logged_commands(directory):
        if len(words) > 2 and words[1].decode(errors="replace").startswith(prefix):
            _take(found, words, words[1].decode().removeprefix(prefix))
    return found


def logged_commands(directory: Path) -> Iterator[list[bytes]]:
    """Commands of an append-only log in the order of their execution.

    Redis' protocol is *words, then $length and bytes of each word. A torn end, as after a kill, is
    skipped. Raises ValueError for a rewritten log.
    """
    parts = sorted((directory / "appendonlydir").glob("*.incr.aof"), key=_number)  # Redis 7
    for path in parts or [directory / "appendonly.aof"]:
        data = path.read_bytes()
        if data.startswith(b"REDIS"):
            raise ValueError(f"{path} was rewritten: earlier commands are gone")
        yield from _commands(data)


def _commands(data: bytes) -> Iterator[list[bytes]]:
    at = 0
    while at < len(data):
        words = []
        count, at = _header(data, at, b"*")
        for _ in range(count):
            length, at = _header(data, at, b"$")
            words.append(data[at : at + length])
            at += length + 2
        if not count or at > len(data):
            return
        yield words


def _header(data: bytes, at: int, kind: bytes) -> tuple[int, int]:
    """The number behind `kind`, and the begin of the next line; (0, behind the end) for a torn
    line.
    """
    end = data.find(b"\r\n", at)
    if end < 0:
        return 0, len(data) + 1
    if data[at : at + 1] != kind:
        raise ValueError(f"no {kind!r} at byte {at} of the log: {data[at : at + 20]!r}")
    return int(data[at + 1 : end]), end + 2


def _take(found: Remains, words: list[bytes], key: str) -> None:
    name = words[0].upper()
    if name in (b"HSET", b"HSETNX") and key in ("ledger", "ledger:fates"):
        for branch, value in zip(words[2::2], words[3::2], strict=True):
            one = found.branches.setdefault(branch.decode(), BranchHistory())
            if key == "ledger:fates":
                one.fates.append(value.decode())
                continue
            one.record = json.loads(value)
            one.finals += bool(one.record["final"])
    elif name == b"XADD" and key == "trajectories":
        _take_trajectory(found, words[3:])
    elif name == b"XADD" and key == "journal":
        _take_entry(found, json.loads(words[4]))


def _take_trajectory(found: Remains, words: list[bytes]) -> None:
    fields = dict(zip(words[0::2], words[1::2], strict=True))
    key = json.loads(fields[b"header"])["key"]
    one = found.branches.setdefault(f"{key['session_id']}/{key['branch_id']}", BranchHistory())
    one.appended += 1
    (payload,) = (value for value in fields.values() if len(value) > 8 and value[8:9] == b"{")
    tensors = dict(tensors_of(payload))
    one.tokens = tensors["token_ids"]
    one.spans = list(struct.iter_unpack("<3q", tensors["version_spans"]))


def _take_entry(found: Remains, entry: list[Any]) -> None:
    """A line of the journal: version, time, event, its data, step, phase, slots, record."""
    event, data = entry[2], entry[3]
    last = found.serving[-1] if found.serving else {"seq": 0, "policy": 0, "drafter": 0}
    if event == "Committed" and data["versions"] != last:  # a repeated commit changes nothing
        found.serving.append(data["versions"])
    elif event == "StepBegan":
        found.began.setdefault(data["step"], last)
    if len(entry) > 7:
        step = int(entry[7].get("step", 0))
        found.finished.append(step)
        found.near_ties[step] = int(entry[7].get("near_ties", 0))


def _take_files(found: Remains, kept: Path, weights: str | None) -> None:
    name, _, _ = kept.name.partition("@")
    kind, _, number = name.rpartition("-")
    version = int(number)
    into = found.spooled if kind == "policy" else found.saved
    if weights is not None:
        into.setdefault(version, []).append(weights)
    if (kept / "state.json").is_file():
        state = json.loads((kept / "state.json").read_text())
        found.batches.setdefault(version, []).append(state["progress"])


def weights_hash(path: Path) -> str:
    """sha256 over names and bytes of the tensors of a safetensors file, sorted by name.

    The file's order and the rest of its header make no difference.
    """
    digest = hashlib.sha256()
    for name, data in sorted(tensors_of(path.read_bytes())):
        digest.update(f"{name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def tensors_of(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and bytes (safetensors: length of the header as u64, a JSON header, the bytes)."""
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    for name, about in header.items():
        if name != "__metadata__":
            start, end = about["data_offsets"]
            yield name, data[8 + length + start : 8 + length + end]


def _number(path: Path) -> int:
    """The number that orders names such as step-4@17 and appendonly.aof.2.incr.aof."""
    digits = [part for part in path.name.replace("@", ".").split(".") if part.isdigit()]
    return int(digits[-1]) if digits else 0
