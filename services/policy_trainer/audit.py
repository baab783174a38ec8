"""Checks whether the engine drew tokens with the log-probs that the trainer computes, and names the
paths that did not.

The trainer recomputes a sample of trajectories in the policy version that drew them. Their tokens
are counted by cell. A cell has four properties: the arms that have drafted in the response so far,
the number format, a reused or computed prefix, and the present or an earlier policy for keys and
values.

A cell with enough tokens is judged by the mean and the 99th percentile of its gaps; then its count
restarts. If a cell exceeds its bound, the audit names its paths that no cell within its bound has.
If a named path already explains the cell, no path is added. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from paceline import trajectory
from paceline.arm_names import OFF
from paceline.models.profiles import FINE
from paceline.services.policy_trainer.config import AuditBound, AuditConfig

LEAST_GAP, LARGEST_GAP = 1e-7, 1e3
PER_DECADE, BUCKETS = 8, 81
"""Buckets of gaps. Bucket 0 has gaps up to LEAST_GAP; each further bucket ends an eighth of a
decade higher; the last bucket has all larger gaps.
"""
UPPER = 0.99
_POOLED = 4
"""Multiple of `least_tokens` that arms with too few tokens need together to be judged
as one cell.
"""
_HINT = 8
"""Divisor of `least_tokens`: so many tokens can clear a path."""
JOINT, _APART = "+", 2
"""Separator of the arms of a cell, and the maximum number of arms in a cell of their own."""
_EXACT, _HALF = "float32", ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class AuditCell:
    """Gaps of tokens that were drawn alike, nats."""

    tokens: int = 0
    total: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)  # number (decimal) -> tokens

    def __add__(self, other: AuditCell) -> AuditCell:
        buckets = trajectory.added(self.buckets, other.buckets)
        return AuditCell(self.tokens + other.tokens, self.total + other.total, buckets)

    @property
    def mean(self) -> float:
        """Mean gap; 0 without gaps."""
        return self.total / self.tokens if self.tokens else 0.0

    @property
    def upper(self) -> float:
        """The 99th percentile of the gaps, as the middle of its bucket; 0 without gaps."""
        left = math.floor((1 - UPPER) * self.tokens)
        for number in sorted(map(int, self.buckets), reverse=True):
            left -= self.buckets[str(number)]
            if left < 0:
                return LEAST_GAP * 10 ** ((number - 0.5) / PER_DECADE) if number else 0.0
        return 0.0


@dataclass(frozen=True, slots=True)
class PathVerdict:
    """A path beyond its bound; see proto AuditVerdict."""

    path: str
    tokens: int
    mean: float
    upper: float
    mean_bound: float
    upper_bound: float


@dataclass(frozen=True, slots=True)
class AuditState:
    """Results of earlier steps that later verdicts use."""

    open: dict[str, AuditCell] = field(default_factory=dict)  # cell -> gaps without a verdict yet
    within: dict[str, bool] = field(default_factory=dict)  # cell -> its last verdict
    named: tuple[str, ...] = ()  # paths, each once


def cell_name(arms: str, numbers: str, *, reused: bool, stale: bool) -> str:
    """The cell of tokens drawn in this way; `arms` is a value of `drafted_so_far`."""
    return json.dumps([arms, numbers, reused, stale])


def paths_of(cell: str) -> tuple[str, ...]:
    """The inexact paths of a cell's tokens; empty for the plain path."""
    arms, numbers, reused, stale = json.loads(cell)
    there = {
        **{
            arm if arm == trajectory.DRAFTED_PATH else trajectory.ARM_PATH + arm: arm != OFF
            for arm in arms.split(JOINT)
        },
        trajectory.NUMBERS_PATH + numbers: numbers not in (_EXACT, *_HALF),
        trajectory.REUSED_PATH: reused,
        trajectory.SWAPPED_PATH: stale,
    }
    return tuple(path for path, is_one in there.items() if is_one)


def drafted_so_far(spans: Iterable[trajectory.DrawSpan]) -> Iterator[str]:
    """For each span, the arms that have drafted in its response up to the span's end, joined by
    JOINT. The value is "off" without an arm, and DRAFTED_PATH with more than two arms.

    Earlier arms count because later rounds read the keys and values that a drafted round left in
    the cache.
    """
    arms: set[str] = set()
    end = -1
    for span in spans:
        if span.start != end:
            arms = set()  # another turn
        arms |= {span.arm} - {OFF}
        end = span.end
        yield trajectory.DRAFTED_PATH if len(arms) > _APART else JOINT.join(sorted(arms)) or OFF


def is_audited(one: trajectory.Trajectory, share: float) -> bool:
    """Whether a trajectory is in the sample. Runs with equal seeds have equal samples."""
    name = f"{one.seed}/{one.key.branch_id}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:6], "little") < share * 2**48


def by_path(cells: Mapping[str, AuditCell]) -> dict[str, AuditCell]:
    """Gaps of each path; tokens with several paths count in each path."""
    found: dict[str, AuditCell] = {}
    for cell, gaps in sorted(cells.items()):
        for path in paths_of(cell) or (trajectory.PLAIN_PATH,):
            found[path] = found.get(path, AuditCell()) + gaps
    return found


