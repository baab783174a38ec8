"""Grows the fleet of 8 GPUs to thousands, and makes rows of its runs for `paceline bench scale`.

Weak scaling: each slot has 8 groups of 8 samples per step, so a step keeps its length. Each host
has 8 slots. A push lasts as long as a push to one host, plus the time of a tree to the other hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.result import Goal, Row, at_most
from benchmarks.simulation.fleet import Fleet, gpus
from benchmarks.simulation.harvest import allowed_slot_s, harvested_slot_s, idle_slot_s
from benchmarks.simulation.metered import MeteredCoordinator
from benchmarks.simulation.push_tree import Network, direct_s, tree_s
from benchmarks.simulation.run import VirtualRun
from benchmarks.simulation.sections import SchedulePlan
from paceline.services.coordinator.machine.settings import Placement, Schedule

ARITY = 2
"""Children of a host in the tree. A slow host delays half of the other hosts; in a chain it delays
all hosts behind it.
"""
HOST_GPUS = 8
VERSION_BYTES = 2 * 7_615_488_000
"""Size of Qwen2.5-7B in bfloat16, bytes."""
SCHEDULES = {Schedule.SYNC: 0, Schedule.ONE_STEP_OFF: 1, Schedule.FULLY_ASYNC: 2}
"""Schedules, with the maximum lead of rollouts in versions."""
GROWTH = 1.1
MOST_REPEATS, SLOT_REPEATS = 16, 512
"""Repeats for few slots, because the time of one such run varies by chance."""


def scaled(slots: int) -> Fleet:
    """Makes a fleet of `slots` GPUs, a multiple of `gpus`. Except for the push, it has the costs of
    8 GPUs.
    """
    fleet = gpus()
    return replace(
        fleet,
        name=f"{slots} GPUs",
        slots=slots,
        learner_slots=max(1, slots * fleet.learner_slots // fleet.slots),
        groups=max(1, slots * fleet.groups // fleet.slots),
        push_s=fleet.push_s + tree_s(VERSION_BYTES, hosts(slots) - 1, ARITY),
    )


def hosts(slots: int) -> int:
    """Number of hosts for this number of slots."""
    return -(-slots // HOST_GPUS)


@dataclass(frozen=True, slots=True)
class ScaledRun:
    """One schedule on one fleet, in three runs: without a drafter, with a harvesting drafter, and
    with the coordinator's measured seconds of the second run.
    """

    plan: SchedulePlan
    none: VirtualRun
    harvest: VirtualRun
    charged: VirtualRun
    coordinator: MeteredCoordinator  # of `harvest`, the median of several runs

    @classmethod
    def of(cls, plan: SchedulePlan, steps: int, repeats: int = 1) -> ScaledRun:
        """Makes all three runs, the second several times."""
        fleet, settings = plan.fleet, plan.settings(steps, drafter_enabled=True)
        measured: list[MeteredCoordinator] = []
        for _ in range(repeats):
            measured.append(MeteredCoordinator(fleet.step_samples))
            harvest = VirtualRun(fleet, settings, measured[-1]).run()
        coordinator = sorted(measured, key=lambda one: one.step_s)[len(measured) // 2]
        charged = VirtualRun(fleet, settings, takes_s=coordinator.takes_s()).run()
        return cls(plan, plan.run(steps, drafter=False), harvest, charged, coordinator)

    @property
    def share(self) -> float:
        """Share of a core that the coordinator takes: its CPU seconds per step over the step's
        seconds.
        """
        return self.coordinator.step_s / _step_s(self.harvest)

    @property
    def slot_share(self) -> float:
        """Share of a core for each slot."""
        return self.share / self.plan.fleet.slots

    @property
    def lengthened(self) -> float:
        """Seconds of a step with the coordinator's own time over the seconds without."""
        return _step_s(self.charged) / _step_s(self.harvest)

    def rows(self) -> list[Row]:
        """Rows of the coordinator's cost and of the use of slots."""
        return [self._coordinator_row(), self._slots_row()]

    def _named(self, section: str) -> dict[str, str | float | int | None]:
        slots = self.plan.fleet.slots
        where = f"{section}: {self.plan.schedule}, {self.plan.placement}"
        return {"section": where, "slots": slots, "hosts": hosts(slots)}

    def _coordinator_row(self) -> Row:
        fleet, steps, cpu_s = self.plan.fleet, self._steps, self.coordinator.step_s
        written = self.coordinator.journal.entry_bytes / steps
        return {
            **self._named("simulated 1: the coordinator, a step"),
            "events": self.harvest.events / steps,
            "CPU s": cpu_s,
            "us a slot": 1e6 * cpu_s / fleet.slots,
            "of a core": f"{self.share:.4%}",
            "lengthens": f"{self.lengthened - 1:.4%}",
            "journal KB": written / 1e3,
            "bytes a slot": written / fleet.slots,
        }

    def _slots_row(self) -> Row:
        fleet, none = self.plan.fleet, self.none
        idle, allowed = idle_slot_s(none), allowed_slot_s(none)
        harvested = harvested_slot_s(self.harvest)
        return {
            **self._named("simulated 2: slots, a step"),
            "samples": fleet.step_samples,
            "step s": _step_s(self.harvest),
            "over none": _step_s(self.harvest) / _step_s(none),
            "push s": fleet.push_s,
            "tokens/s a slot": none.learner.tokens / none.wall_s / fleet.slots,
            "idle": f"{idle / (none.wall_s * fleet.slots):.1%}",
            "harvested of idle": f"{harvested / idle:.1%}" if idle else None,
            "of allowed": f"{harvested / allowed:.1%}" if allowed else None,
        }

    @property
    def _steps(self) -> int:
        return self.harvest.settings.total_steps


