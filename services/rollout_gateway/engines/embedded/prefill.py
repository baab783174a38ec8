"""Assigns waiting requests to slots and caches their prompts.

Running requests always fill slots 0 .. B - 1, so the cache is read as a slice. If a request ends,
the last request takes its slot.

The forward runs in padded batches within the token budget.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paceline.models.cache import cache_rows
from paceline.models.decoder import forward_hidden, head_logits, make_block
from paceline.services.rollout_gateway.engines.embedded.kv_cache import SlotStore
from paceline.services.rollout_gateway.engines.embedded.prefix_cache import PrefixCache
from paceline.services.rollout_gateway.engines.embedded.weights import EngineWeights
from paceline.services.rollout_gateway.engines.requests.draws import score_prompt
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence

COLUMNS = 256
"""Tokens of each row in one forward on a CPU. A forward reads keys up to its last token, so longer
ones multiply more masked keys, and their activations leave the processor's caches.
"""
Move = tuple[int, int, RunningSequence]
"""Source slot, destination slot and the sequence that moves."""


class Scheduler:
    """The queue and the batch; running[i] has slot i."""

    def __init__(self, max_batch: int, prefill_tokens: int) -> None:
        self._max_batch = max_batch
        self._prefill_tokens = prefill_tokens
        self.waiting: deque[RunningSequence] = deque()
        self.running: list[RunningSequence] = []

    def admit(self) -> range:
        """Gives free slots to the requests with the longest wait; returns the slots."""
        first = len(self.running)
        while self.waiting and len(self.running) < self._max_batch:
            self.running.append(self.waiting.popleft())
        return range(first, len(self.running))

    def prefill_plan(self) -> list[tuple[int, int]]:
        """(slot, tokens) of the next prefill, oldest first. Count times the longest part stays
        within the token budget.
        """
        plan: list[tuple[int, int]] = []
        longest = 0
        for slot, sequence in enumerate(self.running):
            tokens = min(sequence.lacking, self._prefill_tokens)
            if tokens <= 0:
                continue
            longest = max(longest, tokens)
            if (len(plan) + 1) * longest > self._prefill_tokens:
                break
            plan.append((slot, tokens))
        return plan

    def ready(self) -> list[int]:
        """Slots that can decode."""
        return [slot for slot, sequence in enumerate(self.running) if sequence.lacking <= 0]

    def remove(self, ended: Collection[RunningSequence]) -> tuple[list[Move], range]:
        """Removes sequences; returns the moves that fill the gaps, in order, and the free slots."""
        before = len(self.running)
        moves: list[Move] = []
        for slot in reversed([slot for slot, one in enumerate(self.running) if one in ended]):
            last = self.running.pop()
            if slot < len(self.running):
                moves.append((len(self.running), slot, last))
                self.running[slot] = last
        return moves, range(len(self.running), before)

    def drop_waiting(self, ended: Sequence[RunningSequence]) -> None:
        """Removes sequences from the queue."""
        self.waiting = deque(sequence for sequence in self.waiting if sequence not in ended)


def leaders_of(
    rows: Sequence[RunningSequence], counts: Sequence[int], *, apart: bool = False
) -> list[int]:
    """For every row, the row that is computed for it.

    Rows share a leader, the first of them, if they have the same cached tokens and the same next
    tokens, as the samples of one task do. With `apart`, no rows share.
    """
    seen: dict[tuple[int, tuple[int, ...]], int] = {}
    leaders: list[int] = []
    for row, (sequence, count) in enumerate(zip(rows, counts, strict=True)):
        end = sequence.cached + count
        shares = not apart and not sequence.stale and end <= len(sequence.request.prompt)
        key = (sequence.cached, sequence.request.prompt[:end]) if shares else (-1, (row,))
        leaders.append(seen.setdefault(key, row))
    return leaders


@dataclass(eq=False)
class Prefill:
    """Prepares sequences for decoding: it caches all their tokens except the last."""

    _scheduler: Scheduler
    _prefixes: PrefixCache
    _store: SlotStore
    _weights: EngineWeights

    def run(self) -> None:
        """Caches the next part of incomplete prompts, oldest first."""
        if self._prefixes.enabled:
            self._reuse()
        if not (plan := self._scheduler.prefill_plan()):
            return
        slots, counts = [slot for slot, _ in plan], [count for _, count in plan]
        rows = [self._scheduler.running[slot] for slot in slots]
        leader_of = leaders_of(rows, counts, apart=self._prefixes.closed)
        leaders = sorted(set(leader_of))
        read = self._store.hidden.shape[-1] > 0 or any(one.scoring for one in rows)
        first, sizes = [slots[row] for row in leaders], [counts[row] for row in leaders]
        hidden = self._forward(first, [rows[row] for row in leaders], sizes, read=read)
        states = dict(zip(leaders, hidden, strict=False))  # empty if nothing reads them
        head = partial(head_logits, self._weights.policy)
        for row, (leader, sequence, count) in enumerate(zip(leader_of, rows, counts, strict=True)):
            start, end = sequence.cached, sequence.cached + count
            if leader != row:
                self._store.copy(slots[leader], slots[row], start, end)
                sequence.copied += count
            if sequence.scoring:
                score_prompt(head, sequence, start, states[leader][:count])
            sequence.cached = end

    def _reuse(self) -> None:
        """Copies a cached beginning into sequences without any cached token. A prompt with
        requested scores is computed instead.
        """
        running = self._scheduler.running
        new = [slot for slot, one in enumerate(running) if not one.cached and one.lacking > 0]
        fresh = [slot for slot in new if not running[slot].scoring]
        if fresh:
            self._prefixes.offer(running)
        for slot in fresh:
            self._prefixes.reuse(slot, running[slot])

    def _forward(
        self, slots: list[int], rows: Sequence[RunningSequence], counts: list[int], *, read: bool
    ) -> Tensor:
        """Hidden states [B, T, W], of no row unless they are read. Padding repeats a row's last
        token and gives the same result.
        """
        store, policy, states = self._store, self._weights.policy, list[Tensor]()
        device, longest = store.token_ids.device, max(counts)
        starts = torch.tensor([sequence.cached for sequence in rows])
        steps = torch.arange(longest).minimum(torch.tensor(counts)[:, None] - 1)
        width = COLUMNS if device.type == "cpu" else longest
        for columns in torch.split(starts[:, None] + steps, width, dim=1):
            at, length = columns.to(device), int(columns.max()) + 1
            ids = store.token_ids[torch.tensor(slots, device=device)[:, None], at]
            taken = cache_rows(slots)
            block = make_block(policy.config, policy.rotation, store.kv, taken, at, length)
            hidden = forward_hidden(policy, store.kv, ids, block, store.inner, cache_only=not read)
            if read:
                store.keep_hidden(block.index, hidden)
            states.append(hidden.view(-1, columns.shape[1], hidden.shape[1]))
        return torch.cat(states, dim=1)
