"""Simulates both trainers: the progress of a policy step and of an activation of the drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from benchmarks.simulation.gateway import SimulatedGateway
from benchmarks.simulation.site import Site
from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.slots import Holder
from paceline.streams.journal import SlotUse


class SimulatedLearner:
    """The policy trainer: one optimiser step over all samples of a step, then the push."""

    def __init__(self, site: Site, gateway: SimulatedGateway) -> None:
        self._site, self._gateway = site, gateway
        self.tokens = 0  # trained
        self.lags: dict[int, int] = {}  # by versions behind -> tokens

    def train(self, command: commands.TrainPolicy) -> None:
        """Emits WorkersReleased, PolicyStepped and PolicyPrepared."""
        self._site.slots.set(command.slots, SlotUse.TRANSFERRING, self._site.time.now_s)
        self._gateway.release(command.slots, lambda: self._begin(command))

    def _begin(self, command: commands.TrainPolicy) -> None:
        site = self._site
        site.tell(events.WorkersReleased(site.time.now_s, command.epoch, Holder.POLICY))
        site.slots.set(command.slots, SlotUse.POLICY, site.time.now_s)
        tokens = self._take(command)
        rate = site.fleet.trained_tokens_s * len(command.slots)
        site.time.after(tokens / rate, lambda: self._stepped(command))

    def _take(self, command: commands.TrainPolicy) -> int:
        tokens = 0
        for response in self._gateway.take(command.batch):
            tokens += response.tokens
            for version, count in response.versions:
                lag = command.policy_version - version
                self.lags[lag] = self.lags.get(lag, 0) + count
        self.tokens += tokens
        return tokens

    def _stepped(self, command: commands.TrainPolicy) -> None:
        site, version = self._site, command.policy_version + 1
        site.slots.set(command.slots, SlotUse.IDLE, site.time.now_s)
        site.slots.push(command.slots, site.time.now_s)
        site.tell(events.PolicyStepped(site.time.now_s, command.epoch, version))

        def prepared() -> None:
            site.slots.push((), site.time.now_s)
            site.tell(events.PolicyPrepared(site.time.now_s, command.epoch, version))

        site.time.after(site.fleet.push_s, prepared)


@dataclass(slots=True)
class SimulatedActivation:
    """A lease from the drafter trainer's view."""

    epoch: int
    slots: Sequence[int]
    began_s: float | None = None  # when it began to train


class SimulatedDrafter:
    """The drafter trainer; an activation has rows for a number of slot-seconds."""

    def __init__(self, site: Site, gateway: SimulatedGateway, enough_slot_s: float) -> None:
        self._site, self._gateway, self._enough_slot_s = site, gateway, enough_slot_s
        self._now: SimulatedActivation | None = None
        self._version = 0  # of the newest drafter
        self.left_s = 0.0  # seconds between demands for its slots and its departure

    def activate(self, command: commands.ActivateDrafter) -> None:
        """Emits WorkersReleased, DrafterActivated, GatePromoted after a while, and Detached after
        all its rows.
        """
        site = self._site
        one = self._now = SimulatedActivation(command.epoch, command.slots)
        site.slots.set(one.slots, SlotUse.TRANSFERRING, site.time.now_s)
        self._gateway.release(one.slots, lambda: self._released(one))

    def join(self, command: commands.JoinDrafter) -> None:
        """Emits WorkersReleased and, once it trains on all slots of the lease, DrafterJoined."""
        site, one = self._site, self._now
        if one is not None and one.epoch == command.epoch:
            one.slots = command.slots
            site.slots.set(command.joining, SlotUse.TRANSFERRING, site.time.now_s)
            self._gateway.release(command.joining, lambda: self._meet(one))

    def preempt(self, command: commands.PreemptDrafter) -> None:
        """Emits Preempted once the running micro-batch is over and the slots are empty."""
        site, one = self._site, self._now
        if one is None or one.epoch != command.epoch:
            return
        self._now, asked_s = None, site.time.now_s

        def preempted_at(at_s: float) -> events.Event:
            self.left_s += at_s - asked_s
            return events.Preempted(at_s, one.epoch)

        stops_s = site.fleet.message_s + self._micro_batch_left_s(one)
        site.time.after(stops_s, lambda: self._leave(one, preempted_at))

    def _released(self, one: SimulatedActivation) -> None:
        if self._now is one:
            site = self._site
            site.tell(events.WorkersReleased(site.time.now_s, one.epoch, Holder.DRAFTER))
            site.time.after(site.fleet.activate_s, lambda: self._begin(one))

    def _begin(self, one: SimulatedActivation) -> None:
        if self._now is one:
            site = self._site
            one.began_s = site.time.now_s
            site.slots.set(one.slots, SlotUse.DRAFTER, site.time.now_s)
            site.tell(events.DrafterActivated(site.time.now_s, one.epoch))
            site.time.after(site.fleet.gate_s, lambda: self._promote(one))
            if isfinite(self._enough_slot_s):
                enough_s = self._enough_slot_s / len(one.slots)
                site.time.after(enough_s, lambda: self._done(one))

    def _meet(self, one: SimulatedActivation) -> None:
        """Lets old and new ranks meet between two micro-batches."""
        site = self._site
        site.tell(events.WorkersReleased(site.time.now_s, one.epoch, Holder.DRAFTER))

        def reshard() -> None:
            if self._now is one:
                site.slots.set(one.slots, SlotUse.TRANSFERRING, site.time.now_s)
                site.time.after(site.fleet.join_s, lambda: self._joined(one))

        site.time.after(self._micro_batch_left_s(one), reshard)

    def _joined(self, one: SimulatedActivation) -> None:
        if self._now is one:
            site = self._site
            one.began_s = site.time.now_s
            site.slots.set(one.slots, SlotUse.DRAFTER, site.time.now_s)
            site.tell(events.DrafterJoined(site.time.now_s, one.epoch, len(one.slots)))

    def _micro_batch_left_s(self, one: SimulatedActivation) -> float:
        if one.began_s is None:
            return 0.0
        micro_batch_s = self._site.fleet.micro_batch_s
        return micro_batch_s - (self._site.time.now_s - one.began_s) % micro_batch_s

    def _promote(self, one: SimulatedActivation) -> None:
        if self._now is one:
            self._version += 1
            now_s = self._site.time.now_s
            self._site.tell(events.GatePromoted(now_s, one.epoch, self._version))

    def _done(self, one: SimulatedActivation) -> None:
        if self._now is one:
            self._now = None
            self._leave(one, lambda at_s: events.Detached(at_s, one.epoch, "epochs"))

    def _leave(self, one: SimulatedActivation, event_at: Callable[[float], events.Event]) -> None:
        """Leaves the slots, if the drafter trained there; then emits the event."""
        site = self._site
        site.slots.set(one.slots, SlotUse.TRANSFERRING, site.time.now_s)

        def left() -> None:
            site.slots.set(one.slots, SlotUse.IDLE, site.time.now_s)
            site.tell(event_at(site.time.now_s))

        site.time.after(0.0 if one.began_s is None else site.fleet.offload_s, left)
