"""Makes the events of a run without failures, step by step."""

from __future__ import annotations

import time
from collections.abc import Iterator

from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.settings import RunSettings
from paceline.services.coordinator.machine.state import State
from paceline.services.coordinator.transitions import Transitions
from paceline.trajectory import VersionSet

SHARES_PER_LEASE = 8
"""The drafter finishes after this many shares and gets the next slots."""
STEPS = 1_000_000


def run_started(slots: int) -> Event:
    """Returns the first event of a run."""
    settings = RunSettings(workers=slots, total_steps=STEPS, training_interval_steps=1)
    return events.RunStarted(_now(), settings, VersionSet())


def one_step(run: Transitions, at_once: int = 1) -> Iterator[list[Event]]:
    """Yields the events of a step in lists; the events of a list wait at the same time.

    A list has at most `at_once` shares. Each list is made from the state after the former list.
    """

    def state() -> State:
        return run.state

    def lease() -> int:
        return state().lease_epoch

    yield [events.StepBegan(_now(), state().step, f"00-{1:032x}-{1:016x}-01")]
    epoch, workers = state().rollouts.epoch, state().settings.workers
    for first in range(0, workers, at_once):
        end = min(first + at_once, workers)
        yield [events.ShareDone(_now(), epoch, worker) for worker in range(first, end)]
        if state().lease is not None and end % SHARES_PER_LEASE == 0:
            yield [events.Detached(_now(), lease(), "epochs", {"steps": 3, "tokens": 900})]
    yield [events.TasksFinished(_now(), epoch, {"response_tokens": 5000, "rollout_s": 2.0})]
    if state().lease is not None:
        yield [events.Preempted(_now(), lease())]
    version, epoch = state().versions.policy + 1, state().learner.epoch
    yield [events.PolicyStepped(_now(), epoch, version, {"loss": 0.5})]
    yield [events.PolicyPrepared(_now(), epoch, version)]
    committing = state().committing
    assert committing is not None
    yield [events.Committed(_now(), committing)]


def _now() -> float:
    return round(time.time(), 6)
