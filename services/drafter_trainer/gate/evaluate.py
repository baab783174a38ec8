"""Measures drafters on rows, in pieces of a given time, between which a lease can end."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.services.drafter_trainer.config import GateConfig
from paceline.services.drafter_trainer.gate.comparison import Floats
from paceline.services.drafter_trainer.rows.sample import FeatureSample, PolicyHead, pack
from paceline.speculators.net import DraftNet
from paceline.speculators.net_drafter import DRAWN_FROM
from paceline.speculators.packed import PackedRow

ROW_POSITIONS = 192
"""Positions of the samples that are packed into one row, unless a single sample has more."""
PIECE_S = 0.25
"""Processor seconds of a piece: a small share of the deadline of a recalled lease, and long enough
to compute more than to read the matrix of a large vocabulary.
"""
FIRST_ROWS = 8
"""Number of positions with logits computed together until their time is measured."""
_FASTER = 4
"""How many times as many positions the next piece may have."""
GREEDY = 0.01
"""Temperature used for 0: the most likely token has all the mass."""
_LEAST = 1e-300
"""Probability used for 0."""


class Pace:
    """How many positions' logits are computed in `piece_s` seconds, measured by kind of work."""

    def __init__(
        self, piece_s: float = PIECE_S, clock: Callable[[], float] = time.thread_time
    ) -> None:
        """clock: seconds; the default counts the calling thread's processor time."""
        self.piece_s, self.clock = piece_s, clock
        self._rows: dict[type, int] = {}

    def cut(self, whole: slice, work: type) -> Iterator[slice]:
        """Parts of `whole` in order, as long as the last measurement of that work allows."""
        start = whole.start
        while start < whole.stop:
            rows = self._rows.get(work, FIRST_ROWS)
            yield slice(start, min(start + rows, whole.stop))
            start += rows

    @contextmanager
    def measured(self, part: slice, work: type) -> Iterator[None]:
        """Measures the block, which does that work for `part`."""
        began = self.clock()
        yield
        took_s, count = self.clock() - began, part.stop - part.start
        if took_s * _FASTER > self.piece_s:
            self._rows[work] = max(1, int(count * self.piece_s / took_s))
        else:
            known = self._rows.get(work, FIRST_ROWS)
            self._rows[work] = max(known, _FASTER * count)


def chain_survival(
    net: DraftNet,
    row: PackedRow,
    head: PolicyHead,
    steps: int,
    *,
    temperature: float,
    noise: bool = True,
) -> Tensor:
    """The result of `survival_in_pieces`, computed without a pause."""
    whole = Pace(float("inf"))
    pieces = survival_in_pieces(
        net, row, head, steps, temperature=temperature, noise=noise, pace=whole
    )
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            found: Tensor = end.value
            return found


@torch.inference_mode()
def survival_in_pieces(
    net: DraftNet,
    row: PackedRow,
    head: PolicyHead,
    steps: int,
    *,
    temperature: float,
    noise: bool,
    pace: Pace,
) -> Generator[None, None, Tensor]:
    """float64 [N, K] at the row's N judged positions: unbiased estimates of P(drafts 1 .. k all
    accepted).

    A round accepts a draft that equals the draw x from p, the policy at the temperature. Then

        survival_k = E_x[ w(x_1) .. w(x_{k-1}) alpha_k ],   w(x) = P(x is the draft | draw x),
        alpha = sum_x p(x) w(x),

    with step k teacher-forced on x_1 .. x_{k-1}. The variance is never larger than that of counted
    matches.
    The product of alpha over all steps would be biased, since it counts paths that the engine
    has left. noise: drafts are draws with the policy's own noise; else the most likely tokens.

    Drafts past the end of a document or of the policy's own tokens count as rejected. Yields after
    each piece of `pace`.
    """
    net.bind(head.embed_tokens, head.lm_head)
    policy = _Policy(row, head.lm_head, net.token_ids, temperature)
    for part in pace.cut(slice(0, len(row)), PolicyHead):
        with pace.measured(part, PolicyHead):
            policy.measure(part)
        yield
    drawn = row.valid
    reached = torch.ones(len(row), dtype=torch.float64)
    survival: dict[int, Tensor] = {}
    for step, at, states in net.chain_states(row, steps):
        yield
        found = survival.setdefault(step, torch.zeros(len(row), dtype=torch.float64))
        there, inside = row.ahead(step)
        possible = inside & drawn[there]
        for part in pace.cut(at, type(net)):
            with pace.measured(part, type(net)):
                own = slice(part.start - at.start, part.stop - at.start)
                logits = net.draft_logits(step, states[own])
                alpha, follows = (policy.drawn if noise else policy.likeliest)(logits, there[part])
                found[part] = reached[part] * alpha * possible[part]
                reached[part] *= follows * possible[part]
            yield

    return torch.stack([*survival.values()], dim=1)[drawn]


