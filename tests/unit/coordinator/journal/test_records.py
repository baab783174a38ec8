"""The records of finished steps as they are told."""

from __future__ import annotations

from coordinator.journal.records import PAGE, StepRecords
from paceline.v1.coordinator_pb2 import StepRecord


def test_records_are_told_page_by_page() -> None:
    records = StepRecords()
    records.finished = [StepRecord(step=step) for step in range(2 * PAGE + 3)]
    told: list[int] = []
    sizes = []
    while page := records.page(len(told)):
        told += [record.step for record in page]
        sizes.append(len(page))
    assert told == list(range(2 * PAGE + 3))
    assert sizes == [PAGE, PAGE, 3]
