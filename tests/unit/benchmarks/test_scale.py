"""Simulated runs of many slots train everything once, and the coordinator's own time counts."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import scale
from benchmarks.gateway.tasks import TasksPlan
from benchmarks.launched_tasks import rows_of
from benchmarks.simulation.fleet import Fleet, gpus
from benchmarks.simulation.harvest import harvested_slot_s
from benchmarks.simulation.metered import MeteredCoordinator
from benchmarks.simulation.push_tree import tree_s
from benchmarks.simulation.run import VirtualRun
from benchmarks.simulation.scaled import (
    ARITY,
    SCHEDULES,
    VERSION_BYTES,
    ScaledRun,
    growth_goals,
    hosts,
    repeats_of,
    scaled,
)
from benchmarks.simulation.sections import SchedulePlan
from benchmarks.simulation.site import VirtualTime
from paceline.local.patience import patient
from paceline.services.coordinator.machine.settings import Placement, Schedule

STEPS = 4


def lighter(slots: int) -> Fleet:
    """A fleet with as many groups as slots."""
    return replace(scaled(slots), groups=slots, samples=4)


def plan_on(fleet: Fleet, schedule: Schedule, placement: Placement) -> SchedulePlan:
    return SchedulePlan(fleet, placement, schedule, SCHEDULES[schedule])


def test_eight_slots_are_the_fleet_that_others_grow_from() -> None:
    assert scaled(8) == replace(gpus(), name="8 GPUs")
    large = scaled(4096)
    assert (large.groups, large.learner_slots, hosts(4096)) == (32_768, 1024, 512)
    assert large.push_s == gpus().push_s + tree_s(VERSION_BYTES, 511, ARITY)
    assert [repeats_of(slots) for slots in (8, 64, 512, 4096)] == [16, 8, 1, 1]


@pytest.mark.few(4)
@pytest.mark.parametrize("slots", [8, 64])
@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("schedule", Schedule)
def test_every_trajectory_is_trained_once(
    schedule: Schedule, placement: Placement, slots: int
) -> None:
    fleet = lighter(slots)
    settings = plan_on(fleet, schedule, placement).settings(STEPS)
    run = VirtualRun(fleet, settings, MeteredCoordinator(fleet.step_samples)).run()
    groups = range(STEPS * fleet.groups)
    tokens = sum(sum(fleet.lengths.of_group(group, fleet.samples)) for group in groups)
    assert run.gateway.trained == STEPS * fleet.step_samples
    assert (run.gateway.untrained, run.learner.tokens, run.state.step) == (0, tokens, STEPS)


class Equal:
    """Lengths of which many are the same, so that many workers end at the same instant."""

    def of_group(self, group: int, samples: int) -> tuple[int, ...]:
        return tuple(100 * (1 + (group + sample) % 3) for sample in range(samples))


def shuffled(seed: int) -> Iterator[float]:
    generator = np.random.default_rng(seed)
    while True:
        yield float(generator.random())


def in_other_orders(schedule: Schedule) -> list[VirtualRun]:
    """A normal run, and runs that shuffle the order of simultaneous events."""
    fleet = replace(lighter(16), lengths=Equal())
    settings = plan_on(fleet, schedule, Placement.COLOCATED).settings(STEPS)
    times = [VirtualTime(), *(VirtualTime(shuffled(seed)) for seed in range(5))]
    return [VirtualRun(fleet, settings, time=time).run() for time in times]


@pytest.mark.parametrize("schedule", [Schedule.SYNC, Schedule.ONE_STEP_OFF])
def test_figures_do_not_depend_on_the_order_of_what_happens_at_once(schedule: Schedule) -> None:
    usual, *others = in_other_orders(schedule)
    for run in others:
        assert run.learner.lags == usual.learner.lags
        assert harvested_slot_s(run) == pytest.approx(harvested_slot_s(usual))
        for one, same in zip(run.records.finished, usual.records.finished, strict=True):
            assert one.step_s == pytest.approx(same.step_s)


def test_which_groups_of_one_instant_a_batch_takes_first_loses_none_and_makes_none_older() -> None:
    for run in in_other_orders(Schedule.FULLY_ASYNC):
        assert run.gateway.trained == STEPS * run.fleet.step_samples
        assert max(run.learner.lags) <= SCHEDULES[Schedule.FULLY_ASYNC]


def test_transitions_decide_as_the_machine_does_and_write_the_same_every_time() -> None:
    fleet = lighter(16)
    settings = plan_on(fleet, Schedule.FULLY_ASYNC, Placement.COLOCATED).settings(STEPS)
    meters = [MeteredCoordinator(fleet.step_samples) for _ in range(2)]
    runs = [VirtualRun(fleet, settings, decide).run() for decide in meters]
    plain = VirtualRun(fleet, settings).run()
    for run, meter in zip(runs, meters, strict=True):
        assert (run.state, run.records.finished) == (plain.state, plain.records.finished)
        assert len(meter.steps_s) == STEPS
        assert meter.events.total() == meter.journal.count == run.events
    first, second = (one.journal.entry_bytes for one in meters)
    assert first == second > 50 * plain.events


def test_the_coordinators_time_lengthens_a_step_as_calculated_by_hand() -> None:
    """A step waits for the decisions on StepBegan, on the last ShareDone and TasksFinished, which
    come together, and on PolicyPrepared; between two steps for that on Committed.
    """
    fleet = replace(lighter(2), learner_slots=1, groups=1, samples=2, lengths=Equal())
    settings = plan_on(fleet, Schedule.SYNC, Placement.COLOCATED).settings(3, drafter_enabled=False)
    plain, charged = (
        VirtualRun(fleet, settings, takes_s=takes_s).run() for takes_s in (None, lambda _: 0.1)
    )
    for slow, quick in zip(charged.records.finished, plain.records.finished, strict=True):
        assert slow.step_s - quick.step_s == pytest.approx(4 * 0.1)
    began, ended = (
        slow - quick for slow, quick in zip(charged.stepping_s, plain.stepping_s, strict=True)
    )
    assert ended - began == pytest.approx(3 * 4 * 0.1 + 2 * 0.1)


def test_growth_is_told_for_each_slot_for_the_step_and_for_all() -> None:
    least, most = (
        ScaledRun.of(plan_on(lighter(slots), Schedule.SYNC, Placement.COLOCATED), 2)
        for slots in (8, 16)
    )
    for one in (least, most):
        assert one.slot_share == one.share / one.plan.fleet.slots > 0
    a_slot, step, whole = growth_goals(least, most)
    assert whole.value == pytest.approx(2 * a_slot.value)
    assert step.value == pytest.approx(-most.lengthened / least.lengthened)
    assert least.lengthened >= 1
    assert "16 over 8 slots" in a_slot.name


async def test_the_bench_tells_every_size_and_judges_the_last_by_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plan(slots: int, schedule: Schedule, placement: Placement) -> SchedulePlan:
        return plan_on(replace(lighter(slots), samples=1), schedule, placement)

    monkeypatch.setattr(scale, "plan_of", plan)  # less work
    monkeypatch.setattr(scale, "repeats_of", lambda slots: 2)
    parser = argparse.ArgumentParser()
    scale.add_arguments(parser)
    words = ("--slots", "8,32", "--schedules", "sync", "--parts", "simulation")
    found = await scale.run(parser.parse_args(words))
    sizes = [(row["slots"], row["hosts"]) for row in found.rows if "slots" in row]
    assert sizes == [(8, 1), (32, 4)] * 2
    assert [row["hosts"] for row in found.rows if "one sender" in row] == [1, 4] * 2
    assert len(found.goals) == 3


def test_tasks_of_both_launchers_are_compared_pair_by_pair() -> None:
    plan = TasksPlan(tasks=8, samples=4, tokens=16, repeats=2)
    local, on_ray = rows_of(plan, [100.0, 50.0, 200.0], [90.0, 45.0, 180.0])
    assert (local["launcher"], local["tasks/s"], local["of local"]) == ("local", 100.0, "1")
    assert (on_ray["launcher"], on_ray["tasks/s"]) == ("ray", 90.0)
    assert str(on_ray["of local"]).startswith("0.900 [0.900, 0.900]")
    assert (on_ray["gateways"], on_ray["calls of each"]) == (3, 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tasks_pass_through_a_gateway_of_either_launcher(tmp_path: Path) -> None:
    result = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks", "scale", "--parts", "tasks", "--calls", "1"]
    subprocess.run(
        [*command, "--tasks", "4", "--json", str(result)], check=True, timeout=patient(200)
    )
    rows = json.loads(result.read_text())["rows"]
    assert [row["launcher"] for row in rows] == ["local", "ray"]
    assert all(row["tasks/s"] > 0 for row in rows)
