"""Grows the fleet of 8 GPUs to thousands, and makes rows of its runs for `paceline bench scale`.

Weak scaling: 8 groups of 8 samples a slot and step, so that a step stays about as long; 8 slots a
host. A push takes what the one host takes, and then the tree's time to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.result import Goal, Row, at_most
from benchmarks.simulation.fleet import Fleet, gpus
from benchmarks.simulation.harvest import allowed_slot_s, harvested_slot_s, idle_slot_s
from benchmarks.simulation.metered import MeteredCoordinator
from benchmarks.simulation.run import VirtualRun
from benchmarks.simulation.sections import SchedulePlan
from paceline.local.push_tree import Network, direct_s, tree_s
from paceline.local.scale_plan import HOST_GPUS, MODELS, ScalePlan
from paceline.services.coordinator.machine.settings import Placement, Schedule

ARITY = 2
"""A host that is slow then holds up a half of the others, in a chain all behind it."""
VERSION_BYTES = ScalePlan(MODELS[0], HOST_GPUS).push_bytes
"""Of 7B in bfloat16."""
SCHEDULES = {Schedule.SYNC: 0, Schedule.ONE_STEP_OFF: 1, Schedule.FULLY_ASYNC: 2}
"""With the versions that rollouts may be ahead."""
GROWTH = 1.1
MOST_STEPS, SLOT_STEPS = 20, 1024
"""Runs of few slots have more steps, so that what a step takes is the middle of many."""


def scaled(slots: int) -> Fleet:
    """As many GPUs as `gpus` times a number. Its costs are those of 8 but for the push."""
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
    """That so many slots live on."""
    return -(-slots // HOST_GPUS)


@dataclass(frozen=True, slots=True)
class ScaledRun:
    """One schedule on one fleet: without a drafter, with one that harvests, and with the seconds of
    the coordinator that were measured in the latter.
    """

    plan: SchedulePlan
    none: VirtualRun
    harvest: VirtualRun
    charged: VirtualRun
    coordinator: MeteredCoordinator  # of `harvest`

    @classmethod
    def of(cls, plan: SchedulePlan, steps: int) -> ScaledRun:
        """Runs all three."""
        fleet, settings = plan.fleet, plan.settings(steps, drafter_enabled=True)
        coordinator = MeteredCoordinator(fleet.step_samples)
        harvest = VirtualRun(fleet, settings, coordinator).run()
        charged = VirtualRun(fleet, settings, takes_s=coordinator.takes_s()).run()
        return cls(plan, plan.run(steps, drafter=False), harvest, charged, coordinator)

    @property
    def share(self) -> float:
        """Of a core, that the coordinator takes: CPU seconds of a step over the step's seconds."""
        return self.coordinator.step_s / _step_s(self.harvest)

    @property
    def slot_share(self) -> float:
        """The same for each slot."""
        return self.share / self.plan.fleet.slots

    @property
    def lengthened(self) -> float:
        """Seconds of a step with the coordinator's own over those without."""
        return _step_s(self.charged) / _step_s(self.harvest)

    def row(self) -> Row:
        """Its figures."""
        fleet, steps = self.plan.fleet, self.harvest.settings.total_steps
        coordinator, cpu_s = self.coordinator, self.coordinator.step_s
        written = coordinator.journal.entry_bytes
        idle, allowed = idle_slot_s(self.none), allowed_slot_s(self.none)
        harvested = harvested_slot_s(self.harvest)
        return {
            "section": f"simulated 1: {self.plan.schedule}, {self.plan.placement}",
            "slots": fleet.slots,
            "hosts": hosts(fleet.slots),
            "samples": fleet.step_samples,
            "steps": steps,
            "step s": _step_s(self.harvest),
            "push s": fleet.push_s,
            "events": self.harvest.events / steps,
            "CPU s": cpu_s,
            "us a slot": 1e6 * cpu_s / fleet.slots,
            "of a core, %": 100 * self.share,
            "lengthens, %": 100 * (self.lengthened - 1),
            "journal KB": written / steps / 1e3,
            "B a slot": written / steps / fleet.slots,
            "idle, %": 100 * idle / (self.none.wall_s * fleet.slots),
            "harvested, %": 100 * harvested / idle if idle else None,
            "of allowed, %": 100 * harvested / allowed if allowed else None,
        }


def steps_of(slots: int, fewest: int) -> int:
    """How many a run of so many slots has."""
    return max(fewest, min(MOST_STEPS, SLOT_STEPS // slots))


def plan_of(slots: int, schedule: Schedule, placement: Placement) -> SchedulePlan:
    """A schedule with its lag on the fleet of so many slots."""
    return SchedulePlan(scaled(slots), placement, schedule, SCHEDULES[schedule])


def growth_goals(least: ScaledRun, most: ScaledRun) -> list[Goal]:
    """What the coordinator takes at the most slots over what it takes at the fewest."""
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