class _Policy:
    """p of token t + 2 at each row t, computed for drafted tokens; ids int64 [Vd]: the tokens that
    can be drafted; None: all.
    """

    def __init__(
        self, row: PackedRow, head: Tensor, ids: Tensor | None, temperature: float
    ) -> None:
        self._row, self._head, self._ids, self._temperature = row, head, ids, temperature
        self._log_z = torch.empty(len(row), dtype=torch.float64)

    def measure(self, part: slice) -> None:
        """Computes log sum exp of the logits of these rows, over all tokens."""
        logits = self._row.next_states[part] @ self._head.T
        self._log_z[part] = (logits.double() / self._temperature).logsumexp(-1)

    def likeliest(self, logits: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """alpha and w of the N most likely tokens, each float64 [N], from logits [N, Vd] and rows
        [N].
        """
        drafts = logits.argmax(-1) if self._ids is None else self._ids[logits.argmax(-1)]
        own = (self._row.next_states[places] * self._head[drafts]).sum(-1).double()
        alpha = (own / self._temperature - self._log_z[places]).clamp(max=0).exp()
        return alpha, (drafts == self._row.draft_tokens[places]).double()

    def drawn(self, logits: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """The same of N draws from q, the drafter at the temperature, with the policy's own noise.

        Both draw token i with probability 1 / sum_j max(p_j / p_i, q_j / q_i). In the order of p /
        q, the sum is P / p_i + Q / q_i: P is the mass of p behind i, Q the mass of q up to i.
        """
        top = logits.topk(min(DRAWN_FROM, logits.shape[-1]), dim=-1)
        tokens = top.indices if self._ids is None else self._ids[top.indices]
        log_q = (top.values.double() / self._temperature).log_softmax(-1)
        own = torch.einsum("nh,nch->nc", self._row.next_states[places], self._head[tokens])
        log_p = own.double() / self._temperature - self._log_z[places, None]
        order = (log_p - log_q).argsort(-1)
        p, q = (part.gather(1, order).exp().clamp(min=_LEAST) for part in (log_p, log_q))
        w = 1 / ((1 - p.cumsum(-1)).clamp(min=0) + q.cumsum(-1) * p / q)
        follows = tokens.gather(1, order) == self._row.draft_tokens[places, None]
        return (p * w).sum(-1).clamp(max=1), (w * follows).sum(-1).clamp(max=1)


class GateJob:
    """Measures frozen drafters on the same rows; `advance` until `done`, one drafter and piece at a
    time.

    A job may outlive its activation, so it holds the heads of its rows.
    """

    def __init__(
        self,
        nets: Sequence[DraftNet],
        samples: Sequence[FeatureSample],
        heads: Mapping[str, PolicyHead],
        settings: GateConfig,
        window: int,
        pace: Pace,
    ) -> None:
        """pace: how long one `advance` computes."""
        self._nets = tuple(nets)
        self._rows = _rows(samples, window)
        self._pace = pace
        self._settings, self._window = settings, window
        self._accepted: list[list[Floats]] = [[] for _ in self._nets]
        self._groups: list[npt.NDArray[np.int64]] = []
        self._numbers: dict[str, int] = {}  # of groups
        self._measuring: Iterator[None] | None = None  # of the row at hand
        self.heads = {sample.lm_head_hash: heads[sample.lm_head_hash] for sample in samples}
        """Heads of its rows by hash, kept even if the caller drops them."""
        self.head = self.heads[samples[-1].lm_head_hash]
        """Head of the newest policy version."""

    @property
    def done(self) -> bool:
        """All drafters measured on all rows."""
        return self.even and not self._rows

    @property
    def even(self) -> bool:
        """All drafters measured on the same rows, one at least."""
        return self._measuring is None and bool(self._groups)

    @property
    def positions(self) -> int:
        """Number of positions measured for all drafters."""
        return sum(map(len, self._groups)) if self.even else 0

    @property
    def groups(self) -> int:
        """Number of sibling groups measured for any drafter."""
        return len(self._numbers)

    def advance(self) -> None:
        """Measures on for the time of a piece, or until all drafters are measured on a row."""
        if self._measuring is None:
            self._measuring = self._measure(self._rows.pop())
        ends_s = self._pace.clock() + self._pace.piece_s
        for _ in self._measuring:
            if self._pace.clock() >= ends_s:
                return
        self._measuring = None

    def _measure(self, samples: list[FeatureSample]) -> Iterator[None]:
        """Measures all drafters on a row of these samples; yields between two pieces."""
        row = self._open(samples)
        for net, accepted in zip(self._nets, self._accepted, strict=True):
            survival = yield from survival_in_pieces(
                net,
                row,
                self.heads[row.lm_head_hash],
                self._settings.draft_steps,
                temperature=samples[0].temperature or GREEDY,
                noise=self._settings.drafts == "drawn",
                pace=self._pace,
            )
            accepted.append(survival.numpy())

    def _open(self, samples: list[FeatureSample]) -> PackedRow:
        row = pack(samples, window=self._window)
        numbers = [self._numbers.setdefault(s.siblings, len(self._numbers)) for s in samples]
        self._groups.append(np.array(numbers)[row.documents[row.valid].numpy()])
        return row

    def measured(self) -> tuple[list[Floats], npt.NDArray[np.int64]]:
        """The measurements so far at N positions, in one order for all drafters: [N, K] of each
        drafter, see chain_survival, and [N] numbers of the sequences' groups of siblings. Call it
        when `even`.
        """
        return [np.concatenate(pieces) for pieces in self._accepted], np.concatenate(self._groups)


def _rows(samples: Sequence[FeatureSample], window: int) -> list[list[FeatureSample]]:
    """Samples of one head and temperature each; the last are measured first."""
    rows: list[list[FeatureSample]] = [[]]
    for sample in samples:
        full = sum(min(s.positions, window) for s in rows[-1]) + sample.positions > ROW_POSITIONS
        if rows[-1] and (full or _way(rows[-1][0]) != _way(sample)):
            rows.append([])
        rows[-1].append(sample)
    return [row for row in rows if row]


def _way(sample: FeatureSample) -> tuple[str, float]:
    return sample.lm_head_hash, sample.temperature
