"""Simulated runs match a calculation by hand and detect a changed machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from benchmarks.simulation.decoding import SimulatedResponse, SimulatedWorker
from benchmarks.simulation.fleet import Fleet, cores, gpus
from benchmarks.simulation.harvest import allowed_slot_s, harvested_slot_s, idle_slot_s
from benchmarks.simulation.lengths import DEMO, LogNormal, Recorded
from benchmarks.simulation.record_lengths import groups_of
from benchmarks.simulation.run import Decide, VirtualRun
from benchmarks.simulation.sections import Pair, SchedulePlan, accounted, goals_of, plans
from paceline.errors import InternalError
from paceline.report.spans import SpanRecord
from paceline.services.coordinator.machine import schedule
from paceline.services.coordinator.machine.commands import ActivateDrafter, Command, PreemptDrafter
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.settings import CommitMode, Placement, Schedule
from paceline.services.coordinator.machine.state import State
from paceline.services.coordinator.machine.step import step
from paceline.streams.journal import SlotUse
from paceline.telemetry import names


@dataclass(frozen=True)
class Fixed:
    """The same lengths in every group."""

    tokens: tuple[int, ...]

    def of_group(self, group: int, samples: int) -> tuple[int, ...]:
        return self.tokens


TWO = Fleet(
    name="by hand",
    slots=2,
    learner_slots=1,
    groups=1,
    samples=2,
    lengths=Fixed((100, 300)),
    round_s=0.010,
    request_s=0.005,
    round_tokens=1.0,
    prefill_tokens_s=1000,
    trained_tokens_s=200,
    push_s=0.5,
    commit_s=0.25,
    release_s=0.1,
    resume_s=0.2,
    activate_s=0.3,
    join_s=0.02,
    micro_batch_s=0.07,
    offload_s=0.04,
    gate_s=1.0,
    message_s=0.0,
)
"""Its workers generate for 100 and 300 rounds of 15 ms; 400 tokens train for 1 s on 2 slots."""


SYNC = SchedulePlan(TWO, Placement.COLOCATED, Schedule.SYNC)


def run_of(plan: SchedulePlan, steps: int, decide: Decide = step, **chosen: object) -> VirtualRun:
    return VirtualRun(plan.fleet, plan.settings(steps, **chosen), decide).run()


def deaf_to(kind: type[Command]) -> Decide:
    """A mutant machine that drops its commands of one kind."""

    def decide(state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
        state, issued = step(state, event)
        return state, tuple(one for one in issued if not isinstance(one, kind))

    return decide


def never_leases(state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
    """A mutant machine, for which no step is one of the drafter's."""
    away = replace(state, settings=replace(state.settings, drafter_enabled=False))
    return step(away if state.slots else state, event)


def test_a_step_takes_as_long_as_calculated_by_hand() -> None:
    run = run_of(SYNC, 2, drafter_enabled=False)
    rollout, release, policy, push, commit, resume = 4.5, 0.1, 1.0, 0.5, 0.25, 0.2
    first = rollout + release + policy + push + commit
    assert [one.step_s for one in run.records.finished] == pytest.approx([first, first + resume])
    assert run.slots.seconds(0.0, first) == pytest.approx(
        {
            SlotUse.GENERATING: 1.5 + 4.5,
            SlotUse.IDLE: 3.0,
            SlotUse.TRANSFERRING: 2 * (release + push + commit),
            SlotUse.POLICY: 2 * policy,
            SlotUse.DRAFTER: 0.0,
        }
    )


def test_tracks_apart_take_as_long_as_calculated_by_hand() -> None:
    """One worker: 100 rounds with both requests, 200 with one; then 400 tokens on one slot."""
    rollout, learn, commit = 100 * 0.020 + 200 * 0.015, 2.0 + 0.5, 0.25
    sync, off = (
        run_of(SchedulePlan(TWO, Placement.DISAGGREGATED, each, lag), 4, drafter_enabled=False)
        for each, lag in ((Schedule.SYNC, 0), (Schedule.ONE_STEP_OFF, 1))
    )
    assert sync.stepping_s == pytest.approx((0.0, 4 * (rollout + learn + commit)))
    assert sync.learner.lags == {0: 1600}
    # The first is rolled out alone; each set but the last waits for the rollouts beside it.
    assert off.stepping_s == pytest.approx((0.0, rollout + 3 * (rollout + commit) + learn + commit))
    assert off.learner.lags == {0: 400, 1: 1200}


