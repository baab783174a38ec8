"""Which commands are calls."""

from __future__ import annotations

from coordinator.calls.executor import CALLS
from coordinator.machine import commands

RUNNERS_OWN = {commands.BeginStep, commands.CloseStep, commands.FinishRun, commands.Refuse}


def test_every_command_is_a_call_or_the_runners_own() -> None:
    bases = {commands.Command, commands.StepCommand}
    declared = {each for each in vars(commands).values() if isinstance(each, type)}
    every = {each for each in declared if issubclass(each, commands.Command)} - bases
    assert set(CALLS) | RUNNERS_OWN == every
    assert not set(CALLS) & RUNNERS_OWN
