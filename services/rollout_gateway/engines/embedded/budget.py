"""How many drafts a round verifies: those whose chance of being accepted pays for their share of the forward.

Owns the calibration of drafters' own probabilities, the measured cost of a forward by its number of tokens, and the
choice of nodes. Drafts are left out before anything is drawn and by nothing but drafters' scores and past rounds, so
what is emitted does not change.

Of nodes sorted by their probability p of being accepted, the first k are verified that maximise the rate
(B + p_1 + ... + p_k) / (F + c(B + k)): tokens of a round over its seconds, with c the forward's seconds by its tokens
and F those of drafting and everything else. Since p falls along a path, the chosen nodes of a row are a tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.speculators import Drafts

Floats = npt.NDArray[np.float64]

BIN_EDGES = np.array([0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98])
"""Inner edges of the bins of a drafter's probability of one node."""
_EDGES = np.concatenate(([0.0], BIN_EDGES, [1.0]))
BIN_CENTERS = (_EDGES[1:] + _EDGES[:-1]) / 2
PRIOR_TRIALS = 8.0
"""Trials by which a bin's own probability is believed at first."""
MEMORY = 4000.0
"""Trials of a bin that count; older ones fade."""
COST_SHARE = 0.1
"""Weight of a new measurement of a forward; one of 3 times what was expected counts as 3 times."""
FLOOR_SHARE = 0.5
"""A node below this share of the last round's least likely verified one is not drafted on."""


class Calibration:
    """How often a draft is the target's draw, by the drafter's own probability of it, given its parent was drawn."""

    def __init__(self) -> None:
        self._hits = BIN_CENTERS * PRIOR_TRIALS
        self._trials = np.full(len(BIN_CENTERS), PRIOR_TRIALS)

    def chance(self, shares: Floats) -> Floats:
        """Probability of being drawn, for nodes to which the drafter gives `shares`."""
        return (self._hits / self._trials)[np.searchsorted(BIN_EDGES, shares)]

    def learn(self, shares: Floats, drawn: npt.NDArray[np.bool_]) -> None:
        """Nodes [n] whose parents were drawn, and whether they were."""
        bins = np.searchsorted(BIN_EDGES, shares)
        self._hits += np.bincount(bins, weights=drawn, minlength=len(BIN_CENTERS))
        self._trials += np.bincount(bins, minlength=len(BIN_CENTERS))
        fade = np.minimum(MEMORY / self._trials, 1.0)
        self._hits *= fade
        self._trials *= fade


class ForwardCost:
    """Seconds of a target forward and its draws by the number of tokens, as measured; linear between sizes."""

    def __init__(self) -> None:
        self._sizes = np.empty(0)
        self._seconds = np.empty(0)

    @property
    def known(self) -> bool:
        """True when two sizes have been measured."""
        return len(self._sizes) > 1

    def learn(self, tokens: int, seconds: float) -> None:
        """A forward of `tokens`; sizes within an eighth of each other are one."""
        near = np.flatnonzero(np.abs(self._sizes - tokens) <= tokens / 8)
        if len(near):
            at = int(near[0])
            expected = self._seconds[at] * tokens / self._sizes[at]
            self._seconds[at] += COST_SHARE * (min(seconds, 3 * expected) - expected) * self._sizes[at] / tokens
            return
        at = int(np.searchsorted(self._sizes, tokens))
        self._sizes = np.insert(self._sizes, at, tokens)
        self._seconds = np.insert(self._seconds, at, seconds)

    def seconds(self, tokens: Floats) -> Floats:
        """Expected seconds; more tokens never cost less. Beyond the largest size, in proportion."""
        rising = np.maximum.accumulate(self._seconds)
        inside = np.interp(tokens, self._sizes, rising)
        return inside * np.maximum(tokens / self._sizes[-1], 1.0)


@dataclass(slots=True)
class _Overhead:
    """Of one arm: seconds of a round besides the forward, and its last threshold."""

    seconds: float = 0.0
    floor: float = 0.0


