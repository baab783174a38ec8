"""Limits the drafts of a round to the drafts with enough chance of acceptance for their share of
the forward.

The module calibrates the drafters' probabilities, measures the cost of a forward by its number of
tokens, and chooses the nodes. Drafts are left out before anything is drawn. The choice depends only
on drafters' scores and past rounds, so the emitted tokens do not change.

Nodes are sorted by their probability p of being accepted. The first k are verified, with the k that
maximises (B + p_1 + ... + p_k) / (F + c(B + k)). This rate is the tokens of a round over its
seconds. c gives the forward's seconds by its number of tokens. F is the seconds of drafting and all
other work. As p falls along a path, the chosen nodes of a row form a tree.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch.nn import functional

from paceline.arm_names import speculator_of
from paceline.speculators.base import Drafts

BIN_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Inner edges of the bins of a drafter's probability for one node."""
PRIOR_TRIALS = 8.0
"""Trials with which each bin starts, at its own probability."""
MEMORY = 4000.0
"""Trials after which a bin's counts are halved."""
COST_SHARE = 0.1
"""Weight of a new measurement of a forward; a measurement above 3 times the expected value counts
as 3 times.
"""
ACCEPTED_SHARE = 0.02
"""Weight of a new row in the mean of a drafter's accepted drafts."""
PROBE_EVERY = 64
"""Every so many rounds of an arm, all drafts are verified. Otherwise a draft that is never verified
would keep its low estimate for ever.
"""
FLOOR_SHARE = 0.5
"""A node is not expanded below this share of the chance of the last round's least likely verified
node.
"""


class Calibration:
    """Frequency with which the target draws a draft, given that it drew the parent, by the
    drafter's probability of the draft.
    """

    def __init__(self) -> None:
        edges = (0.0, *BIN_EDGES, 1.0)
        centers = [(low + high) / 2 for low, high in pairwise(edges)]
        self._hits = [center * PRIOR_TRIALS for center in centers]
        self._trials = [PRIOR_TRIALS] * len(centers)
        self._chances = centers

    def chance(self, share: float) -> float:
        """Probability that the target draws a node with the drafter's probability `share`."""
        return self._chances[bisect_left(BIN_EDGES, share)]

    def learn(self, share: float, drawn: bool) -> None:
        """Count a node with a drawn parent; `drawn`: whether the target drew the node."""
        place = bisect_left(BIN_EDGES, share)
        if self._trials[place] >= MEMORY:
            self._hits[place] *= 0.5
            self._trials[place] *= 0.5
        self._hits[place] += drawn
        self._trials[place] += 1.0
        self._chances[place] = self._hits[place] / self._trials[place]


class ForwardCost:
    """Measured seconds of a target forward and its draws by tokens, linear between sizes."""

    def __init__(self) -> None:
        self._sizes = np.empty(0)
        self._seconds = np.empty(0)

    @property
    def known(self) -> bool:
        """True when two sizes have been measured."""
        return len(self._sizes) > 1

    def learn(self, tokens: int, seconds: float) -> None:
        """Record a forward of `tokens`; sizes within an eighth of each other share one entry."""
        near = np.flatnonzero(np.abs(self._sizes - tokens) <= tokens / 8)
        if len(near):
            at = int(near[0])
            expected = self._seconds[at] * tokens / self._sizes[at]
            change = min(seconds, 3 * expected) - expected
            self._seconds[at] += COST_SHARE * change * self._sizes[at] / tokens
            return
        at = int(np.searchsorted(self._sizes, tokens))
        self._sizes = np.insert(self._sizes, at, tokens)
        self._seconds = np.insert(self._seconds, at, seconds)

    def seconds(self, rows: int, drafts: int) -> list[float]:
        """Expected seconds of forwards of rows, rows + 1, ..., rows + drafts tokens; they never
        fall.

        Beyond the largest measured size, seconds grow in proportion to tokens.
        """
        tokens = np.arange(rows, rows + drafts + 1, dtype=np.float64)
        inside = np.interp(tokens, self._sizes, np.maximum.accumulate(self._seconds))
        found: list[float] = (inside * np.maximum(tokens / self._sizes[-1], 1.0)).tolist()
        return found


@dataclass(slots=True)
class _Overhead:
    """State of one arm: seconds of a round besides the forward, its last threshold, and rounds
    until the next probe.
    """

    seconds: float = 0.0
    floor: float = 0.0
    until_probe: int = PROBE_EVERY


RowDrafts = tuple[list[int], list[float], Sequence[int]]
"""Tokens, scores and parents of one row, as Drafts has them."""
Node = tuple[float, int, int]
"""A draft that may be verified: (-chance, row, index). Sorting puts the highest chance first, and
parents before children.
"""


