"""What rounds without drafts leave unread, and how SGLang's drafter reads it once a round drafts.

A drafter that reads states of the target is behind after a round that was `off`. Nothing is lost by
that: the target's states lie in the rows of their KV slots (slot_rows.py), so a later round's
drafter can read all of it at once, or never where no such round comes. Owns which requests may be
behind and the forwards that read on; which tokens are unread is a mark beside their rows. It owns
no choice of arm.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.models.inner_layers import INNER_STATES
from paceline.models.loading import DTYPES
from paceline.services.rollout_gateway.engines.sglang.plugin.slot_rows import SlotRows

_BEHIND = "paceline_behind"
"""On a request of SGLang: its drafter may not have read all that was verified."""
_PROPOSALS = ("topk_p", "topk_index", "hidden_states")
"""Of an EagleDraftInput: what the next drafts begin with."""


class Unread:
    """Which requests' drafter may be behind, told by a mark on SGLang's request; the same on every
    rank.
    """

    def __init__(self) -> None:
        self._left_any = False  # the prefix cache may hold tokens that were never read
        self._proposals: Any = None  # SGLang's EagleDraftInput that the running round began with

    def leave(self, batch: Any) -> None:
        """A round without drafts begins: what it verifies stays unread."""
        self._left_any, self._proposals = True, batch.spec_info
        for req in batch.reqs:
            setattr(req, _BEHIND, True)

    def hand_on(self, draft_input: Any) -> None:
        """What such a round leaves for the next, in SGLang's shapes: the proposals it began with.

        They are stale, and nobody drafts from them: `read_on` comes before.
        """
        before, self._proposals = self._proposals, None
        for name in _PROPOSALS:
            setattr(draft_input, name, getattr(before, name))

    def prefilled(self, batch: Any) -> None:
        """A prefill: a prefix that other requests left may have unread tokens."""
        for req, prefix in zip(batch.reqs, batch.prefix_lens, strict=True):
            if prefix and self._left_any:
                setattr(req, _BEHIND, True)

    def caught_up(self, reqs: Sequence[Any]) -> bool:
        """Whether all of them had read everything; from now on they have."""
        behind = [req for req in reqs if getattr(req, _BEHIND, False)]
        for req in behind:
            setattr(req, _BEHIND, False)
        return not behind


@dataclass(frozen=True, eq=False, slots=True)
class Reading:
    """Tokens of every row that one forward reads: those at [begin, end)."""

    begins: list[int]
    ends: list[int]

    def of(self, table: Tensor) -> Tensor:
        """Entries of a table [B, longest] in it, row after row [sum of lengths]."""
        columns = torch.arange(table.shape[1], device=table.device)
        begins, ends = (
            torch.tensor(part, device=table.device) for part in (self.begins, self.ends)
        )
        return table[(columns >= begins[:, None]) & (columns < ends[:, None])]


def readings(firsts: Sequence[int], lengths: Sequence[int], tokens: int) -> list[Reading]:
    """Forwards of about `tokens` tokens at most (one a row at least) that read [first, length) of
    every row, in order.

    The last ends every row, for it gives the next round's proposals; a row with nothing left reads
    its last token once more.
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
    """Before a round that drafts: the drafter reads what rounds without drafts left, of all rows
    together.

    One forward of at most a prefill chunk's tokens after the other, as after a prefill. What rounds
    that drafted left is read already, and then nothing is done.
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
    """One forward of the drafter over one reading; the proposals behind its last tokens."""
    from sglang.srt.layers.moe.utils import (
        speculative_moe_a2a_backend_context,
        speculative_moe_backend_context,
    )
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
    states = _entering(plugin, stored.hidden[mine])
    nexts = _next_tokens(stored, batch, slots, one.seq_lens)
    drafter = worker.draft_worker
    with ExitStack() as contexts:  # those SGLang's own calls of the drafter are in
        contexts.enter_context(speculative_moe_backend_context())
        contexts.enter_context(speculative_moe_a2a_backend_context())
        proposals = drafter._draft_extend_for_prefill(one, states, nexts)
    stored.mark_read(mine)
    return proposals


def _entering(plugin: Any, rows: Tensor) -> Tensor:
    """The states that the drafter reads, out of rows [n, width] that may have the last one more."""
    if plugin.rows.inner:
        rows = rows[:, : rows.shape[1] * INNER_STATES // (INNER_STATES + 1)]
    return rows.to(DTYPES[plugin.spec.dtype])


def _next_tokens(stored: SlotRows, batch: Any, slots: Tensor, ends: Tensor) -> Tensor:
    """The token behind what each row reads [B]: one that is verified, or the one drawn last."""
    behind = slots.gather(1, ends[:, None].long().clamp(max=slots.shape[1] - 1))[:, 0]
    last = batch.spec_info.bonus_tokens.long()
    return torch.where(ends < batch.seq_lens, stored.token[behind].long(), last)
