"""Turns simulated runs into the rows and goals of `paceline bench coordinator`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.result import Goal, Row, at_least, at_most
from benchmarks.simulation.fleet import Fleet, cores, gpus
from benchmarks.simulation.harvest import allowed_slot_s, harvested_slot_s, idle_slot_s
from benchmarks.simulation.run import VirtualRun
from paceline.services.coordinator.machine.settings import (
    CommitMode,
    Placement,
    RunSettings,
    Schedule,
)
from paceline.streams.journal import SlotUse

HARVESTED, DELAYED, ACCOUNTED = 0.9, 1.01, 0.01
LAGS = (1, 2, 4)
WORTH = 0.01
"""Least idle share of slot-seconds from which the harvest is judged."""


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """A schedule and a placement on a fleet."""

    fleet: Fleet
    placement: Placement
    schedule: Schedule
    lag: int = 0  # versions, at most

    @property
    def name(self) -> str:
        """Name in goals."""
        lag = f" {self.lag}" if self.schedule is Schedule.FULLY_ASYNC else ""
        return f"{self.schedule}{lag}, {self.placement}, {self.fleet.name}"

    def settings(self, steps: int, **chosen: object) -> RunSettings:
        """Settings of a run in which the drafter may have every slot of the workers."""
        fleet = self.fleet
        apart = fleet.learner_slots if self.placement is Placement.DISAGGREGATED else 0
        given = {
            "workers": fleet.slots - apart,
            "learner_slots": apart,
            "total_steps": steps,
            "groups_per_step": fleet.groups,
            "training_interval_steps": 1,
            "max_drafter_slots": fleet.slots - apart,
            "schedule": self.schedule,
            "placement": self.placement,
            "max_policy_lag": self.lag,
        }
        return RunSettings(**{**given, **chosen})  # type: ignore[arg-type]

    def run(self, steps: int, *, drafter: bool, **chosen: object) -> VirtualRun:
        """Makes one run."""
        settings = self.settings(steps, drafter_enabled=drafter, **chosen)
        return VirtualRun(self.fleet, settings).run()


def plans(fleet: Fleet) -> Iterator[SchedulePlan]:
    """All schedules in both placements."""
    for placement in Placement:
        yield SchedulePlan(fleet, placement, Schedule.SYNC)
        yield SchedulePlan(fleet, placement, Schedule.ONE_STEP_OFF, 1)
        for lag in LAGS:
            yield SchedulePlan(fleet, placement, Schedule.FULLY_ASYNC, lag)


@dataclass(frozen=True, slots=True)
class Pair:
    """Runs of a plan without a drafter and with a harvesting drafter."""

    plan: SchedulePlan
    none: VirtualRun
    harvest: VirtualRun

    @property
    def idle_share(self) -> float:
        """Share of all slot-seconds that engines leave idle while other engines or a learner
        compute.
        """
        return idle_slot_s(self.none) / (self.none.wall_s * self.plan.fleet.slots)

    @property
    def of_allowed(self) -> float:
        """Slot-seconds harvested over slot-seconds allowed; 0 if the rules allow none."""
        allowed = allowed_slot_s(self.none)
        return harvested_slot_s(self.harvest) / allowed if allowed else 0.0

    @property
    def delayed(self) -> float:
        """Seconds with harvesting over seconds without."""
        return self.harvest.wall_s / self.none.wall_s


def simulated(steps: int) -> tuple[list[Row], list[Goal]]:
    """Makes all runs, over `steps` steps each; returns their rows and goals."""
    rows: list[Row] = []
    goals: list[Goal] = []
    for fleet in (gpus(), cores()):
        pairs = [
            Pair(plan, plan.run(steps, drafter=False), plan.run(steps, drafter=True))
            for plan in plans(fleet)
        ]
        rows += [*map(_harvest_row, pairs), _serial_row(pairs[0], steps)]
        rows += _throughput_rows(pairs)
        rows += _commit_rows(
            SchedulePlan(fleet, Placement.DISAGGREGATED, Schedule.FULLY_ASYNC, 2), steps
        )
        goals += goals_of(pairs)
    return sorted(rows, key=lambda row: str(row["section"])), goals


def goals_of(pairs: Sequence[Pair]) -> list[Goal]:
    """Goals for every schedule and placement of a fleet, judged by the worst run."""
    judged = [one for one in pairs if one.idle_share >= WORTH]
    goals: list[Goal] = []
    if judged:
        least = min(judged, key=lambda one: one.of_allowed)
        goals.append(
            at_least(f"harvested of allowed: {least.plan.name}", HARVESTED, least.of_allowed)
        )
    slowest = max(pairs, key=lambda one: one.delayed)
    goals.append(at_most(f"step s over none: {slowest.plan.name}", DELAYED, slowest.delayed))
    stalest = max(pairs, key=lambda one: max(one.none.learner.lags) - one.plan.lag)
    beyond = max(stalest.none.learner.lags) - stalest.plan.lag
    goals.append(at_most(f"versions beyond the lag allowed: {stalest.plan.name}", 0, beyond))
    fastest = max(pairs, key=lambda one: _tokens_s(one))
    over = _tokens_s(fastest) / _tokens_s(pairs[0])
    goals.append(at_least(f"tokens/s over sync, colocated: {fastest.plan.name}", 1.0, over))
    return [*goals, *accounted(pairs)]


def accounted(pairs: Sequence[Pair]) -> list[Goal]:
    """Goals that compare the coordinator's own account of slots with the simulation's clock, by the
    worst run.
    """

    def off(pair: Pair) -> tuple[float, float]:
        run = pair.harvest
        begin_s, end_s = run.stepping_s
        whole_s = run.settings.slots * (end_s - begin_s)
        own = [record.slot_s for record in run.records.finished]
        clock = run.slots.seconds(begin_s, end_s)
        worst = max(abs(sum(one[use] for one in own) - clock[use]) for use in clock)
        total = sum(sum(one.values()) for one in own)
        return abs(1 - total / whole_s), worst / whole_s

    sums, uses = zip(*map(off, pairs), strict=True)
    name = pairs[0].plan.fleet.name
    return [
        at_most(f"sum of slot-s by use off slots x wall, {name}", ACCOUNTED, max(sums)),
        at_most(f"slot-s of a use off the clock, {name}", ACCOUNTED, max(uses)),
    ]


def _named(section: str, plan: SchedulePlan) -> dict[str, str | float | int | None]:
    return {
        "section": section,
        "fleet": plan.fleet.name,
        "placement": plan.placement,
        "schedule": plan.schedule,
        "lag": plan.lag,
    }


def _harvest_row(pair: Pair) -> Row:
    none, run, steps = pair.none, pair.harvest, pair.none.settings.total_steps
    return {
        **_named("simulated 1: idle slot-seconds of a step, and the drafter", pair.plan),
        "drafter": "harvests",
        "tail": fmean(none.gateway.tails),
        "idle": idle_slot_s(none) / steps,
        "allowed": allowed_slot_s(none) / steps,
        "harvested": harvested_slot_s(run) / steps,
        "of allowed": pair.of_allowed,
        "step s": run.wall_s / steps,
        "over none": pair.delayed,
        "leaving": run.drafter.left_s / run.wall_s,
    }


def _serial_row(pair: Pair, steps: int) -> Row:
    """The row of the first plan with the drafter in series with the policy, for as many
    slot-seconds.
    """
    given = harvested_slot_s(pair.harvest) / steps
    alone = pair.plan.settings(steps, serial_drafter=True)
    run = VirtualRun(pair.plan.fleet, alone, drafter_slot_s=given).run()
    row = _harvest_row(replace(pair, harvest=run))
    return {**row, "drafter": "in series", "harvested": 0.0, "of allowed": None}


def _tokens_s(pair: Pair) -> float:
    return pair.none.learner.tokens / pair.none.wall_s


def _throughput_rows(pairs: Sequence[Pair]) -> list[Row]:
    rows: list[Row] = []
    for pair in pairs:
        run = pair.none
        sync = next(one for one in pairs if one.plan.placement is pair.plan.placement)
        clock = run.slots.seconds(0.0, run.wall_s)
        whole_s = run.wall_s * pair.plan.fleet.slots
        shares = {use.value: clock[use] / whole_s for use in SlotUse if use is not SlotUse.DRAFTER}
        rows.append(
            {
                **_named("simulated 2: schedules without a drafter", pair.plan),
                "tokens/s": _tokens_s(pair),
                "over sync": _tokens_s(pair) / _tokens_s(sync),
                **shares,
                "tokens by lag": _histogram(run),
            }
        )
    return rows


def _commit_rows(plan: SchedulePlan, steps: int) -> list[Row]:
    rows: list[Row] = []
    for mode in CommitMode:
        run = plan.run(steps, drafter=False, commit_mode=mode)
        row = _named("simulated 3: commit modes", plan)
        row |= {"mode": mode, "tokens/s": run.learner.tokens / run.wall_s}
        rows.append({**row, "tokens by lag": _histogram(run)})
    return rows


def _histogram(run: VirtualRun) -> str:
    lags = sorted(run.learner.lags.items())
    return " ".join(f"{lag}:{count / run.learner.tokens:.2f}" for lag, count in lags)
