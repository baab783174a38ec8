"""Work on a slot that another service holds is counted, for every service."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.trespasses import trespasses
from paceline.report.spans import SpanRecord
from paceline.telemetry import names


def entry(at_s: float, event: str, data: dict[str, Any], *slots: tuple[int, str, int]) -> Any:
    changed = [[slot, 1, holder, epoch] for slot, holder, epoch in slots]
    return {"at_s": at_s, "event": event, "step": 0, "data": data, "slots": changed}


JOURNAL = [
    entry(
        *(0, "RunStarted", {"settings": {"workers": 2, "slots_per_worker": 2}}),
        *((slot, "none", 0) for slot in range(4)),
    ),
    entry(1, "StepBegan", {"step": 0}, *((slot, "engine", 1) for slot in range(4))),
    entry(10, "ShareDone", {"epoch": 1}, (0, "drafter", 2), (1, "drafter", 2)),
    entry(11, "WorkersReleased", {"epoch": 2, "details": {"workers": [0]}}),
    entry(12, "ShareDone", {"epoch": 1}, (2, "drafter", 2), (3, "drafter", 2)),
    entry(14, "WorkersReleased", {"epoch": 2, "details": {"workers": [1]}}),
    entry(20, "Preempted", {"epoch": 2}, *((slot, "policy", 3) for slot in range(4))),
    entry(21, "WorkersReleased", {"epoch": 3, "details": {"workers": [0, 1]}}),
    entry(30, "PolicyStepped", {"epoch": 3}, *((slot, "none", 3) for slot in range(4))),
    entry(40, "StepBegan", {"step": 1}, *((slot, "engine", 4) for slot in range(4))),
    entry(50, "TasksFinished", {"epoch": 4}),
]


def work(name: str, start_s: float, end_s: float, **attributes: Any) -> SpanRecord:
    times = (int(start_s * 1e9), int(end_s * 1e9))
    known = {"worker": names.WORKER, "epoch": names.EPOCH, "slots": names.SLOTS}
    named = {known[key]: value for key, value in attributes.items()}
    return SpanRecord("t", "s", "", name, "internal", "x", *times, attributes=named)


RIGHT = [
    work("engine.busy", 1, 10.5, worker=0),  # ends while its slots are on their way
    work("engine.busy", 2, 13.5, worker=1),
    work("engine.busy", 31, 33, worker=0),  # an agent's, while nobody holds the slots
    work("engine.busy", 40, 49, worker=1),
    work("drafter.micro_step", 11, 13.9, epoch=2, slots=[0, 1]),
    work("drafter.micro_step", 14.1, 19.9, epoch=2, slots=[0, 1, 2, 3]),
    work("policy.optimizer_step", 21, 30),
    work("workers.release", 0, 50),  # no work
]


def test_a_right_run_has_no_work_on_a_slot_of_another() -> None:
    assert trespasses(JOURNAL, RIGHT) == {"engine": 0, "policy": 0, "drafter": 0}


@pytest.mark.parametrize(
    ("injected", "holder"),
    [
        (work("engine.busy", 12, 13, worker=0), "engine"),  # the drafter's
        (work("engine.busy", 13, 14.5, worker=1), "engine"),  # after it gave its memory back
        (work("drafter.micro_step", 12.5, 13, epoch=2, slots=[0, 1, 2, 3]), "drafter"),  # too soon
        (work("drafter.micro_step", 10.2, 10.8, epoch=2), "drafter"),  # the engine's still
        (work("drafter.micro_step", 19, 21.5, epoch=2), "drafter"),  # the policy's
        (work("drafter.micro_step", 31, 32, epoch=9), "drafter"),  # never leased
        (work("policy.optimizer_step", 20.2, 20.8), "policy"),
        (work("policy.optimizer_step", 29, 41), "policy"),  # the next rollouts'
    ],
)
def test_work_on_a_slot_of_another_is_counted(injected: SpanRecord, holder: str) -> None:
    found = trespasses(JOURNAL, [*RIGHT, injected])
    assert found == {"engine": 0, "policy": 0, "drafter": 0} | {holder: 1}


APART = [
    entry(
        *(0, "RunStarted", {"settings": {"workers": 2, "slots_per_worker": 1}}),
        *((slot, "none", 0) for slot in range(3)),
    ),
    entry(1, "StepBegan", {"step": 0}, (0, "engine", 1), (1, "engine", 1)),
    entry(5, "TasksFinished", {"epoch": 1}, (2, "policy", 2)),
    entry(9, "PolicyStepped", {"epoch": 2}, (2, "none", 2)),
]
"""The policy has slot 2 for itself and trains while both workers generate."""


@pytest.mark.parametrize(
    ("start_s", "end_s", "holder", "found"), [(5, 9, "none", 0), (8, 11, "drafter", 1)]
)
def test_a_policy_with_slots_of_its_own_waits_for_no_worker_and_shares_with_no_drafter(
    start_s: float, end_s: float, holder: str, found: int
) -> None:
    last = [entry(10, "ShareDone", {"epoch": 1}, (2, holder, 3)), entry(12, "ShareDone", {})]
    spans = [work("engine.busy", 1, 12, worker=0), work("policy.optimizer_step", start_s, end_s)]
    assert trespasses([*APART, *last], spans) == {"engine": 0, "policy": found, "drafter": 0}
