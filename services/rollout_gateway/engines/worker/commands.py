"""Carries out the commands of the worker protocol on an engine, whatever process it lives in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import assert_never

from paceline.errors import InvalidInput, PacelineError
from paceline.messages import versions_from_proto
from paceline.v1 import engine_pb2 as pb
from rollout_gateway.engines.base import CommandedEngine
from rollout_gateway.engines.nouns import Chunk, Finish
from rollout_gateway.engines.worker import wire

Emit = Callable[[Sequence[Chunk]], object]
"""Takes chunks that leave with the next TokensEmitted."""


def carry_out(
    engine: CommandedEngine, command: pb.WorkerCommand, emit: Emit
) -> pb.WorkerEvent | None:
    """Does what a command says; returns its answer, None for commands that have none.

    Raises what the engine raises. After Shutdown the caller ends its loop.
    """
    match command.WhichOneof("command"):
        case "enqueue":
            for message in command.enqueue.requests:
                emit(_enqueue(engine, message))
            return None
        case "abort":
            emit(engine.abort(frozenset(command.abort.request_ids) or None))
            return None
        case "pause":
            emit(engine.pause(wire.pause_mode(command.pause.mode)))
        case "continue":
            engine.resume()
        case "prepare_weights":
            prepare = command.prepare_weights
            engine.prepare_weights(wire.target(prepare.target), prepare.version, Path(prepare.path))
        case "commit_weights":
            commit = command.commit_weights
            mode = wire.pause_mode(commit.mode)
            emit(engine.commit_weights(versions_from_proto(commit.versions), mode))
        case "abort_weights":
            given_up = command.abort_weights
            engine.abort_weights(wire.target(given_up.target), given_up.version)
        case "set_speculation":
            engine.force_arm(command.set_speculation.forced_arm)
        case "release_memory":
            engine.release_memory(wire.memory_tags(command.release_memory.tags))
        case "resume_memory":
            engine.resume_memory(wire.memory_tags(command.resume_memory.tags))
        case "flush_cache":
            engine.flush_cache()
        case "merge_evidence":
            if versions_from_proto(command.merge_evidence.versions) == engine.versions:
                engine.merge_evidence(wire.evidence_from(command.merge_evidence.evidence))
            return None
        case "get_health":
            return pb.WorkerEvent(health=wire.health_to(engine.load, engine.versions))
        case "shutdown":
            emit(engine.abort(None))
        case None:
            raise InvalidInput("a command without content", seen=command.command_id)
        case unknown:
            assert_never(unknown)
    return pb.WorkerEvent(done=pb.CommandDone())


def _enqueue(engine: CommandedEngine, message: pb.EngineRequest) -> Sequence[Chunk]:
    """Queues a request; returns its last chunk when the engine refuses it."""
    try:
        engine.enqueue(wire.request_from(message))
    except PacelineError as error:
        refused = f"{error.reason}: {error}"
        return [Chunk(message.request_id, (), (), (), finish=Finish.ERROR, error=refused)]
    return ()
