"""The contract of an engine worker, whatever engine runs inside.

An engine lives in the worker process and is driven by engines/worker/process.py: the worker turns
WorkerCommands into these calls and what `step` returns into WorkerEvents. An engine never blocks on
Redis, gRPC or the gateway.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline.services.rollout_gateway.engines.nouns import (
    Chunk,
    EngineInfo,
    EngineLoad,
    MemoryTag,
    PauseMode,
    Request,
    Withheld,
)
from paceline.trajectory import Target, VersionSet


class RowSink(Protocol):
    """Takes hidden rows of verified tokens without ever waiting; what finds no room is dropped and
    counted.
    """

    def write(
        self,
        request_ids: npt.NDArray[np.uint64],  # [n]
        positions: npt.NDArray[np.uint32],  # [n] absolute position of the token
        token_ids: npt.NDArray[np.uint32],  # [n] token at that position, whose state the row is
        policy_version: int,
        hidden: npt.NDArray[np.uint8],  # [n, row bytes]
        # [n] see engines/worker/ring.py; None: all are rows of sequences
        parents: npt.NDArray[np.uint32] | None = None,
    ) -> int:
        """Rows written, at most n: the first ones."""
        ...


class CommandedEngine(Protocol):
    """What the commands of the worker protocol ask for; see engines/worker/commands.py."""

    @property
    def versions(self) -> VersionSet:
        """Serving set."""
        ...

    @property
    def load(self) -> EngineLoad:
        """Load and statistics."""
        ...

    def enqueue(self, request: Request) -> None:
        """Queue a request.

        Raises InvalidInput (prompt empty, token out of range, too long, unknown arm),
        MissingCapability, or FailedPrecondition while memory is released.
        """
        ...

    def abort(self, request_ids: frozenset[int] | None) -> list[Chunk]:
        """End requests (None: all); returns their last chunks with what was generated and not yet
        reported.
        """
        ...

    def pause(self, mode: PauseMode) -> list[Chunk]:
        """Stop decoding; returns chunks of requests ended by mode ABORT."""
        ...

    def resume(self) -> None:
        """Decode again."""
        ...

    def prepare_weights(self, target: Target, version: int, path: Path, profile: str = "") -> None:
        """Load a spooled version beside the serving one, a policy under a profile.

        Raises WeightsError when names or shapes differ, MissingCapability for a profile that this
        engine cannot change to, InvalidInput for one that there is not.
        """
        ...

    def commit_weights(self, versions: VersionSet, mode: PauseMode) -> list[Chunk]:
        """Serve a set from the next round on; returns chunks of requests ended by mode ABORT.

        Raises WeightsError.
        """
        ...

    def abort_weights(self, target: Target, version: int) -> None:
        """Forget a prepared version; unknown ones are ignored."""
        ...

    def force_arm(self, arm: str) -> None:
        """One arm for all requests; "" gives the choice back to the bandit. Raises InvalidInput."""
        ...

    def quarantine(self, withheld: Withheld) -> None:
        """Go without these from the next round on; arms that do not exist are ignored."""
        ...

    def release_memory(self, tags: Sequence[MemoryTag]) -> int:
        """Give device memory back (no tags: all); returns bytes. Again: 0 bytes.

        Until `resume_memory`, enqueue raises FailedPrecondition; weights may be prepared and
        committed. Raises MissingCapability; FailedPrecondition while requests run.
        """
        ...

    def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Take released memory again (no tags: all) and serve what was committed last.

        Raises MissingCapability; FailedPrecondition for a tag that was not released.
        """
        ...

    def flush_cache(self) -> None:
        """Forget cached prefixes. Raises FailedPrecondition while requests run."""
        ...


class Engine(CommandedEngine, Protocol):
    """Generates tokens; driven round by round by one thread."""

    @property
    def info(self) -> EngineInfo:
        """Fixed facts."""
        ...

    @property
    def lm_head_hash(self) -> str:
        """sha256 of the serving lm_head bytes, hex, first 16 characters; empty when the engine has
        none.
        """
        ...

    def step(self) -> list[Chunk]:
        """One round: admit, draft, verify, accept.

        Returns news: every round for streaming requests, else the end.
        """
        ...

    @property
    def has_work(self) -> bool:
        """True while a call of `step` would do something."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...
