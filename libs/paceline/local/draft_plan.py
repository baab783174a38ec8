"""Computes what drafts bring a run on many GPUs, and what a drafter learns in the time that its
rollouts leave idle, from acceptance lengths measured on the demo.

The sums are those of `ScalePlan`: seconds by what the hardware can do at best, times the share of
it that is reached. Nothing here is measured but what is named so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from paceline.errors import InvalidInput
from paceline.local.memory_plan import layer_parameters
from paceline.local.scale_plan import HALF, ScalePlan

ITERATIONS = 3
RECOVERY_STEPS = 170
"""Optimiser steps after which a drafter was back at 95% of its acceptance when the tasks had
changed (12 RL steps of 14 each: docs/benchmarks.md, `paceline bench drafter`).
"""


def share_right(length: float, drafts: int) -> float:
    """Share a of drafts that are right where those before are, by the acceptance length
    (1 - a^(drafts + 1)) / (1 - a) of a chain, bonus token included; a is taken to be the same at
    each position. Raises InvalidInput for a length that no chain of so many drafts has.
    """
    if not 1 <= length <= drafts + 1:
        raise InvalidInput("acceptance length", seen=length, allowed=f"1 to {drafts + 1}")
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if chain_length(middle, drafts) < length else (low, middle)
    return (low + high) / 2


def chain_length(right: float, drafts: int) -> float:
    """Tokens of a round with a chain of drafts, each right in this share: sum of right^k."""
    return sum(right**k for k in range(drafts + 1))


@dataclass(frozen=True, slots=True)
class MeasuredDrafts:
    """Chains of a source on the demo: their acceptance length over the last third of its steps, a
    median of three seeds (docs/benchmarks.md, `paceline bench e2e`), and how long they were.
    """

    length: float
    drafts: int
    free: bool = False  # whether they take no product

    @property
    def right(self) -> float:
        """Share that is right where those before are."""
        return share_right(self.length, self.drafts)


MEASURED: Mapping[str, MeasuredDrafts] = {
    "n-grams": MeasuredDrafts(2.50, 4, free=True),
    "frozen": MeasuredDrafts(2.82, 5),
    "co-trained": MeasuredDrafts(4.79, 5),
}


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A run whose workers draft: EAGLE's one layer on the same GPUs, the policy's own head."""

    scale: ScalePlan

    @property
    def taught(self) -> int:
        """Weights that a drafter learns: a dense layer, and what joins a state and a token."""
        return layer_parameters(self.scale.model.active) + self._joined

    @property
    def drafted(self) -> int:
        """Weights that one draft is multiplied with."""
        return self.taught + self._head

    @property
    def _joined(self) -> int:
        return 2 * self.scale.model.shape.hidden_size**2

    @property
    def _head(self) -> int:
        shape = self.scale.model.shape
        return shape.vocab_size * shape.hidden_size

    def draft_s(self, requests: float) -> float:
        """Of one draft for each of so many requests; its few keys and values are no matter."""
        degree, hardware = self.scale.model.tensor_parallel, self.scale.hardware
        return max(
            HALF * self.drafted / degree / (hardware.read * hardware.read_bytes_s),
            2 * self.drafted * requests / degree / (hardware.computed * hardware.flops),
        )

    def speed(self, arm: str, requests: float, context: float) -> float:
        """Over a worker that drafts nothing, with the number of drafts that is best for it, at most
        as many as were measured; one where none pays.
        """
        source = MEASURED[arm]
        plain = self.scale.round_s(requests, context)
        draft_s = 0.0 if source.free else self.draft_s(requests)

        def with_drafts(drafts: int) -> float:
            round_s = self.scale.round_s(requests, context, tokens=drafts + 1)
            return chain_length(source.right, drafts) * plain / (round_s + drafts * draft_s)

        return max(1.0, *map(with_drafts, range(1, source.drafts + 1)))

    def rollout_s(self, arm: str | None = None) -> float:
        """At best: the longest response alone, or full batches, whatever takes longer."""
        scale, work = self.scale, self.scale.work
        if arm is None:
            return max(scale.tail_s, scale.busy_s)
        alone = self.speed(arm, 1, work.prompt + work.longest / 2)
        full = self.speed(arm, scale.requests, work.prompt + work.response / 2)
        return max(scale.tail_s / alone, scale.busy_s / full)

    def step_s(self, arm: str | None = None) -> float:
        """Rollout and policy step in turn; a push by a tree is left out."""
        return self.rollout_s(arm) + self.scale.train_s

    @property
    def idle_s(self) -> float:
        """Of a worker while the last response of a co-trained rollout is written."""
        full = self.scale.work.prompt + self.scale.work.response / 2
        busy = self.scale.busy_s / self.speed("co-trained", self.scale.requests, full)
        return max(0.0, self.rollout_s("co-trained") - busy)

    @property
    def slot_tokens(self) -> int:
        """Of an optimiser step: twice as many as take as long as Muon's iterations where matrices
        are square, 3.7 for each of their rows (docs/adr/0075).
        """
        return round(2 * 3.7 * self.scale.model.shape.hidden_size)

    @property
    def muon_operations(self) -> float:
        """Of its iterations over all matrices of m rows and n >= m columns: 2 (2 m^2 n + (4 i - 3)
        m^3), whatever the tokens.
        """
        return sum(
            2 * (2 * m * m * n + (4 * ITERATIONS - 3) * m**3) for m, n in map(sorted, self._shapes)
        )

    @property
    def _shapes(self) -> Iterator[tuple[int, int]]:
        shape = self.scale.model.active
        hidden, heads = shape.hidden_size, shape.num_heads * shape.head_dim
        keys = shape.num_kv_heads * shape.head_dim
        yield from ((hidden, 2 * hidden), (heads, hidden), (hidden, heads))
        yield from ((keys, hidden), (keys, hidden))
        yield from 3 * [(hidden, shape.intermediate_size)]

    @property
    def learning_operations(self) -> float:
        """Of an optimiser step without Muon: forward and twice backward through what is taught,
        once each through the head, which is not.
        """
        return self.slot_tokens * (6 * self.taught + 4 * self._head)

    @property
    def slot_share(self) -> float:
        """Of an optimiser step, that its own products take."""
        return self.learning_operations / (self.learning_operations + self.muon_operations)

    @property
    def optimiser_steps(self) -> float:
        """In the idle time of a rollout, on the GPUs of one worker."""
        hardware = self.scale.hardware
        rate = self.scale.model.tensor_parallel * hardware.computed * hardware.flops
        return self.idle_s * rate / (self.learning_operations + self.muon_operations)
