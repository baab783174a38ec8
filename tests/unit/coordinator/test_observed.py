"""Metrics that follow a run's transitions."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from metric_points import points
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from paceline.errors import Unavailable
from paceline.local.patience import patient
from paceline.services.coordinator import metrics
from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.slots import Holder, Slot, slot_row
from paceline.services.coordinator.machine.state import (
    DrawnStep,
    Phase,
    RolloutTrack,
    Service,
    State,
)
from paceline.services.coordinator.observed import ObservedRun
from paceline.streams import LedgerCount

ENGINE, POLICY, DRAFTER = (
    Slot(holder, 1) for holder in (Holder.ENGINE, Holder.POLICY, Holder.DRAFTER)
)


def stopped(at_s: float) -> events.StopRequested:
    return events.StopRequested(at_s)


def test_seconds_of_a_phase_are_counted_when_it_is_left(
    metric_reader: InMemoryMetricReader,
) -> None:
    run = ObservedRun(None)
    paused, closing = State(phase=Phase.PAUSED), State(phase=Phase.CLOSING)
    run.observe(paused, stopped(10.0), paused)
    run.observe(paused, stopped(12.0), paused)
    run.observe(paused, stopped(14.5), closing)
    run.observe(closing, stopped(15.5), State(phase=Phase.FINISHED))
    found = points(metric_reader, metrics, "phase_time")
    assert found == {("paused",): 4.5, ("closing",): 1.0}


def test_a_replayed_past_belongs_to_no_phase(metric_reader: InMemoryMetricReader) -> None:
    run, paused = ObservedRun(None), State(phase=Phase.PAUSED)
    run.observe(paused, stopped(1000.0), State(phase=Phase.CLOSING))
    assert points(metric_reader, metrics, "phase_time") == {("paused",): 0.0}


def test_slots_and_leases_are_told_by_holder(metric_reader: InMemoryMetricReader) -> None:
    run = ObservedRun(None)
    rolls = State(slots=slot_row((ENGINE, ENGINE)))
    lent = replace(rolls, slots=slot_row((ENGINE, DRAFTER)), lease_epoch=4)
    trains = replace(lent, slots=slot_row((POLICY, POLICY)))
    for before, after in ((rolls, rolls), (rolls, lent), (lent, trains), (trains, trains)):
        run.observe(before, stopped(1.0), after)
    held = points(metric_reader, metrics, "slots")
    assert held == {("none",): 0, ("engine",): 0, ("policy",): 2, ("drafter",): 0}
    assert points(metric_reader, metrics, "leases") == {("drafter",): 1, ("policy",): 1}


def test_a_service_that_is_away_is_told_until_it_is_back(
    metric_reader: InMemoryMetricReader,
) -> None:
    run, here = ObservedRun(None), State()
    away = replace(here, lost=frozenset({Service.GATEWAY}))
    run.observe(here, stopped(1.0), away)
    all_of_them = points(metric_reader, metrics, "away")
    assert all_of_them == {("gateway",): 1, ("policy_trainer",): 0, ("drafter_trainer",): 0}
    run.observe(away, stopped(2.0), here)
    assert set(points(metric_reader, metrics, "away").values()) == {0}


def test_samples_count_once_and_not_where_their_call_is_over(
    metric_reader: InMemoryMetricReader,
) -> None:
    run = ObservedRun(None)
    drawn = DrawnStep(step=0, version=0, epoch=3, called=True)
    rolls = State(phase=Phase.RUNNING, rollouts=RolloutTrack(Phase.ROLLOUT, 1, draws=(drawn,)))
    for epoch in (3, 2):
        details = {"scored": 14, "samples_unscored": {"failed": 1, "unscored": 2}}
        run.observe(rolls, events.TasksFinished(1.0, epoch, details=details), rolls)
    assert points(metric_reader, metrics, "samples") == {
        ("scored",): 14,
        ("failed",): 1,
        ("unscored",): 2,
    }


class CountedLedger:
    """A ledger with fixed counts; its first call finds no Redis."""

    def __init__(self) -> None:
        self.asked = asyncio.Semaphore(0)
        self.fails = True

    async def count(self) -> LedgerCount:
        self.asked.release()
        if self.fails:
            self.fails = False
            raise Unavailable("Redis is away")
        return LedgerCount(20, 12, {"stale": 3, "late": 1}, 3, 1)


async def test_trajectories_are_counted_after_each_step_also_where_redis_was_away(
    metric_reader: InMemoryMetricReader,
) -> None:
    ledger: Any = CountedLedger()
    run = ObservedRun(ledger)
    counting = asyncio.create_task(run.run())
    for _ in range(2):
        run.step_ended()
        await asyncio.wait_for(ledger.asked.acquire(), patient(10))
    await asyncio.sleep(0)
    counting.cancel()
    await asyncio.gather(counting, return_exceptions=True)
    assert points(metric_reader, metrics, "trajectories") == {
        ("published",): 20,
        ("trained",): 12,
        ("dropped",): 4,
        ("open",): 3,
        ("lost",): 1,
    }