class Budget:
    """Chooses the nodes of rounds and learns from the outcomes.

    It uses plain numbers: a round has tens of nodes, and one array operation costs as much as a
    loop over them.
    """

    def __init__(self) -> None:
        self.cost = ForwardCost()
        self._calibrations: defaultdict[str, Calibration] = defaultdict(Calibration)
        self._overheads: defaultdict[str, _Overhead] = defaultdict(_Overhead)
        self._accepted: dict[str, float] = {}

    def floor(self, arm: str) -> float:
        """Probability below which the arm need not expand a node."""
        overhead = self._overheads[arm]
        return overhead.floor if overhead.until_probe > 1 else 0.0

    def forget(self, speculator: str) -> None:
        """Reset the calibration of a drafter with new weights; measured seconds are kept."""
        self._calibrations.pop(speculator, None)
        self._accepted.pop(speculator, None)
        for arm, overhead in self._overheads.items():
            if speculator_of(arm) == speculator:
                overhead.floor = 0.0

    def mean_accepted(self, speculator: str) -> float:
        """Recent mean of a drafter's accepted drafts in a row; infinite before its first drafts."""
        return self._accepted.get(speculator, math.inf)

    def expected(self, drafts: Drafts, speculator: str) -> list[float]:
        """Expected number of accepted drafts of each row's chain."""
        counts = [0.0] * len(drafts.tokens)
        for negative, row, _ in self._nodes(drafts, self._calibrations[speculator]):
            counts[row] -= negative
        return counts

    def prune(self, drafts: Drafts, speculator: str, arm: str) -> Drafts:
        """Moves the drafts worth verifying to the front of each row and drops the rest. All drafts
        are kept until costs are measured.
        """
        if not self.cost.known:
            return drafts
        overhead = self._overheads[arm]
        overhead.until_probe = (overhead.until_probe - 1) or PROBE_EVERY
        if overhead.until_probe == PROBE_EVERY:
            return drafts
        calibration = self._calibrations[speculator]
        nodes = self._nodes(drafts, calibration)
        chosen = nodes[: self._best_count(nodes, len(drafts.tokens), arm)]
        if len(chosen) == drafts.tokens.numel():
            return drafts
        return _only(drafts, chosen)

    def _nodes(self, drafts: Drafts, calibration: Calibration) -> list[Node]:
        """All drafts, sorted by their chance of being accepted, highest first."""
        nodes: list[Node] = []
        chance = calibration.chance
        for row, (tokens, scores, parents) in enumerate(row_drafts(drafts)):
            reached, score_of = [1.0], [1.0, *scores]
            for index, (token, above) in enumerate(zip(tokens, parents, strict=True)):
                here = (
                    reached[above] * chance(scores[index] / score_of[above]) if token >= 0 else 0.0
                )
                reached.append(here)
                if here > 0.0:
                    nodes.append((-here, row, index))
        nodes.sort()
        return nodes

    def _best_count(self, nodes: Sequence[Node], rows: int, arm: str) -> int:
        """Number of first nodes with the best rate."""
        overhead = self._overheads[arm]
        costs = self.cost.seconds(rows, len(nodes))
        gain, count = float(rows), 0
        best = gain / (overhead.seconds + costs[0])
        for number, (negative, _, _) in enumerate(nodes, 1):
            gain -= negative
            rate = gain / (overhead.seconds + costs[number])
            if rate > best:
                best, count = rate, number
        chances = (-negative for negative, _, _ in nodes[:count])
        overhead.floor = FLOOR_SHARE * min(chances, default=0.0)
        return count

    def learn(self, speculator: str, became: Iterable[tuple[RowDrafts, Set[int]]]) -> None:
        """Record the outcome of drafts: drawn nodes per row, 0 for its root, i + 1 for draft i."""
        calibration = self._calibrations[speculator]
        for (tokens, scores, parents), drawn in became:
            accepted = len(drawn) - 1.0
            before = self._accepted.setdefault(speculator, accepted)
            self._accepted[speculator] = before + ACCEPTED_SHARE * (accepted - before)
            score_of = [1.0, *scores]
            for index, (token, above) in enumerate(zip(tokens, parents, strict=True)):
                if token >= 0 and above in drawn:
                    calibration.learn(scores[index] / score_of[above], index + 1 in drawn)

    def spend(self, arm: str, seconds: float) -> None:
        """Record the seconds of a round of the arm besides its forward."""
        overhead = self._overheads[arm]
        before = overhead.seconds or seconds
        overhead.seconds = before + COST_SHARE * (min(seconds, 3 * before) - before)


def row_drafts(drafts: Drafts) -> Iterator[RowDrafts]:
    """Tokens, scores and parents, row by row."""
    tokens, scores = drafts.tokens.tolist(), drafts.scores.tolist()
    chains = [range(drafts.tokens.shape[1])] * len(tokens)
    parents = chains if drafts.parents is None else drafts.parents.tolist()
    return zip(tokens, scores, parents, strict=True)


def _only(drafts: Drafts, chosen: Sequence[Node]) -> Drafts:
    """Keeps only the chosen nodes; every parent of a chosen node is chosen too."""
    kept = torch.zeros_like(drafts.tokens, dtype=torch.bool)
    kept[[row for _, row, _ in chosen], [index for _, _, index in chosen]] = True
    names = kept.long().cumsum(dim=1)  # new index of each chosen node, behind the root 0
    width = int(names[:, -1].max())
    order = kept.int().argsort(dim=1, descending=True, stable=True)[:, :width]
    absent = ~kept.gather(1, order)
    parents = None
    if drafts.parents is not None:
        above = drafts.parents.gather(1, order)
        parents = functional.pad(names, (1, 0)).gather(1, above).masked_fill(absent, 0)
    return Drafts(
        drafts.tokens.gather(1, order).masked_fill(absent, -1),
        drafts.scores.gather(1, order).masked_fill(absent, 1.0),
        parents,
    )
