"""What compiled graphs bring the embedded engine, with drafts and without, and how much faster it
is with drafts where it is compiled.
"""

from __future__ import annotations

from benchmarks.engine.runs import Way, rate_ratio, take_turns
from benchmarks.engine.sections import (
    OFF,
    SPEEDUP_GOALS,
    Extent,
    Findings,
    chosen,
    equality_goal,
    forced,
    judged,
    speed_rows,
)
from benchmarks.result import Goal, Row

NEVER_SLOWER = 1.0


async def compiled(plan: Extent) -> Findings:
    """The trained policy, plain and compiled, at every batch size."""
    plain = plan.engine("policy_trained"), plan.bandit_engines("policy_trained")
    graph = (
        plan.engine("policy_trained", compile=True),
        plan.bandit_engines("policy_trained", compile=True),
    )
    rows: list[Row] = []
    goals: list[Goal] = []
    for batch in plan.batches:
        work, ways = plan.work(batch), dict[str, Way]()
        for (engine, bandits), suffix in ((plain, ""), (graph, ", compiled")):
            both = forced(engine, work, plan.threads, (OFF,)) | chosen(bandits, work, plan.threads)
            ways |= {name + suffix: way for name, way in both.items()}
        runs = await take_turns(ways, plan.pairs, f"compiled, batch {batch}")
        rows += speed_rows("plain and compiled, fp32", batch, runs)
        for name in (OFF, *plain[1]):
            ratio = rate_ratio(runs[f"{name}, compiled"], runs[name])
            goals.append(judged(f"batch {batch}: {name}, compiled / plain", NEVER_SLOWER, ratio))
        if batch in SPEEDUP_GOALS:
            ratio = rate_ratio(runs[f"{name}, compiled"], runs[f"{OFF}, compiled"])
            goal = SPEEDUP_GOALS[batch]
            goals.append(judged(f"batch {batch}: {name} / off, both compiled", goal, ratio))

    return Findings(rows, [*goals, equality_goal("compiled", rows)])
