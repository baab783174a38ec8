"""Stores hidden rows by KV slot, copies them to the host, and gives the drafter its unread tokens.

Stamps (token, position, policy version) reveal a row when its slot has been filled again.
capture.py decides which tokens are stored and where the rows are sent.

A drafter that reads states of the target falls behind in an `off` round. No state is lost: the
target's states stay in the rows of their KV slots (slot_rows.py). The drafter of a later round
reads all unread states at once, or never where no round drafts again. A mark beside each row
records unread tokens. This module owns the marks on requests that may be behind, and the forwards
that catch up. arms.py chooses the arm.
"""

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.models.loading import DTYPES
from paceline.services.rollout_gateway.engines.sglang.plugin.runtimes import drafting
from paceline.speculators.kinds import INNER_STATES

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
            message = "no room for the hidden rows of all KV slots"
            message += "; lower memory_fraction or turn capture off"
            seen, allowed = f"{free // MB} MB free", f"at least {self.nbytes // MB} MB"
            raise ConfigError(message, seen=seen, allowed=allowed)

        # An extra slot absorbs the rows of rejected drafts. Leaving them out would need their
        # number on the host.
        self.hidden = torch.zeros(slots + 1, width, dtype=dtype, device=device)
        self.token = torch.full((slots + 1,), -1, dtype=torch.int32, device=device)
        self.position = torch.full((slots + 1,), -1, dtype=torch.int32, device=device)
        self.version = torch.full((slots + 1,), -1, dtype=torch.int64, device=device)
        # verified in a round without drafts, and not read by the drafter since
        self.unread = torch.zeros(slots + 1, dtype=torch.bool, device=device)
        # request id and rows of ended requests that are not in the ring yet
        self.leaving: deque[tuple[int, Gathered]] = deque()
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
        under_way = sum(gathered.nbytes for _, gathered in self.leaving)
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


_BEHIND = "paceline_behind"
"""Mark on SGLang's request: its drafter may not have read all verified tokens."""
_PROPOSALS = ("topk_p", "topk_index", "hidden_states")
"""Fields of an EagleDraftInput from which the next drafts begin."""


class Unread:
    """Marks SGLang's requests that the drafter may be behind on; the same on every rank."""

    def __init__(self) -> None:
        self._left_any = False  # the prefix cache may hold tokens that were never read
        self._proposals: Any = None  # SGLang's EagleDraftInput that the running round began with

    def leave(self, batch: Any) -> None:
        """Begin a round without drafts: the tokens it verifies stay unread."""
        self._left_any, self._proposals = True, batch.spec_info
        for req in batch.reqs:
            setattr(req, _BEHIND, True)

    def hand_on(self, draft_input: Any) -> None:
        """Pass the round's initial proposals to the next round, in SGLang's shapes.

        They are stale, and no round drafts from them: `read_on` runs first.
        """
        before, self._proposals = self._proposals, None
        for name in _PROPOSALS:
            setattr(draft_input, name, getattr(before, name))

    def prefilled(self, batch: Any) -> None:
        """Record a prefill: a prefix from other requests may have unread tokens."""
        for req, prefix in zip(batch.reqs, batch.prefix_lens, strict=True):
            if prefix and self._left_any:
                setattr(req, _BEHIND, True)

    def caught_up(self, reqs: Sequence[Any]) -> bool:
        """Whether the drafter had read all tokens of the requests; marks all requests as read."""
        behind = [req for req in reqs if getattr(req, _BEHIND, False)]
        for req in behind:
            setattr(req, _BEHIND, False)
        return not behind


@dataclass(frozen=True, eq=False, slots=True)
class Reading:
    """Tokens of every row that one forward reads, at [begin, end)."""

    begins: list[int]
    ends: list[int]

    def of(self, table: Tensor) -> Tensor:
        """Entries of a table [B, longest] inside the reading, row after row [sum of lengths]."""
        columns = torch.arange(table.shape[1], device=table.device)
        begins, ends = torch.tensor([self.begins, self.ends], device=table.device)[:, :, None]
        return table[(columns >= begins) & (columns < ends)]


def readings(firsts: Sequence[int], lengths: Sequence[int], tokens: int) -> list[Reading]:
    """Split the tokens [first, length) of every row into forwards, in order.

    A forward has about `tokens` tokens at most, and at least one token a row. The last forward
    reaches the end of every row, because it gives the next round's proposals. A row with nothing
    left reads its last token again.
    """
    width = max(1, tokens // max(1, len(lengths)))
    begins = list(firsts)
    found: list[Reading] = []
    while not found or found[-1].ends != list(lengths):
        ends = [min(begin + width, length) for begin, length in zip(begins, lengths, strict=True)]
        found.append(Reading(begins, ends))
        begins = [min(end, length - 1) for end, length in zip(ends, lengths, strict=True)]
    return found


def read_on(plugin: Any, worker: Any, batch: Any) -> None:
    """Before a round that drafts, let the drafter read the tokens left by rounds without drafts.

    All rows are read together, in forwards of at most one prefill chunk, as after a prefill. Rounds
    that drafted leave nothing unread; this function then does nothing.
    """
    if plugin.unread.caught_up(batch.reqs):
        return
    stored: SlotRows = plugin.slot_rows
    lengths = batch.seq_lens.tolist()
    slots = worker.req_to_token_pool.req_to_token[batch.req_pool_indices, : max(lengths)].long()
    firsts = stored.first_unread(slots, batch.seq_lens)
    if firsts == lengths:
        return
    begins = [min(first, length - 1) for first, length in zip(firsts, lengths, strict=True)]
    proposals = None
    for reading in readings(begins, lengths, plugin.spec.prefill_tokens):
        proposals = _read(plugin, worker, batch, slots, reading)
    for name in _PROPOSALS:
        setattr(batch.spec_info, name, getattr(proposals, name))


def _read(plugin: Any, worker: Any, batch: Any, slots: Tensor, reading: Reading) -> Any:
    """Run one forward of the drafter over one reading; returns the proposals behind its last
    tokens.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    stored: SlotRows = plugin.slot_rows
    mine = reading.of(slots)
    ends = torch.tensor(reading.ends)
    one = copy.copy(batch)
    one.forward_mode = ForwardMode.EXTEND
    one.input_ids, one.out_cache_loc = stored.token[mine].long(), mine
    one.seq_lens_cpu, one.seq_lens = ends, ends.to(batch.seq_lens)
    one.seq_lens_sum = sum(reading.ends)
    one.prefix_lens = reading.begins
    one.extend_lens = [end - begin for begin, end in zip(reading.begins, reading.ends, strict=True)]
    one.extend_num_tokens = len(mine)
    one.extend_logprob_start_lens = None
    one.chunked_req_next_prompt_token = None
    one.return_logprob = False
    states = stored.hidden[mine].to(DTYPES[plugin.spec.dtype])
    if plugin.rows.inner:  # the drafter reads no last state
        states = states[:, : states.shape[1] * INNER_STATES // (INNER_STATES + 1)]
    # behind each row's reading: a verified token, or the token drawn last
    behind = slots.gather(1, one.seq_lens[:, None].long().clamp(max=slots.shape[1] - 1))[:, 0]
    last = batch.spec_info.bonus_tokens.long()
    nexts = torch.where(one.seq_lens < batch.seq_lens, stored.token[behind].long(), last)
    with drafting():
        proposals = worker.draft_worker._draft_extend_for_prefill(one, states, nexts)
    stored.mark_read(mine)
    return proposals
