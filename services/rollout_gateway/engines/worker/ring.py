"""The shared-memory ring of hidden rows: one worker writes, the gateway's publisher reads.

The memory has no name in any file system. The worker opens it through its creator's file
descriptor, and the kernel frees it when the last process unmaps it. Neither side ever waits for the
other.

The first page is the header, six little-endian u64: magic, capacity in rows, bytes of a row's
hidden state, rows written, rows read, rows dropped. The three counters only grow; the first two
modulo the capacity give the slot. `written` advances only after the bytes of its rows are complete.

A row is the state at a token of its request's sequence. If the ring is full, only the first rows of
a call are kept.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import DataLoss, InvalidInput

HEADER_BYTES = 4096
MAGIC = 0x50414345_52494E47
_MAGIC, _CAPACITY, _ROW_BYTES, _WRITTEN, _READ, _DROPPED = range(6)
RowArray = npt.NDArray[Any]


def row_dtype(row_bytes: int) -> np.dtype[Any]:
    """One row: request, policy version, absolute position, its token, bytes of its state."""
    numbers = [("request_id", "<u8"), ("policy_version", "<u8")]
    numbers += [("position", "<u4"), ("token_id", "<u4")]
    return np.dtype([*numbers, ("hidden", "u1", (row_bytes,))])


class RowRing:
    """A ring with one producer, the engine, and one consumer. A write never waits."""

    def __init__(self, path: Path, buffer: mmap.mmap, handle: int | None = None) -> None:
        self.path = path
        """Path for `attach` in another process, valid until `seal`."""
        self._buffer = buffer
        self._handle = handle
        self._header = np.frombuffer(buffer, dtype="<u8", count=6)
        if int(self._header[_MAGIC]) != MAGIC:
            raise DataLoss("this file is not a ring of hidden rows", seen=path)
        self.capacity = int(self._header[_CAPACITY])
        self.row_bytes = int(self._header[_ROW_BYTES])
        dtype = row_dtype(self.row_bytes)
        self._rows = np.frombuffer(buffer, dtype=dtype, count=self.capacity, offset=HEADER_BYTES)

    @classmethod
    def create(cls, capacity: int, row_bytes: int) -> RowRing:
        """Creates an empty ring.

        Raises InvalidInput for sizes below 1.
        """
        if capacity < 1 or row_bytes < 1:
            message = "a ring needs rows and bytes"
            raise InvalidInput(message, seen=(capacity, row_bytes), allowed=">= 1")
        handle = os.memfd_create("paceline-ring")
        os.ftruncate(handle, HEADER_BYTES + capacity * row_dtype(row_bytes).itemsize)
        buffer = mmap.mmap(handle, 0)
        np.frombuffer(buffer, dtype="<u8", count=6)[:] = (MAGIC, capacity, row_bytes, 0, 0, 0)
        return cls(Path(f"/proc/{os.getpid()}/fd/{handle}"), buffer, handle)

    @classmethod
    def attach(cls, path: Path) -> RowRing:
        """Opens the ring at another process's `path`.

        Raises DataLoss if there is no ring.
        """
        with path.open("r+b") as file:
            if os.fstat(file.fileno()).st_size <= HEADER_BYTES:
                raise DataLoss("this file is too short for a ring of hidden rows", seen=path)
            return cls(path, mmap.mmap(file.fileno(), 0))

    @property
    def rows_written(self) -> int:
        """Rows published since creation."""
        return int(self._header[_WRITTEN])

    @property
    def rows_dropped(self) -> int:
        """Rows dropped since creation because the ring was full."""
        return int(self._header[_DROPPED])

    def write(
        self,
        request_ids: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.uint32],
        token_ids: npt.NDArray[np.uint32],
        policy_version: int,
        hidden: npt.NDArray[np.uint8],
    ) -> int:
        """Append rows; rows beyond the free room are dropped and counted. hidden [n, row_bytes].

        Returns the number of rows kept. Raises InvalidInput for another shape.
        """
        if hidden.shape != (len(request_ids), self.row_bytes):
            message = "hidden rows do not fit the ring"
            raise InvalidInput(message, seen=hidden.shape, allowed=f"[n, {self.row_bytes}]")

        written = self.rows_written
        kept = min(len(request_ids), self.capacity - (written - int(self._header[_READ])))
        begun = 0
        for slots in self._stretches(written, kept):
            rows, part = self._rows[slots], slice(begun, begun + slots.stop - slots.start)
            rows["request_id"] = request_ids[part]
            rows["policy_version"] = policy_version
            rows["position"] = positions[part]
            rows["token_id"] = token_ids[part]
            rows["hidden"] = hidden[part]
            begun = part.stop
        self._header[_DROPPED] += np.uint64(len(request_ids) - kept)
        self._header[_WRITTEN] = written + kept
        return kept

    def read(self, rows_written: int) -> RowArray:
        """Returns the unread rows up to `rows_written` as a structured copy (see row_dtype) and
        frees their slots.

        Raises DataLoss for rows that the ring does not hold.
        """
        start = int(self._header[_READ])
        if rows_written - start > self.capacity or rows_written > self.rows_written:
            message = "these rows are not in the ring"
            raise DataLoss(message, seen=rows_written, allowed=self.rows_written)
        stretches = self._stretches(start, max(rows_written - start, 0))
        rows = np.concatenate([self._rows[slots] for slots in stretches])
        self._header[_READ] = start + len(rows)
        return rows

    def _stretches(self, start: int, count: int) -> list[slice]:
        """Slots of the rows start .. start + count - 1: one slice, then the slice after a wrap."""
        first = start % self.capacity
        end = min(first + count, self.capacity)
        return [slice(first, end), slice(0, count - (end - first))]

    def seal(self) -> None:
        """Close the file that `attach` opens; mapped memory lives until both sides end."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
