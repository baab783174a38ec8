"""The interface between a worker process and its engine.

The worker (engines/worker/process.py) turns WorkerCommands into these calls, and the results of
`step` into WorkerEvents. An engine never blocks on Redis, gRPC or the gateway.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from paceline.services.rollout_gateway.engines import nouns
from paceline.trajectory import Target, VersionSet
from paceline.v1.engine_pb2 import ArmStats, Quarantine, WorkerHealth


class EngineBroken(Exception):
    """The engine cannot go on; its process exits and the gateway starts another."""


class CommandedEngine(Protocol):
    """The methods behind the commands of the worker protocol; see engines/worker/process.py."""

    @property
    def versions(self) -> VersionSet:
        """Serving set of versions."""

    @property
    def load(self) -> WorkerHealth:
        """Load and statistics, without the serving set."""

    def enqueue(self, request: nouns.Request) -> None:
        """Queue a request.

        Raises InvalidInput (prompt empty, token out of range, too long, unknown arm),
        MissingCapability, or FailedPrecondition while memory is released.
        """

    def abort(self, request_ids: frozenset[int] | None) -> list[nouns.Chunk]:
        """End requests (None: all); returns their last chunks, with all tokens not yet reported."""

    def pause(self, mode: nouns.PauseMode) -> list[nouns.Chunk]:
        """Stop decoding; returns the chunks of requests ended by mode ABORT."""

    def resume(self) -> None:
        """Continue decoding."""

    def prepare_weights(self, target: Target, version: int, path: Path, profile: str = "") -> None:
        """Load a spooled version beside the serving version; `profile` applies to a policy.

        Raises WeightsError if names or shapes differ. Raises MissingCapability if the engine cannot
        change to the profile, and InvalidInput if the profile does not exist.
        """

    def commit_weights(self, versions: VersionSet, mode: nouns.PauseMode) -> list[nouns.Chunk]:
        """Serve a set from the next round on; returns the chunks of requests ended by mode ABORT.

        Raises WeightsError, or EngineBroken after an update that was interrupted.
        """

    def abort_weights(self, target: Target, version: int) -> None:
        """Drop a prepared version; unknown versions are ignored."""

    def force_arm(self, arm: str) -> None:
        """Force one arm for all requests; "" returns the choice to the bandit.

        Raises InvalidInput.
        """

    def learn_arms(self, reports: Sequence[ArmStats]) -> None:
        """Give the bandit the statistics of other engines; see Bandit.learn."""

    def quarantine(self, withheld: Quarantine) -> None:
        """Disable these arms and reuse paths from the next round on; unknown arms are ignored."""

    def release_memory(self) -> int:
        """Free device memory; returns bytes, 0 if it is already free.

        Until `resume_memory`, enqueue raises FailedPrecondition, but weights may be prepared and
        committed. Raises MissingCapability, or FailedPrecondition while requests run.
        """

    def resume_memory(self) -> None:
        """Allocate released memory again and serve the last committed set.

        Raises MissingCapability.
        """

    def flush_cache(self) -> None:
        """Drop cached prefixes.

        Raises FailedPrecondition while requests run.
        """


class Engine(CommandedEngine, Protocol):
    """A token generator; one thread calls it round by round."""

    @property
    def info(self) -> nouns.EngineInfo:
        """Facts that never change."""

    @property
    def lm_head_hash(self) -> str:
        """First 16 hex characters of the sha256 of the serving lm_head bytes; empty if the engine
        has no lm_head.
        """

    def step(self) -> list[nouns.Chunk]:
        """One round: admit, draft, verify, accept.

        Returns a chunk per round for streaming requests, and only the last chunk for all other
        requests.
        """

    @property
    def has_work(self) -> bool:
        """True if a call of `step` would do some work."""

    def close(self) -> None:
        """Free all resources of the engine."""
