"""A service that kept failing: the run ends with what went wrong, not only with how long it did."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.calls.base import Calls, Reported
from coordinator.calls.recovery import await_service
from coordinator.config import CoordinatorConfig
from coordinator.machine import commands, events
from coordinator.machine.events import Event
from coordinator.machine.state import Service
from paceline.errors import ResourceExhausted


async def test_a_run_that_waited_in_vain_says_what_the_service_failed_of() -> None:
    emitted: list[Event] = []
    clock = SimpleNamespace(now=0.0)
    unused = cast(Any, None)
    config = CoordinatorConfig(tasks_path="tasks", service_recovery_s=120.0)
    calls = Calls(config, unused, unused, unused, emitted.append, lambda: clock.now, unused)
    command = cast(Any, SimpleNamespace(epoch=1))
    full = ResourceExhausted("the spool cannot be written", seen="No space left on device")
    with (
        pytest.raises(Reported),
        calls.reported(Service.POLICY_TRAINER, "policy", command, deadline_s=1.0),
    ):
        raise full
    clock.now = 121.0
    await await_service(calls, commands.AwaitService(Service.POLICY_TRAINER))
    lost, failed = emitted
    assert isinstance(lost, events.ServiceLost)
    assert isinstance(failed, events.CallFailed)
    assert "policy_trainer kept failing" in failed.message
    assert "No space left on device" in failed.message
