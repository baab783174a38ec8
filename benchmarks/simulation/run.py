"""Runs the machine over a fleet from RunStarted to FinishRun, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from benchmarks.simulation.fleet import Fleet
from benchmarks.simulation.gateway import SimulatedGateway
from benchmarks.simulation.site import Site, VirtualTime
from benchmarks.simulation.slot_clock import SlotClock
from benchmarks.simulation.trainers import SimulatedDrafter, SimulatedLearner
from paceline.errors import InternalError
from paceline.services.coordinator.journal.records import StepRecords
from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.commands import Command
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.settings import RunSettings
from paceline.services.coordinator.machine.state import State
from paceline.services.coordinator.machine.step import step
from paceline.trajectory import VersionSet

Decide = Callable[[State, Event], tuple[State, tuple[Command, ...]]]
"""A machine: paceline.services.coordinator.machine.step.step, or a mutant of it."""


class VirtualRun:
    """One run; after `run` the attributes hold its figures."""

    def __init__(
        self,
        fleet: Fleet,
        settings: RunSettings,
        decide: Decide = step,
        drafter_slot_s: float = math.inf,
        takes_s: Callable[[Event], float] | None = None,
        time: VirtualTime | None = None,
    ) -> None:
        """`drafter_slot_s`: slot-seconds after which an activation of the drafter is done.

        `takes_s`: seconds that the coordinator needs for an event. It handles events one after the
        other, and carries out an event's commands afterwards; None: no time.
        """
        self.fleet, self.settings = fleet, settings
        self.state = State()
        self.records = StepRecords()  # the product's own
        self.slots = SlotClock(settings.slots)
        self.events = self.refused = 0
        self.stepping_s = (0.0, 0.0)  # from the first step's begin to the last step's end
        self._decide, self._takes_s = decide, takes_s
        self._free_s = 0.0  # when the coordinator has handled all its events
        self._site = Site(fleet, self.slots, self._tell, time or VirtualTime())
        self.gateway = SimulatedGateway(self._site, settings)
        self.learner = SimulatedLearner(self._site, self.gateway)
        self.drafter = SimulatedDrafter(self._site, self.gateway, drafter_slot_s)

    @property
    def wall_s(self) -> float:
        """Virtual seconds of the whole run."""
        return self._site.time.now_s

    def run(self) -> VirtualRun:
        """Runs to the end. Raises InternalError if the run ends early or stops making progress."""
        started = events.RunStarted(0.0, self.settings, VersionSet())
        self._site.time.after(0.0, partial(self._tell, started))
        self._site.time.run()
        self.slots.close(self.wall_s)
        if self.state.step != self.settings.total_steps:
            raise InternalError("the simulated run stands still", seen=self.state.describe())
        return self

    def _tell(self, event: Event) -> None:
        before, self.events = self.state, self.events + 1
        self.state, issued = self._decide(before, event)
        self.records.observe(before, event, self.state)
        if isinstance(event, events.StepBegan) and not event.step:
            self.stepping_s = (event.at_s, event.at_s)
        elif isinstance(event, events.Committed):
            self.stepping_s = (self.stepping_s[0], event.at_s)
        if self._takes_s is None:
            self._carry_out(*issued)
        else:
            now_s = self._site.time.now_s
            self._free_s = max(self._free_s, now_s) + self._takes_s(event)
            self._site.time.after(self._free_s - now_s, partial(self._carry_out, *issued))

    def _carry_out(self, *issued: Command) -> None:
        for command in issued:
            self._begin(command)

    def _begin(self, command: Command) -> None:
        site = self._site
        match command:
            case commands.BeginStep(number):
                self._after_message(lambda now_s: events.StepBegan(now_s, number))
            case commands.RunTasks():
                self.gateway.run_tasks(command)
            case commands.ResumeWorkers():
                self.gateway.resume_rollouts(command)
            case commands.ActivateDrafter():
                self.drafter.activate(command)
            case commands.JoinDrafter():
                self.drafter.join(command)
            case commands.PreemptDrafter():
                self.drafter.preempt(command)
            case commands.TrainPolicy():
                self.learner.train(command)
            case commands.Commit():
                self.gateway.commit(command)
            case commands.SaveCheckpoints(epoch=epoch):
                site.time.after(
                    site.fleet.checkpoint_s,
                    lambda: self._tell(events.CheckpointsSaved(site.time.now_s, epoch)),
                )
            case commands.Refuse():
                self.refused += 1
            case commands.CloseStep() | commands.AbortDrafter() | commands.FinishRun():
                pass  # these commands have no answer
            case _:
                raise InternalError("no part of a simulation", seen=command)

    def _after_message(self, event_at: Callable[[float], Event]) -> None:
        time = self._site.time
        time.after(self.fleet.message_s, lambda: self._tell(event_at(time.now_s)))