def repeats_of(slots: int) -> int:
    """Number of measurements of a run with this number of slots."""
    return max(1, min(MOST_REPEATS, SLOT_REPEATS // slots))


def plan_of(slots: int, schedule: Schedule, placement: Placement) -> SchedulePlan:
    """A schedule with its lag on the fleet of `slots` slots."""
    return SchedulePlan(scaled(slots), placement, schedule, SCHEDULES[schedule])


def growth_goals(least: ScaledRun, most: ScaledRun) -> list[Goal]:
    """Goals for the coordinator's cost at the most slots over its cost at the fewest."""
    sizes = f"{most.plan.fleet.slots:,} over {least.plan.fleet.slots:,} slots"
    where = f"{most.plan.schedule}, {most.plan.placement}, {sizes}"
    return [
        at_most(f"CPU a slot over the step: {where}", GROWTH, most.slot_share / least.slot_share),
        at_most(
            f"step with the coordinator's time over without: {where}",
            GROWTH,
            most.lengthened / least.lengthened,
        ),
        at_most(f"CPU of all over the step: {where}", GROWTH, most.share / least.share),
    ]


def push_rows(slots: Sequence[int]) -> list[Row]:
    """Seconds until the last host has a version: from one sender, and by trees."""
    rows: list[Row] = []
    network = Network()
    for size, what in ((VERSION_BYTES, "whole"), (VERSION_BYTES // 100, "a hundredth changed")):
        for count in map(hosts, slots):
            others = count - 1
            rows.append(
                {
                    "section": "computed: push of 7B in bfloat16, s",
                    "version": what,
                    "hosts": count,
                    "one sender": direct_s(size, others, network),
                    **{
                        f"tree of {arity}": tree_s(size, others, arity, network)
                        for arity in (1, 2, 4, 8)
                    },
                    "a copy": size / network.host_bytes_s if others else 0.0,
                }
            )
    return rows


def _step_s(run: VirtualRun) -> float:
    begin_s, end_s = run.stepping_s
    return (end_s - begin_s) / run.settings.total_steps