class Budget:
    """Chooses the nodes of rounds and learns from what became of them."""

    def __init__(self) -> None:
        self.cost = ForwardCost()
        self._calibrations: dict[str, Calibration] = {}
        self._overheads: dict[str, _Overhead] = {}

    def floor(self, arm: str) -> float:
        """Probability below which the arm need not draft on."""
        return self._overhead(arm).floor

    def prune(self, drafts: Drafts, speculator: str, arm: str) -> Drafts:
        """The drafts that pay, every row's moved to its front; all of them while costs are not known."""
        if not self.cost.known:
            return drafts
        tokens = drafts.tokens.cpu().numpy()
        parents = None if drafts.parents is None else drafts.parents.cpu().numpy()
        chances = self._chances(drafts, tokens, parents, speculator)
        keep = self._worth(chances, arm)
        width = int(keep.sum(axis=1).max(initial=0))
        order = np.argsort(~keep, axis=1, kind="stable")[:, :width]
        kept = np.take_along_axis(keep, order, axis=1)
        device = drafts.tokens.device
        chosen = torch.from_numpy(np.where(kept, np.take_along_axis(tokens, order, axis=1), -1)).to(device)
        scores = drafts.scores.gather(1, torch.from_numpy(order).to(device))
        if parents is None:
            return Drafts(chosen, scores)
        names = np.concatenate((np.zeros((len(keep), 1), dtype=np.int64), np.cumsum(keep, axis=1)), axis=1)
        renamed = np.take_along_axis(names, np.take_along_axis(parents, order, axis=1), axis=1)
        return Drafts(chosen, scores, torch.from_numpy(np.where(kept, renamed, 0)).to(device))

    def _chances(
        self, drafts: Drafts, tokens: npt.NDArray[np.int64], parents: npt.NDArray[np.int64] | None, speculator: str
    ) -> Floats:
        """Probability [B, N] that a node is accepted, 0 where there is none."""
        own = self._calibration(speculator).chance(node_shares(drafts.scores.cpu().numpy(), parents))
        if parents is None:
            reached = own.cumprod(axis=1)
        else:
            reached = np.ones((len(own), own.shape[1] + 1))
            for node in range(own.shape[1]):
                reached[:, node + 1] = own[:, node] * np.take_along_axis(reached, parents[:, node : node + 1], 1)[:, 0]
            reached = reached[:, 1:]
        return np.where(tokens >= 0, reached, 0.0)

    def _worth(self, chances: Floats, arm: str) -> npt.NDArray[np.bool_]:
        """bool [B, N]: nodes of the best rate; ties go to the node that stands first, which is the parent."""
        rows = len(chances)
        flat = chances.ravel()
        order = np.argsort(-flat, kind="stable")
        gains = rows + np.concatenate(([0.0], np.cumsum(flat[order])))
        overhead = self._overhead(arm)
        rates = gains / (overhead.seconds + self.cost.seconds(rows + np.arange(len(gains), dtype=np.float64)))
        count = int(np.argmax(rates))
        while count and flat[order[count - 1]] <= 0.0:
            count -= 1
        overhead.floor = FLOOR_SHARE * float(flat[order[count - 1]]) if count else 0.0
        keep = np.zeros(len(flat), dtype=np.bool_)
        keep[order[:count]] = True
        return keep.reshape(chances.shape)

    def learn(self, speculator: str, drafts: Drafts, reached: npt.NDArray[np.bool_]) -> None:
        """What became of a round's drafts: reached bool [B, N]."""
        tokens = drafts.tokens.cpu().numpy()
        parents = None if drafts.parents is None else drafts.parents.cpu().numpy()
        shares = node_shares(drafts.scores.cpu().numpy(), parents)
        rooted = np.concatenate((np.ones((len(reached), 1), dtype=np.bool_), reached), axis=1)
        tried = rooted[:, :-1] if parents is None else np.take_along_axis(rooted, parents, axis=1)
        tried = tried & (tokens >= 0)
        self._calibration(speculator).learn(shares[tried], reached[tried])

    def spend(self, arm: str, seconds: float) -> None:
        """Seconds of a round of the arm besides its forward."""
        overhead = self._overhead(arm)
        before = overhead.seconds or seconds
        overhead.seconds = before + COST_SHARE * (min(seconds, 3 * before) - before)

    def _calibration(self, speculator: str) -> Calibration:
        return self._calibrations.setdefault(speculator, Calibration())

    def _overhead(self, arm: str) -> _Overhead:
        return self._overheads.setdefault(arm, _Overhead())


def node_shares(scores: npt.NDArray[np.float32], parents: npt.NDArray[np.int64] | None) -> Floats:
    """The drafter's probability [B, N] of each node given its parent, from those of whole paths."""
    rooted = np.concatenate((np.ones((len(scores), 1)), scores), axis=1)
    above = rooted[:, :-1] if parents is None else np.take_along_axis(rooted, parents, axis=1)
    return np.asarray(np.clip(rooted[:, 1:] / np.maximum(above, 1e-12), 0.0, 1.0))
