"""Stores hidden rows by KV slot on the engine's device, and copies them to the host.

Stamps (token, position, policy version) reveal a row when its slot has been filled again.
capture.py decides which tokens are stored and where the rows are sent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.errors import ConfigError

MB = 1 << 20
LEAVING_BYTES = 256 * MB
"""Limit of rows in transit from a CUDA device to the host. Beyond it, a sequence loses its first
rows.
"""


@dataclass(frozen=True, eq=False, slots=True)
class Gathered:
    """n rows read from their slots, on the host or in transit to it."""

    hidden: Tensor  # [n, width]
    valid_if: tuple[Tensor, Tensor]  # token and position stamps int32 [n]
    versions: Tensor  # int64 [n]
    token_ids: npt.NDArray[np.int32]  # [n] expected token stamps
    first: int  # absolute position of row 0
    copied: Any = None  # CUDA event; None: the rows are on the host

    @property
    def done(self) -> bool:
        """True when `result` need not wait. Never waits."""
        return self.copied is None or bool(self.copied.query())

    def result(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Rows as bytes [n, row bytes], whether their stamps fit [n], policy versions [n].

        Call it only when `done`.
        """
        token, position = (stamp.numpy() for stamp in self.valid_if)
        versions: npt.NDArray[np.int64] = self.versions.numpy()
        expected = self.first + np.arange(len(token))
        valid = (token == self.token_ids) & (position == expected) & (versions >= 0)
        return self.hidden.view(torch.uint8).numpy(), valid, versions

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return self.hidden.numel() * self.hidden.element_size()


@dataclass(frozen=True, eq=False, slots=True)
class Leaving:
    """Rows of one ended request that are not in the ring yet."""

    request_id: int
    gathered: Gathered


class SlotRows:
    """One row per KV slot on the engine's device. The KV pool bounds its size, not the requests.

    Except `first_unread`, no call waits for a CUDA device. Rows are stored on the caller's stream
    and read on a separate stream; events on the device order the two streams. Use it from one
    thread.
    """

    def __init__(self, slots: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """`slots`: highest KV slot + 1. Raises ConfigError when the device has no room for the
        rows.
        """
        self.slots, self.width = slots, width
        self.unused_slot = slots  # rows put here are never read
        self.nbytes = (slots + 1) * (width * dtype.itemsize + 17)
        if device.type == "cuda" and (free := torch.cuda.mem_get_info(device)[0]) < self.nbytes:
            raise ConfigError(
                "no room for the hidden rows of all KV slots; lower memory_fraction or turn "
                "capture off",
                seen=f"{free // MB} MB free",
                allowed=f"at least {self.nbytes // MB} MB",
            )

        # An extra slot absorbs the rows of rejected drafts. Leaving them out would need their
        # number on the host.
        self.hidden = torch.zeros(slots + 1, width, dtype=dtype, device=device)
        self.token = torch.full((slots + 1,), -1, dtype=torch.int32, device=device)
        self.position = torch.full((slots + 1,), -1, dtype=torch.int32, device=device)
        self.version = torch.full((slots + 1,), -1, dtype=torch.int64, device=device)
        # verified in a round without drafts, and not read by the drafter since
        self.unread = torch.zeros(slots + 1, dtype=torch.bool, device=device)
        self.leaving: deque[Leaving] = deque()
        self.rows_dropped = 0  # dropped because too many rows were in transit
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._side = torch.cuda.Stream(device)
            self._written, self._read = torch.cuda.Event(), torch.cuda.Event()

    def put(
        self,
        slots: Tensor,
        tokens: Tensor,
        positions: Tensor,
        version: int,
        hidden: Tensor,
        *,
        unread: bool = False,
    ) -> None:
        """Store rows.

        slots, tokens, positions: integer [n]; hidden [n, width]: any float dtype. unread: no
        drafter reads these rows in this round.
        """
        self._before_write()
        index = slots.long()
        self.hidden.index_copy_(0, index, hidden.to(self.hidden.dtype))
        self.token.index_copy_(0, index, tokens.int())
        self.position.index_copy_(0, index, positions.int())
        self.version.index_fill_(0, index, version)
        self.unread.index_fill_(0, index, unread)
        self._after_write()

    def first_unread(self, slots: Tensor, lengths: Tensor) -> list[int]:
        """First unread column in each row's slots [B, longest]; the row's length [B] where all is
        read.

        Waits for the device.
        """
        columns = torch.arange(slots.shape[1], device=slots.device)
        unread = self.unread[slots] & (columns < lengths[:, None])
        found: list[int] = torch.where(unread, columns, lengths[:, None]).amin(1).tolist()
        return found

    def mark_read(self, slots: Tensor) -> None:
        """Record that the drafter has read the tokens in the given slots [n]."""
        self.unread.index_fill_(0, slots, False)

    def forget(self, slots: Tensor) -> None:
        """Invalidate the rows in the given slots [n]."""
        self._before_write()
        self.version.index_fill_(0, slots.long(), -1)
        self._after_write()

    def gather(self, slots: Tensor, token_ids: npt.NDArray[np.int32], first: int = 0) -> Gathered:
        """Read the rows of n neighbouring positions, starting at `first`.

        slots: integer [n]; token_ids [n]: expected tokens.
        """
        parts = (self.hidden, self.token, self.position, self.version)
        # the slot table may change before the rows are read
        index = slots.to(torch.int64, copy=True)
        if not self._cuda:
            hidden, token, position, version = (part.index_select(0, index) for part in parts)
            return Gathered(hidden, (token, position), version, token_ids, first)
        self._side.wait_stream(torch.cuda.current_stream(index.device))
        self._side.wait_event(self._written)
        index.record_stream(self._side)
        with torch.cuda.stream(self._side):
            picked = [part.index_select(0, index) for part in parts]
            self._read.record(self._side)  # from here on the slots may be written again
            hidden, token, position, version = (to_pinned(part) for part in picked)
            copied = torch.cuda.Event()
            copied.record(self._side)

        return Gathered(hidden, (token, position), version, token_ids, first, copied)

    def room(self) -> int:
        """Number of rows that may start their copy to the host now."""
        if not self._cuda:
            return self.slots
        under_way = sum(one.gathered.nbytes for one in self.leaving)
        return max(0, (LEAVING_BYTES - under_way) // (self.width * self.hidden.element_size()))

    def _before_write(self) -> None:
        if self._cuda:
            torch.cuda.current_stream(self.hidden.device).wait_event(self._read)

    def _after_write(self) -> None:
        if self._cuda:
            self._written.record(torch.cuda.current_stream(self.hidden.device))


def to_pinned(part: Tensor) -> Tensor:
    """A copy on the host, made without waiting."""
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)
