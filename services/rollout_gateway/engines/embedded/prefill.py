"""Prefill: prompts are cached by copies from other slots and by computation, once per group of
equal prompts.

The forward runs in padded batches within the token budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.models.cache import cache_rows
from paceline.models.decoder import forward_hidden, head_logits, make_block
from paceline.services.rollout_gateway.engines.embedded.kv_cache import SlotStore
from paceline.services.rollout_gateway.engines.embedded.prefix_cache import PrefixCache
from paceline.services.rollout_gateway.engines.embedded.scheduler import Scheduler
from paceline.services.rollout_gateway.engines.embedded.weights import EngineWeights
from paceline.services.rollout_gateway.engines.requests.prompt_scores import score_prompt
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence


def leaders_of(
    rows: Sequence[RunningSequence], counts: Sequence[int], *, apart: bool = False
) -> tuple[list[int], list[int]]:
    """Rows to compute, and for every row the index of its leader among these rows.

    Rows share a leader if they have the same cached tokens and the same next tokens, as the samples
    of one task do. With `apart`, no rows share.
    """
    leaders: list[int] = []
    leader_of_row: list[int] = []
    seen: dict[tuple[int, tuple[int, ...]], int] = {}
    for row, (sequence, count) in enumerate(zip(rows, counts, strict=True)):
        end = sequence.cached + count
        shares = not apart and not sequence.stale and end <= len(sequence.request.prompt)
        key = (sequence.cached, sequence.request.prompt[:end]) if shares else (-1, (row,))
        if key not in seen:
            seen[key] = len(leaders)
            leaders.append(row)
        leader_of_row.append(seen[key])

    return leaders, leader_of_row


class Prefill:
    """Prepares sequences for decoding: it caches all their tokens except the last."""

    def __init__(
        self,
        scheduler: Scheduler,
        prefixes: PrefixCache,
        store: SlotStore,
        weights: EngineWeights,
    ) -> None:
        self._scheduler = scheduler
        self._prefixes = prefixes
        self._store = store
        self._weights = weights

    def run(self) -> None:
        """Caches the next part of incomplete prompts, oldest first."""
        if self._prefixes.enabled:
            self._reuse()
        plan = self._scheduler.prefill_plan()
        if not plan:
            return
        slots, counts = [slot for slot, _ in plan], [count for _, count in plan]
        rows = [self._scheduler.running[slot] for slot in slots]
        leaders, leader_of_row = leaders_of(rows, counts, apart=self._prefixes.closed)
        hidden = self._forward(
            [slots[row] for row in leaders],
            [rows[row] for row in leaders],
            [counts[row] for row in leaders],
        )
        if len(leaders) < len(rows):
            self._copy(slots, counts, leaders, leader_of_row, rows)
            hidden = hidden[leader_of_row]

        head = partial(head_logits, self._weights.policy)
        for row, (sequence, count) in enumerate(zip(rows, counts, strict=True)):
            if sequence.scoring:
                score_prompt(head, sequence, sequence.cached, hidden[row, :count])
            sequence.cached += count

    def _reuse(self) -> None:
        """Copies a cached beginning into sequences without any cached token. A prompt with
        requested scores is computed instead.
        """
        running = self._scheduler.running
        fresh = [
            slot
            for slot, sequence in enumerate(running)
            if sequence.cached == 0 and sequence.lacking > 0 and not sequence.scoring
        ]
        if not fresh:
            return
        self._prefixes.offer(running)
        for slot in fresh:
            self._prefixes.reuse(slot, running[slot])

    def _forward(
        self, slots: list[int], rows: Sequence[RunningSequence], counts: list[int]
    ) -> Tensor:
        """Hidden states [B, T, W]. Padding repeats a row's last token and gives the same result."""
        device, policy = self._store.token_ids.device, self._weights.policy
        starts = torch.tensor([sequence.cached for sequence in rows])
        steps = torch.arange(max(counts)).minimum(torch.tensor(counts)[:, None] - 1)
        positions = (starts[:, None] + steps).to(device)
        token_ids = self._store.token_ids[torch.tensor(slots, device=device)[:, None], positions]
        length = max(sequence.cached + count for sequence, count in zip(rows, counts, strict=True))
        block = make_block(
            policy.config, policy.rotation, self._store.kv, cache_rows(slots), positions, length
        )
        hidden = forward_hidden(policy, self._store.kv, token_ids, block, self._store.inner)
        self._store.keep_hidden(block.index, hidden)
        return hidden.view(*token_ids.shape, -1)

    def _copy(
        self,
        slots: list[int],
        counts: list[int],
        leaders: list[int],
        leader_of_row: list[int],
        rows: Sequence[RunningSequence],
    ) -> None:
        followers = [row for row in range(len(slots)) if leaders[leader_of_row[row]] != row]
        for row in followers:
            start = rows[row].cached
            self._store.copy(
                slots[leaders[leader_of_row[row]]], slots[row], start, start + counts[row]
            )
            rows[row].copied += counts[row]
