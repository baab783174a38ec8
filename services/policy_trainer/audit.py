"""Judges whether the engine drew by the log-probs that the trainer computes, and which way of
drawing does not where it did not.

A sample of the trajectories is scored by the trainer in the policy version that drew them. Their
tokens are counted by cells: a cell is the arms that have drafted in the response so far; one format
of numbers; a beginning that was reused or computed; keys and values of this
policy or of an earlier one. A cell with enough tokens is
judged by the mean of its gaps and by their 99th percentile, then counted anew. Of a cell beyond its
bound those of its paths are named that no cell within its bound has; one that a named path accounts
for names nothing. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from paceline.arm_names import OFF
from paceline.models.profiles import FINE
from paceline.services.policy_trainer.config import AuditBound, AuditConfig
from paceline.trajectory import (
    ARM_PATH,
    DRAFTED_PATH,
    NUMBERS_PATH,
    PLAIN_PATH,
    REUSED_PATH,
    SWAPPED_PATH,
    DrawSpan,
    Trajectory,
)

LEAST_GAP, LARGEST_GAP = 1e-7, 1e3
PER_DECADE, BUCKETS = 8, 81
"""Buckets of gaps: number 0 holds those up to LEAST_GAP, each further one ends a decade / 8 later,
the last takes the rest.
"""
UPPER = 0.99
_POOLED = 4
"""Times `least_tokens` that arms without enough tokens of their own have together when they are
judged as one.
"""
_HINT = 8
"""Part of `least_tokens` that clears."""
JOINT, _APART = "+", 2
"""Between the arms of a cell, and how many it has at most that are told apart."""
_EXACT, _HALF = "float32", ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class AuditCell:
    """Gaps of the tokens that were drawn alike, nats."""

    tokens: int = 0
    total: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)  # number (decimal) -> tokens

    def __add__(self, other: AuditCell) -> AuditCell:
        names = self.buckets | other.buckets
        buckets = {name: self.buckets.get(name, 0) + other.buckets.get(name, 0) for name in names}
        return AuditCell(self.tokens + other.tokens, self.total + other.total, buckets)

    @property
    def mean(self) -> float:
        """Of the gaps; 0 without any."""
        return self.total / self.tokens if self.tokens else 0.0

    @property
    def upper(self) -> float:
        """The gap that a hundredth of the tokens exceed, as the middle of its bucket; 0 without
        any.
        """
        left = math.floor((1 - UPPER) * self.tokens)
        for number in sorted(map(int, self.buckets), reverse=True):
            left -= self.buckets[str(number)]
            if left < 0:
                return LEAST_GAP * 10 ** ((number - 0.5) / PER_DECADE) if number else 0.0
        return 0.0


@dataclass(frozen=True, slots=True)
class PathVerdict:
    """A path that is beyond its bound; see proto AuditVerdict."""

    path: str
    tokens: int
    mean: float
    upper: float
    mean_bound: float
    upper_bound: float


@dataclass(frozen=True, slots=True)
class AuditState:
    """What later steps are judged with."""

    open: dict[str, AuditCell] = field(default_factory=dict)  # cell -> not judged yet
    within: dict[str, bool] = field(default_factory=dict)  # cell -> its last verdict
    named: tuple[str, ...] = ()  # paths, once each


def cell_name(arms: str, numbers: str, *, reused: bool, stale: bool) -> str:
    """The cell of tokens drawn so; `arms`: as `drafted_so_far` has them."""
    return json.dumps([arms, numbers, reused, stale])


def paths_of(cell: str) -> tuple[str, ...]:
    """The paths that its tokens came by; none where they came by the plain one."""
    arms, numbers, reused, stale = json.loads(cell)
    there = {
        **{_drafted_path(arm): arm != OFF for arm in arms.split(JOINT)},
        NUMBERS_PATH + numbers: numbers not in (_EXACT, *_HALF),
        REUSED_PATH: reused,
        SWAPPED_PATH: stale,
    }
    return tuple(path for path, is_one in there.items() if is_one)


def _drafted_path(arm: str) -> str:
    return DRAFTED_PATH if arm == DRAFTED_PATH else ARM_PATH + arm


def drafted_so_far(spans: Iterable[DrawSpan]) -> Iterator[str]:
    """Of each span the arms that have drafted in its response up to its end, joined by JOINT: "off"
    where none has, DRAFTED_PATH where more than two have. What a drafted round leaves in the cache
    all later ones read.
    """
    arms: set[str] = set()
    end = -1
    for span in spans:
        if span.start != end:
            arms = set()  # another turn
        arms |= {span.arm} - {OFF}
        end = span.end
        yield DRAFTED_PATH if len(arms) > _APART else JOINT.join(sorted(arms)) or OFF


def is_audited(one: Trajectory, share: float) -> bool:
    """Whether a trajectory is in the sample: the same ones in every run of the same seed."""
    name = f"{one.seed}/{one.key.branch_id}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:6], "little") < share * 2**48


def by_path(cells: Mapping[str, AuditCell]) -> dict[str, AuditCell]:
    """The tokens of each path, those that came by several in each of them."""
    found: dict[str, AuditCell] = {}
    for cell, gaps in sorted(cells.items()):
        for path in paths_of(cell) or (PLAIN_PATH,):
            found[path] = found.get(path, AuditCell()) + gaps
    return found


def audit_figures(cells: Mapping[str, AuditCell]) -> dict[str, float]:
    """What a step's sample says, by name and path."""
    figures: dict[str, float] = {}
    for path, gaps in by_path(cells).items():
        figures[f"audit_gap/{path}"] = gaps.mean
        figures[f"audit_upper/{path}"] = gaps.upper
        figures[f"audit_tokens/{path}"] = float(gaps.tokens)
    return figures


