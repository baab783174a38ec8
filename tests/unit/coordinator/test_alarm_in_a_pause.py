"""A run that rests in a pause stands still for a good reason."""

from __future__ import annotations

from typing import Any, cast

from coordinator.calls.base import Calls
from coordinator.calls.peers import Peers
from coordinator.config import CoordinatorConfig
from coordinator.machine import events
from coordinator.machine.state import Phase, RolloutTrack, Service, State
from coordinator.stall import StallWatch
from paceline.config import AddressesConfig, SecurityConfig
from paceline.local.ports import free_port

ROLLS_OUT = State(phase=Phase.RUNNING, rollouts=RolloutTrack(Phase.ROLLOUT))
RESTS = State(phase=Phase.PAUSED, paused=True)
AT_ONCE_S = 1e-6
"""Any time without progress is too long."""


async def test_no_progress_is_due_while_a_run_rests_and_it_is_due_again_when_it_goes_on() -> None:
    nobody = {service.value: f"127.0.0.1:{free_port()}" for service in Service}
    peers = Peers.open(AddressesConfig.model_validate(nobody), SecurityConfig())
    config = CoordinatorConfig(tasks_path="tasks", stall_alarm_s=AT_ONCE_S)
    unused, states = cast(Any, None), [State()]
    calls = Calls(config, peers, unused, unused, lambda _: None, lambda: 0.0, lambda: states[-1])
    watch = StallWatch(calls)
    found: list[tuple[bool, str]] = []
    for event, state in (
        (events.StepBegan(0.0, 0), ROLLS_OUT),
        (events.Paused(1.0), RESTS),
        (events.Continued(2.0), ROLLS_OUT),
    ):
        states.append(state)
        watch.observe(event, state)
        await watch._look()
        progress = await watch.progress()
        found.append((bool(progress.alarm), progress.parts[0].doing))
    await peers.close()
    doing = "rollout of step 0"
    assert found == [(True, doing), (False, "paused of step 0"), (True, doing)]