def test_the_harvest_is_what_was_calculated_by_hand() -> None:
    none, run = (run_of(SYNC, 1, drafter_enabled=each) for each in (False, True))
    trains = 4.5 - 1.5 - 0.1 - 0.3  # the other worker's share less release and activation
    assert idle_slot_s(none) == pytest.approx(4.5 - 1.5)
    assert allowed_slot_s(none) == pytest.approx(trains)
    assert harvested_slot_s(run) == pytest.approx(trains)
    waits = 38 * 0.07 - trains + 0.04  # the end of the 38th micro-batch, then it leaves
    assert run.drafter.left_s == pytest.approx(waits)
    assert run.stepping_s[1] - none.stepping_s[1] == pytest.approx(waits)
    assert run.learner.tokens == 400


def test_slots_released_later_join_and_the_harvest_is_what_was_calculated_by_hand() -> None:
    fleet = replace(TWO, slots=3, samples=3, lengths=Fixed((100, 200, 300)))
    plan = SchedulePlan(fleet, Placement.COLOCATED, Schedule.SYNC)
    none, run = (run_of(plan, 1, drafter_enabled=each) for each in (False, True))
    first, second = 4.5 - 1.5 - 0.1 - 0.3, 4.5 - 3.0 - 0.1
    assert allowed_slot_s(none) == pytest.approx(first + second)
    # 3.1 s: the memory is back; 1.9 s + 18 * 0.07 s: a micro-batch ends, and the shards move.
    joined = 1.9 + 18 * 0.07 + 0.02
    assert harvested_slot_s(run) == pytest.approx(joined - 1.9 - 0.02 + 2 * (4.5 - joined))


def test_a_machine_that_never_leases_harvests_nothing() -> None:
    run = run_of(SYNC, 2, never_leases)
    assert harvested_slot_s(run) == 0
    assert run.wall_s == run_of(SYNC, 2, drafter_enabled=False).wall_s


@pytest.mark.parametrize("kind", [PreemptDrafter, ActivateDrafter])
def test_a_machine_that_forgets_a_command_stands_still(kind: type[Command]) -> None:
    with pytest.raises(InternalError, match="stands still"):
        run_of(SYNC, 2, deaf_to(kind))


def test_a_lease_too_short_to_be_used_trains_nothing_and_delays_nothing() -> None:
    fleet = replace(TWO, lengths=Fixed((280, 300)))  # 0.3 s idle, 0.4 s until the drafter trains
    plan = SchedulePlan(fleet, Placement.COLOCATED, Schedule.SYNC)
    none, run = (run_of(plan, 1, drafter_enabled=each) for each in (False, True))
    assert allowed_slot_s(none) == harvested_slot_s(run) == 0
    assert run.wall_s == pytest.approx(none.wall_s)