def judged(
    state: AuditState, cells: Mapping[str, AuditCell], settings: AuditConfig, compute_dtype: str
) -> tuple[AuditState, tuple[PathVerdict, ...]]:
    """The state with a step's cells, and the paths that are beyond their bounds and were not named
    before. `compute_dtype`: numbers of the trainer's forward.
    """
    added = {name: state.open.get(name, AuditCell()) + one for name, one in cells.items()}
    ripe, left = _ripe(state.open | added, settings.least_tokens)
    bounds = {name: bound_of(name, settings, compute_dtype) for name in ripe}
    now = {name: _is_within(gaps, bounds[name]) for name, gaps in ripe.items()}
    seen = now | _hints(left, settings, compute_dtype)
    named = list(state.named)
    verdicts = []
    for cell in sorted((name for name, fine in now.items() if not fine), key=_by_paths):
        gaps, bound = ripe[cell], bounds[cell]
        for path in _blamed(cell, named, seen, state.within):
            named.append(path)
            verdicts.append(
                PathVerdict(path, gaps.tokens, gaps.mean, gaps.upper, bound.mean, bound.upper)
            )
    return AuditState(left, state.within | now, tuple(named)), tuple(verdicts)


def bound_of(cell: str, settings: AuditConfig, compute_dtype: str) -> AuditBound:
    """What rounding explains there."""
    _, numbers, _, stale = json.loads(cell)
    if stale:
        return settings.swapped
    if numbers not in (_EXACT, *_HALF):
        return settings.quantised if numbers in FINE else settings.coarse
    return settings.float32 if numbers == compute_dtype == _EXACT else settings.bfloat16


def _ripe(
    cells: Mapping[str, AuditCell], least: int
) -> tuple[dict[str, AuditCell], dict[str, AuditCell]]:
    """(cells with enough tokens to be judged, the others)."""
    ripe = {name: one for name, one in cells.items() if one.tokens >= least}
    left = {name: one for name, one in cells.items() if name not in ripe}
    pools: dict[str, list[str]] = {}
    for name in left:
        arm, *rest = json.loads(name)
        if arm != OFF:  # those of several arms go along
            pools.setdefault(json.dumps([DRAFTED_PATH, *rest]), []).append(name)
    for pool, members in pools.items():
        together = sum((left[name] for name in members), AuditCell())
        if len(members) > 1 and together.tokens >= _POOLED * least:
            ripe[pool] = ripe.get(pool, AuditCell()) + together
            left = {name: one for name, one in left.items() if name not in members}
    return ripe, left


def _hints(
    cells: Mapping[str, AuditCell], settings: AuditConfig, compute_dtype: str
) -> dict[str, bool]:
    """Cells with some tokens, all well: too few for a verdict, enough to clear their paths."""
    return {
        name: True
        for name, one in cells.items()
        if one.tokens >= settings.least_tokens // _HINT
        and _is_within(one, bound_of(name, settings, compute_dtype))
    }


def _is_within(gaps: AuditCell, bound: AuditBound) -> bool:
    return gaps.mean <= bound.mean and gaps.upper <= bound.upper


def _blamed(
    cell: str, named: Iterable[str], now: Mapping[str, bool], before: Mapping[str, bool]
) -> tuple[str, ...]:
    """The paths that account for a cell beyond its bound; none where a named one does. What another
    cell of this step clears is no suspect, nor what an earlier one did where others are left. Of
    those left the ones that are meant to be inexact come first: once they are gone the others show
    what they are.
    """
    own = paths_of(cell)
    if PLAIN_PATH in named or set(own) & set(named):
        return ()
    arms = [path for path in named if path.startswith(ARM_PATH)]
    if DRAFTED_PATH in (own if arms else ()):
        return ()
    if DRAFTED_PATH in named and any(path.startswith(ARM_PATH) for path in own):
        return ()
    suspects = own
    for verdicts in (now, before):
        cleared = {path for name, fine in verdicts.items() if fine for path in paths_of(name)}
        suspects = tuple(path for path in suspects if path not in cleared) or suspects
    rough = tuple(path for path in suspects if path.startswith(NUMBERS_PATH))
    rough += tuple(path for path in suspects if path == SWAPPED_PATH)
    return rough or suspects or (PLAIN_PATH,)


def _by_paths(cell: str) -> tuple[int, bool, str]:
    """The fewer paths, the clearer; an arm of its own before several."""
    paths = paths_of(cell)
    return len(paths), DRAFTED_PATH in paths, cell