def audit_figures(cells: Mapping[str, AuditCell]) -> dict[str, float]:
    """The figures of a step's sample, by name and path."""
    figures: dict[str, float] = {}
    for path, gaps in by_path(cells).items():
        figures[f"audit_gap/{path}"] = gaps.mean
        figures[f"audit_upper/{path}"] = gaps.upper
        figures[f"audit_tokens/{path}"] = float(gaps.tokens)
    return figures


def judged(
    state: AuditState, cells: Mapping[str, AuditCell], settings: AuditConfig, compute_dtype: str
) -> tuple[AuditState, tuple[PathVerdict, ...]]:
    """The state with a step's cells added, and the paths beyond their bounds that were not named
    before. `compute_dtype`: number format of the trainer's forward.
    """
    added = {name: state.open.get(name, AuditCell()) + one for name, one in cells.items()}
    ripe, left = _ripe(state.open | added, settings.least_tokens)
    bounds = {name: bound_of(name, settings, compute_dtype) for name in ripe}
    now = {name: _is_within(gaps, bounds[name]) for name, gaps in ripe.items()}
    # Cells with some tokens, all within bounds: too few for a verdict, enough to clear their paths.
    hints = {
        name: True
        for name, one in left.items()
        if one.tokens >= settings.least_tokens // _HINT
        and _is_within(one, bound_of(name, settings, compute_dtype))
    }
    named = list(state.named)
    verdicts = []
    for cell in sorted((name for name, fine in now.items() if not fine), key=_by_paths):
        gaps = ripe[cell]
        for path in _blamed(cell, named, now | hints, state.within):
            named.append(path)
            measured = gaps.tokens, gaps.mean, gaps.upper
            verdicts.append(PathVerdict(path, *measured, *bounds[cell]))
    return AuditState(left, state.within | now, tuple(named)), tuple(verdicts)


def bound_of(cell: str, settings: AuditConfig, compute_dtype: str) -> AuditBound:
    """The bound of gaps that rounding explains in this cell."""
    _, numbers, _, stale = json.loads(cell)
    if stale:
        return settings.swapped
    if numbers not in (_EXACT, *_HALF):
        return settings.quantised if numbers in FINE else settings.coarse
    return settings.float32 if numbers == compute_dtype == _EXACT else settings.bfloat16


def _ripe(
    cells: Mapping[str, AuditCell], least: int
) -> tuple[dict[str, AuditCell], dict[str, AuditCell]]:
    """(cells with enough tokens for a verdict, remaining cells)."""
    ripe = {name: one for name, one in cells.items() if one.tokens >= least}
    left = {name: one for name, one in cells.items() if name not in ripe}
    pools: dict[str, list[str]] = {}
    for name in left:
        arm, *rest = json.loads(name)
        if arm != OFF:  # cells with several arms join too
            pools.setdefault(json.dumps([trajectory.DRAFTED_PATH, *rest]), []).append(name)
    for pool, members in pools.items():
        together = sum((left[name] for name in members), AuditCell())
        if len(members) > 1 and together.tokens >= _POOLED * least:
            ripe[pool] = ripe.get(pool, AuditCell()) + together
            left = {name: one for name, one in left.items() if name not in members}
    return ripe, left


def _is_within(gaps: AuditCell, bound: AuditBound) -> bool:
    return gaps.mean <= bound.mean and gaps.upper <= bound.upper


def _blamed(
    cell: str, named: Sequence[str], now: Mapping[str, bool], before: Mapping[str, bool]
) -> tuple[str, ...]:
    """The paths that explain a cell beyond its bound; empty if a named path already explains it.

    A path is no suspect if another cell of this step clears it. Earlier cells clear a path too, as
    long as other suspects remain. Paths that are inexact by design are blamed first; once they are
    disabled, later verdicts judge the remaining paths.
    """
    own = paths_of(cell)
    if trajectory.PLAIN_PATH in named or set(own) & set(named):
        return ()
    for paths, others in ((own, named), (named, own)):
        arms = any(path.startswith(trajectory.ARM_PATH) for path in others)
        if arms and trajectory.DRAFTED_PATH in paths:
            return ()
    suspects = own
    for verdicts in (now, before):
        cleared = {path for name, fine in verdicts.items() if fine for path in paths_of(name)}
        suspects = tuple(path for path in suspects if path not in cleared) or suspects
    rough = tuple(path for path in suspects if path.startswith(trajectory.NUMBERS_PATH))
    rough += tuple(path for path in suspects if path == trajectory.SWAPPED_PATH)
    return rough or suspects or (trajectory.PLAIN_PATH,)


def _by_paths(cell: str) -> tuple[int, bool, str]:
    """Sort key: fewer paths give a clearer verdict, and a cell with one arm precedes a cell with
    several.
    """
    paths = paths_of(cell)
    return len(paths), trajectory.DRAFTED_PATH in paths, cell
