"""Orders and reports come back as they were sent."""

from __future__ import annotations

import pytest

from paceline.cluster.order import KeeperReport, ServiceOrder
from paceline.errors import ConfigError, PacelineError, RunFailed, Unavailable
from paceline.local.launch import ChildEvent


def test_an_order_is_read_as_it_was_written() -> None:
    order = ServiceOrder(
        "gateway", "/runs/a", "/here", ["a.toml"], ["run.id=a"], [], {"redis": False}, {"A": "ü"}
    )
    assert ServiceOrder.of(order.text()) == order


@pytest.mark.parametrize(
    "error",
    [
        None,
        RunFailed("its loss is no number"),
        ConfigError("a port", seen=7, allowed="1..6"),
        Unavailable("it dies", reason="SERVICE_FAILED"),
    ],
)
def test_a_report_is_read_as_it_was_written(error: PacelineError | None) -> None:
    events = (ChildEvent("gateway", "started", 12), ChildEvent("gateway", "died", 12, "why"))
    report = KeeperReport(7, events, True, error is not None, error)
    read = KeeperReport.of(report.text())
    assert (read.next, read.events, read.healthy, read.over) == (7, events, True, report.over)
    assert type(read.error) is type(error)
    assert str(read.error) == str(error)
    assert getattr(read.error, "reason", None) == getattr(error, "reason", None)
