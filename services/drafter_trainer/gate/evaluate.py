"""Measures drafters on rows, in pieces short enough to be preempted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.services.drafter_trainer.config import GateConfig
from paceline.services.drafter_trainer.gate.comparison import Floats
from paceline.services.drafter_trainer.learn.heads import PolicyHead
from paceline.services.drafter_trainer.rows.batcher import pack
from paceline.services.drafter_trainer.rows.sample import FeatureSample
from paceline.speculators.net import DraftNet
from paceline.speculators.packed import PackedRow

PIECE_POSITIONS = 192
GREEDY = 0.01
"""Temperature used for 0: the most likely token has all the mass."""
BUCKETS = ("prompt_end", "early", "late")
PROMPT_END = 8
"""Positions after a non-drafting stretch (a prompt, a tool's answer) that count as its end."""


@torch.inference_mode()
def chain_matches(net: DraftNet, row: PackedRow, head: PolicyHead, steps: int) -> Tensor:
    """[N, K] bool at the N valid positions of a row: whether draft k of a greedy chain equals the
    policy's own token.

    Teacher-forced on the true tokens, which equals the engine's chain as long as all earlier drafts
    are right. Drafts past the end of a document count as misses.
    """
    net.bind(head.embed_tokens, head.lm_head)
    matches = []
    for step, logits in enumerate(net.chain_logits(row, steps)):
        there, inside = row.ahead(step)
        matches.append((logits.argmax(-1) == row.draft_tokens[there]) & inside)
    return torch.stack(matches, dim=1)[row.valid]


@torch.inference_mode()
def chain_survival(
    net: DraftNet,
    row: PackedRow,
    head: PolicyHead,
    steps: int,
    *,
    temperature: float,
    sampled: bool = False,
) -> Tensor:
    """float64 [N, K] at the row's N judged positions: unbiased estimates of P(drafts 1 .. k all
    accepted).

    A round accepts a draft y of q with probability min(1, p(y) / q(y)), where p is the policy at
    the temperature. Greedy drafts are the case of a q with all its mass on argmax. Then, with x
    drawn from p,

        survival_k = E_x[ w(x_1) .. w(x_{k-1}) alpha_k ],   w(x) = min(1, q(x) / p(x)),   alpha =
        sum_y min(p(y), q(y)),

    with step k teacher-forced on x_1 .. x_{k-1}. For greedy drafts w is "the draw equals the draft"
    and alpha is p(draft): chain_matches with its last draw replaced by the expectation, so its
    variance is never larger. The product of p(draft) over all steps would be biased, since it
    counts paths that the engine has left.

    Drafts past the end of a document or of the policy's own tokens count as rejected.
    """
    net.bind(head.embed_tokens, head.lm_head)
    target = (row.next_states @ head.lm_head.T).double() / temperature
    target -= target.logsumexp(-1, keepdim=True)  # row t: log p of token t + 2
    drawn = _drawn(row)
    reached = torch.ones(len(row), dtype=torch.float64)
    survival = []
    for step, logits in enumerate(net.chain_logits(row, steps)):
        there, inside = row.ahead(step)
        tokens = row.draft_tokens[there].clamp(min=0)[:, None]
        if sampled:
            p, log_q = target[there], (logits.double() / temperature).log_softmax(-1)
            alpha = torch.minimum(p, log_q).exp().sum(-1)
            follows = (log_q.gather(1, tokens) - p.gather(1, tokens)).clamp(max=0).exp()[:, 0]
        else:
            drafts = logits.argmax(-1)
            alpha = target[there, drafts].exp()
            follows = (drafts == tokens[:, 0]).double()
        possible = inside & drawn[there]
        survival.append(reached * alpha * possible)
        reached = reached * follows * possible

    return torch.stack(survival, dim=1)[drawn]


def position_buckets(row: PackedRow) -> Tensor:
    """int64 [N] index into BUCKETS of the row's judged positions, by their place in the document.

    The first bucket has the first PROMPT_END positions after a prompt or a tool's answer. The
    second has the first half of the remaining document, the third the second half.
    """
    here = torch.arange(len(row))
    first = torch.full((int(row.documents.max()) + 1,), len(row)).scatter_reduce(
        0, row.documents, here, "amin"
    )
    sizes = torch.bincount(row.documents)
    drawn = _drawn(row)
    # the last earlier position that is not judged
    broken = torch.where(drawn, -1, here).cummax(0).values
    since = here - broken
    after_prompt = (broken >= first[row.documents]) & (since <= PROMPT_END)
    late = (here - first[row.documents]) * 2 >= sizes[row.documents]
    return torch.where(after_prompt, 0, 1 + late.long())[drawn]


def _drawn(row: PackedRow) -> Tensor:
    """bool [T]: whether the policy drew token t + 2; rejected branches have none."""
    return row.valid & (row.draft_tokens >= 0)


@dataclass(frozen=True, slots=True)
class MeasuredRows:
    """Measurements at N positions, in one order for all drafters."""

    accepted: list[Floats]  # [N, K] of each drafter, see chain_survival
    groups: npt.NDArray[np.int64]  # [N] number of the sequence's group of siblings
    buckets: npt.NDArray[np.int64]  # [N] index into BUCKETS

    def lengths_by_bucket(self, drafter: int) -> dict[str, float]:
        """E[len] of one drafter by part of the response, without parts that have no position."""
        totals = 1.0 + self.accepted[drafter].sum(axis=1)
        there = {name: self.buckets == number for number, name in enumerate(BUCKETS)}
        return {
            name: float(totals[chosen].mean()) for name, chosen in there.items() if chosen.any()
        }


class GateJob:
    """Measures frozen drafters on the same rows; `advance` until `done`, one drafter and
    piece at a time.

    A job may outlive its activation, so it holds the heads of its rows.
    """

    def __init__(
        self,
        nets: Sequence[DraftNet],
        samples: Sequence[FeatureSample],
        heads: Mapping[str, PolicyHead],
        settings: GateConfig,
        window: int,
    ) -> None:
        self._nets = tuple(nets)
        self._pieces = _pieces(samples, window)
        self._settings, self._window = settings, window
        self._accepted: list[list[Floats]] = [[] for _ in self._nets]
        self._groups: list[npt.NDArray[np.int64]] = []
        self._buckets: list[npt.NDArray[np.int64]] = []
        self._numbers: dict[str, int] = {}  # of groups
        self._next = 0
        self._row: PackedRow | None = None
        self._temperature = 1.0  # of the piece at hand
        self.heads = {sample.lm_head_hash: heads[sample.lm_head_hash] for sample in samples}
        """Heads of its rows by hash, kept even if the caller drops them."""
        self.head = self.heads[samples[-1].lm_head_hash]
        """Head of the newest policy version."""

    @property
    def done(self) -> bool:
        """All drafters measured on all pieces."""
        return self.even and not self._pieces

    @property
    def even(self) -> bool:
        """All drafters measured on the same pieces, one at least."""
        return self._row is None and bool(self._groups)

    @property
    def positions(self) -> int:
        """Number of positions measured for all drafters."""
        return sum(map(len, self._groups)) if self.even else 0

    @property
    def groups(self) -> int:
        """Number of sibling groups measured for any drafter."""
        return len(self._numbers)

    def advance(self) -> None:
        """Measures the next drafter on the next piece."""
        if self._row is None:
            self._open(self._pieces.pop())
        row, net = self._row, self._nets[self._next]
        assert row is not None
        survival = chain_survival(
            net,
            row,
            self.heads[row.lm_head_hash],
            self._settings.draft_steps,
            temperature=self._temperature,
            sampled=self._settings.verification == "rejection",
        )
        self._accepted[self._next].append(survival.numpy())
        self._next += 1
        if self._next == len(self._nets):
            self._row, self._next = None, 0

    def _open(self, samples: list[FeatureSample]) -> None:
        row = self._row = pack(samples, window=self._window)
        self._temperature = samples[0].temperature or GREEDY
        numbers = [self._numbers.setdefault(s.siblings, len(self._numbers)) for s in samples]
        self._groups.append(np.array(numbers)[row.documents[_drawn(row)].numpy()])
        self._buckets.append(position_buckets(row).numpy())

    def measured(self) -> MeasuredRows:
        """The measurements so far; call it when `even`."""
        accepted = [np.concatenate(pieces) for pieces in self._accepted]
        groups, buckets = np.concatenate(self._groups), np.concatenate(self._buckets)
        return MeasuredRows(accepted, groups, buckets)


def _pieces(samples: Sequence[FeatureSample], window: int) -> list[list[FeatureSample]]:
    """Samples of one head and temperature each, few enough to be measured between two looks at the
    lease; the last are measured first.
    """
    pieces: list[list[FeatureSample]] = [[]]
    for sample in samples:
        full = (
            sum(min(s.positions, window) for s in pieces[-1]) + sample.positions > PIECE_POSITIONS
        )
        if pieces[-1] and (full or _way(pieces[-1][0]) != _way(sample)):
            pieces.append([])
        pieces[-1].append(sample)
    return [piece for piece in pieces if piece]


def _way(sample: FeatureSample) -> tuple[str, float]:
    return sample.lm_head_hash, sample.temperature
