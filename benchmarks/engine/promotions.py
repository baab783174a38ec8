"""Measures the cost that a new drafter adds to a rollout: every second rollout, the same weights
are committed under a new version.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks.engine.runs import TimedRun, Way, Workload, decode, rate_ratio, take_turns
from benchmarks.engine.sections import (
    ROLLOUT,
    Extent,
    Findings,
    equality_goal,
    grouped_work,
    judged,
    speed_rows,
)
from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.nouns import PauseMode
from paceline.speculators.shift import FILE, AcceptanceShift
from paceline.trajectory import Target, VersionSet

STEADY, INHERITS, ANEW = "one drafter", "a new one that inherits", "a new one, tried anew"
EVERY = 2
SURVIVAL = (0.8, 0.6, 0.45, 0.35, 0.25)
"""Survival of drafts, reported for both drafter versions. The values are arbitrary, because the
weights are equal.
"""
COST_GOAL = 0.99


async def promotions(plan: Extent) -> Findings:
    """Measures a training step's requests, with the trained policy and its drafter."""
    several = 4 if plan.quick else ROLLOUT
    engines = {
        name: plan.engine("policy_trained", max_batch=several) for name in (STEADY, INHERITS, ANEW)
    }
    distinct = plan.at_once(several)
    first = decode(engines[STEADY], distinct, "off", plan.threads)
    work = grouped_work(distinct, first, max(2, several // 8))
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        ways: dict[str, Way] = {STEADY: partial(decode, engines[STEADY], work, "", plan.threads)}
        for name in (INHERITS, ANEW):
            promote = promoter(engines[name], plan.demo, Path(folder), inherits=name == INHERITS)
            ways[name] = partial(_after, promote, engines[name], work, plan.threads)
        runs = await take_turns(ways, plan.pairs, "promotions")
    section = f"a promotion every {EVERY} rollouts of {several} samples, fp32"
    rows = speed_rows(section, several, runs, STEADY)
    goal = judged(f"{INHERITS} / {STEADY}", COST_GOAL, rate_ratio(runs[INHERITS], runs[STEADY]))
    return Findings(rows, [goal, equality_goal("promotions", rows)])


def promoter(engine: Engine, demo: Path, folder: Path, *, inherits: bool) -> Callable[[], None]:
    """Returns a function that commits the next version at every second call.

    With `inherits`, the version has its trainer's report on the shift of acceptance.
    """
    calls = count()

    def promote() -> None:
        number = next(calls)
        if number % EVERY:
            return
        version = number // EVERY + 1
        path = folder / f"{'inherits' if inherits else 'anew'}-{version}"
        shutil.copytree(demo / "drafter_trained", path)
        if inherits:
            said = AcceptanceShift(version - 1, SURVIVAL, SURVIVAL)
            (path / FILE).write_text(said.to_json())
        engine.prepare_weights(Target.DRAFTER, version, path)
        engine.commit_weights(VersionSet(version, 0, version), PauseMode.IN_PLACE)

    return promote


def _after(promote: Callable[[], None], engine: Engine, work: Workload, threads: int) -> TimedRun:
    promote()
    return decode(engine, work, "", threads)