@pytest.mark.parametrize("placement", Placement)
def test_no_trained_token_is_staler_than_allowed_and_the_machine_sees_to_it(
    placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = SchedulePlan(cores(), placement, Schedule.FULLY_ASYNC, 1)
    assert max(run_of(plan, 8, drafter_enabled=False).learner.lags) == 1
    monkeypatch.setattr(schedule, "leaves_time", lambda *_: True)
    assert max(run_of(plan, 8, drafter_enabled=False).learner.lags) > 1


def test_commit_modes_cost_what_they_compute_again() -> None:
    plan = SchedulePlan(cores(), Placement.DISAGGREGATED, Schedule.FULLY_ASYNC, 1)
    in_place, retract, abort = (
        run_of(plan, 8, drafter_enabled=False, commit_mode=mode).wall_s for mode in CommitMode
    )
    assert in_place < retract == abort  # an ended request resumes from its tokens


def test_requests_share_a_round_and_the_last_one_runs_alone() -> None:
    worker = SimulatedWorker(TWO, 0)
    for sample, tokens in enumerate((2, 4)):
        worker.add(0.0, 7, SimulatedResponse(0, 0, sample, tokens))
    ends = []
    while len(worker):
        end_s = worker.next_end_s()
        assert end_s is not None
        ends.append((worker.end_first(end_s).sample, end_s))
    assert ends == [(0, pytest.approx(2 * 0.02)), (1, pytest.approx(2 * 0.02 + 2 * 0.015))]


def test_tokens_after_a_swap_are_of_the_new_version_and_a_pause_makes_none() -> None:
    worker, response = SimulatedWorker(TWO, 0), SimulatedResponse(0, 0, 0, 10)
    worker.add(0.0, 3, response)
    worker.pause(4 * 0.015)
    worker.swap(1.0, 4)
    worker.go_on(2.0)
    end_s = worker.next_end_s()
    assert end_s == pytest.approx(2.0 + 6 * 0.015)
    assert worker.end_first(end_s).versions == [(3, 4), (4, 6)]


def test_drawn_lengths_have_the_quantiles_of_their_distribution() -> None:
    lengths = LogNormal(median=900, sigma=1.2, limit=32_768, seed=15)
    drawn = [one for group in range(2000) for one in lengths.of_group(group, 8)]
    assert np.median(drawn) == pytest.approx(900, rel=0.05)
    assert np.percentile(drawn, 90) == pytest.approx(900 * np.exp(1.2 * 1.2816), rel=0.05)
    assert max(drawn) == 32_768
    assert lengths.of_group(5, 8) == lengths.of_group(5, 8) != lengths.of_group(6, 8)


def test_recorded_groups_come_in_the_order_of_the_run_and_then_again() -> None:
    lengths = Recorded(((1, 2), (3, 4)))
    assert [lengths.of_group(group, 2) for group in range(3)] == [(1, 2), (3, 4), (1, 2)]
    assert len({len(group) for group in Recorded.of_demo().groups}) == 1
    assert DEMO.stat().st_size < 16_384


def test_the_recorder_takes_the_groups_that_train_and_leaves_evaluations_out() -> None:
    spans: list[SpanRecord] = []

    def span(name: str, attributes: dict[str, object], parent: str = "") -> str:
        number = str(len(spans))
        at_ns = len(spans)
        spans.append(
            SpanRecord("t", number, parent, name, "internal", "gateway", at_ns, at_ns, attributes)
        )
        return number

    for samples in (1, 2):
        rollout = span(names.RUN_TASKS, {names.SAMPLES_PER_TASK: samples})
        for sample in range(samples):
            about = {names.TASK: "a", names.SESSION_ID: f"0-a-{sample}"}
            session = span(names.SESSION, about, rollout)
            tokens = {names.GEN_AI_OUTPUT_TOKENS: 10 * samples + sample}
            span(names.ENGINE_REQUEST, tokens, session)
    assert groups_of(spans) == [[20, 21]]


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    """A small run of every plan of the bench, on 2 cores."""
    return [
        Pair(plan, plan.run(6, drafter=False), plan.run(6, drafter=True)) for plan in plans(cores())
    ]


def test_a_small_run_of_every_schedule_and_placement_meets_the_goals(pairs: list[Pair]) -> None:
    assert [goal for goal in goals_of(pairs) if not goal.met] == []
    assert {pair.harvest.refused for pair in pairs} == {0}


@pytest.mark.parametrize(
    ("schedule", "lag", "steps"),
    [(Schedule.SYNC, 0, 2), (Schedule.FULLY_ASYNC, 4, 8)],  # of 8, the last 4 with no tasks to draw
)
def test_eight_slots_are_harvested_as_the_rules_allow(
    schedule: Schedule, lag: int, steps: int
) -> None:
    plan = SchedulePlan(gpus(), Placement.COLOCATED, schedule, lag)
    pair = Pair(plan, plan.run(steps, drafter=False), plan.run(steps, drafter=True))
    assert [goal for goal in goals_of([pair]) if not goal.met] == []


def test_a_simulation_is_the_same_every_time(pairs: list[Pair]) -> None:
    again = pairs[0].plan.run(6, drafter=True)
    assert again.slots.intervals == pairs[0].harvest.slots.intervals
    assert again.records.finished == pairs[0].harvest.records.finished


def test_an_account_of_slots_that_loses_a_use_is_noticed(pairs: list[Pair]) -> None:
    run = pairs[0].plan.run(2, drafter=True)
    run.slots.intervals = [one for one in run.slots.intervals if one.use is not SlotUse.POLICY]
    assert [goal.met for goal in accounted([replace(pairs[0], harvest=run)])] == [True, False]
