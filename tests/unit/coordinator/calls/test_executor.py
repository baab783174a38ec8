"""Which commands are calls."""

from __future__ import annotations

from typing import get_args

from coordinator.calls.executor import CALLS
from coordinator.machine import commands

RUNNERS_OWN = {commands.BeginStep, commands.CloseStep, commands.FinishRun, commands.Refuse}


def test_every_command_is_a_call_or_the_runners_own() -> None:
    assert set(CALLS) | RUNNERS_OWN == set(get_args(commands.Command))
    assert not set(CALLS) & RUNNERS_OWN
