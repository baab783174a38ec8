"""Measures the cost of asynchronous checkpoints: steps of a rank group during a checkpoint, beside
as many steps of the same group without one.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.policy.work import SPEC_VARIABLE, Work
from benchmarks.result import Goal, Row, at_most, paired_ratio
from paceline.ranks.group import RankGroup
from paceline.services.policy_trainer.config import PolicyTrainerConfig

INTERVAL = PolicyTrainerConfig().checkpoint_interval_steps
STALL = 0.03
"""Most that a checkpoint may hold the ranks, as a share of a step."""
START_S = STEPS_S = 300.0
WITH, WITHOUT = b"with", b"without"


@dataclass(frozen=True, slots=True)
class Taken:
    """Times of INTERVAL steps on a rank."""

    seconds: float
    stall_s: float
    """Seconds until the writing of the checkpoint began, before the steps; 0 without a checkpoint.
    """
    step_s: Sequence[float]


async def checkpointed(
    name: str, model: Path, work: Work, ranks: int, pairs: int, folder: Path
) -> tuple[Row, Goal]:
    """Measures steps with and without a checkpoint, in turns. Raises RankLost if a rank dies."""
    spec = json.dumps({"model": str(model), "work": asdict(work), "dir": str(folder / "run")})
    module = "benchmarks.policy.checkpoint_rank"
    environment = {SPEC_VARIABLE: spec}
    async with RankGroup(module, ranks, 1, folder / "logs", environment, heartbeat_s=0) as group:
        await group.start(START_S)
        await _slowest(group, WITHOUT)  # the first one allocates
        timed = [
            (await _slowest(group, WITH), await _slowest(group, WITHOUT)) for _ in range(pairs)
        ]
    saving, still = zip(*timed, strict=True)
    step = statistics.median(second for one in still for second in one.step_s)
    stall = statistics.median(one.stall_s for one in saving)
    ratio = paired_ratio([one.seconds for one in saving], [one.seconds for one in still])
    row: Row = {
        "section": f"{INTERVAL} steps and a checkpoint beside {INTERVAL} steps without",
        "case": name,
        "step ms": 1e3 * step,
        "stall ms": 1e3 * stall,
        "stall of a step": f"{stall / step:.1%}",
        "time of the steps": str(ratio),
    }
    goal = at_most(f"stall of a checkpoint as a share of a step, {name}", STALL, stall / step)
    return row, goal


async def _slowest(group: RankGroup, told: bytes) -> Taken:
    group.send(told)
    said = [Taken(**json.loads((await group.receive(STEPS_S))[1])) for _ in group.pids]
    return max(said, key=lambda one: one.seconds)
