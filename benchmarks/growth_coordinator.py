"""Writes the journal of a run without failures, as the coordinator does, and times its replay."""

from __future__ import annotations

import time

import redis.asyncio

from paceline.errors import InternalError
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.services.coordinator.journal.journal import Journal
from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.settings import RunSettings
from paceline.services.coordinator.machine.state import State
from paceline.services.coordinator.transitions import Transitions
from paceline.trajectory import VersionSet

WORKERS = 8
GROUP_SIZE = 8
SNAPSHOT_ENTRIES = CoordinatorConfig().snapshot_entries
TRACE = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
_PULLS = {f"eagle:{steps}_1_{steps + 1}": 100 * steps for steps in (3, 5, 7)}
_POLICY = ("loss", "grad_norm", "reward_mean", "reward_std", "entropy", "behavior_gap", "train_s")


async def _untold(*facts: object) -> None:
    """Publishes nothing."""


def _transitions(
    client: redis.asyncio.Redis, run_id: str, snapshot_entries: int = SNAPSHOT_ENTRIES
) -> Transitions:
    return Transitions(run_id, 0, 0.0, snapshot_entries, Journal(client, run_id), _untold)


class JournaledRun:
    """A coordinator's transitions and their journal, without any other service."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        run_id: str,
        steps: int,
        snapshot_entries: int = SNAPSHOT_ENTRIES,
    ) -> None:
        self.transitions = _transitions(client, run_id, snapshot_entries)
        self._settings = RunSettings(workers=WORKERS, total_steps=steps, drafter_enabled=False)
        self._at_s = 1.7e9

    @property
    def state(self) -> State:
        """Present state of the run."""
        return self.transitions.state

    async def step(self, sessions: int) -> None:
        """Applies the events of the next step."""
        apply = self.transitions.apply
        version = self.state.versions.policy + 1
        if not version - 1:
            await apply(events.RunStarted(self._now(), self._settings, VersionSet()))
        await apply(events.StepBegan(self._now(), self.state.step, TRACE))
        rollout = self.state.rollouts.epoch
        await apply(*(events.ShareDone(self._now(), rollout, one) for one in range(WORKERS)))
        await apply(events.TasksFinished(self._now(), rollout, self._rollout(sessions)))
        policy = self.state.learner.epoch
        figures = dict.fromkeys(_POLICY, 0.1234567890123)
        await apply(events.PolicyStepped(self._now(), policy, version, figures))
        await apply(events.PolicyPrepared(self._now(), policy, version, {"push_s": 0.25}))
        assert self.state.committing is not None
        await apply(events.Committed(self._now(), self.state.committing))

    def _now(self) -> float:
        self._at_s = round(self._at_s + 0.123457, 6)
        return self._at_s

    def _rollout(self, sessions: int) -> events.Details:
        groups = range(-(-sessions // GROUP_SIZE))
        return {
            "samples": sessions,
            "scored": sessions,
            "reward_mean": 0.546875,
            "response_tokens": 64 * sessions,
            "rollout_s": 2.0612345,
            "accept_length": 2.5829596412556053,
            "drafted_rounds": 223,
            "tokens_hash": "1828c856ee73f7f7",
            "length_quantiles": (20, 56, 231),
            "pulls": {arm: count * (self.state.step + 1) for arm, count in _PULLS.items()},
            "closed_groups": {f"{self.state.step}.task-{group}": GROUP_SIZE for group in groups},
        }


async def replayed(client: redis.asyncio.Redis, run_id: str, wanted: JournaledRun) -> float:
    """Seconds that a new coordinator needs to take over the run.

    Raises InternalError if it reaches another state or other records.
    """
    replay = _transitions(client, run_id)
    started = time.monotonic()
    await replay.replay()
    seconds = time.monotonic() - started
    if (replay.state, replay.records.finished) != (
        wanted.state,
        wanted.transitions.records.finished,
    ):
        raise InternalError("the replay reached another state", seen=replay.state.describe())
    return seconds
