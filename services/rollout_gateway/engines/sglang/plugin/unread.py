"""Lets SGLang's drafter read, before it drafts again, the tokens that rounds without drafts
verified.

A drafter that reads states of the target falls behind in an `off` round. No state is lost: the
target's states stay in the rows of their KV slots (slot_rows.py). The drafter of a later round
reads all unread states at once, or never where no round drafts again. A mark beside each row
records unread tokens. This module owns the marks on requests that may be behind, and the forwards
that catch up. arms.py chooses the arm.
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
        begins, ends = (
            torch.tensor(part, device=table.device) for part in (self.begins, self.ends)
        )
        return table[(columns >= begins[:, None]) & (columns < ends[:, None])]


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
    with ExitStack() as contexts:  # SGLang itself calls its drafter in these contexts
        contexts.enter_context(speculative_moe_backend_context())
        contexts.enter_context(speculative_moe_a2a_backend_context())
        proposals = drafter._draft_extend_for_prefill(one, states, nexts)
    stored.mark_read(mine)
    return proposals


def _entering(plugin: Any, rows: Tensor) -> Tensor:
    """States that the drafter reads, from rows [n, width], which may also hold the last state."""
    if plugin.rows.inner:
        rows = rows[:, : rows.shape[1] * INNER_STATES // (INNER_STATES + 1)]
    return rows.to(DTYPES[plugin.spec.dtype])


def _next_tokens(stored: SlotRows, batch: Any, slots: Tensor, ends: Tensor) -> Tensor:
    """Token behind each row's reading [B]: a verified token, or the token drawn last."""
    behind = slots.gather(1, ends[:, None].long().clamp(max=slots.shape[1] - 1))[:, 0]
    last = batch.spec_info.bonus_tokens.long()
    return torch.where(ends < batch.seq_lens, stored.token[behind].long(), last)
