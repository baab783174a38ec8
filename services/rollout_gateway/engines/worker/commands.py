"""Executes the commands of the worker protocol on an engine in any process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import InternalError, InvalidInput, PacelineError
from paceline.messages import from_message, versions_from_proto
from paceline.services.rollout_gateway.engines.base import CommandedEngine
from paceline.services.rollout_gateway.engines.nouns import Chunk, Finish, MemoryTag, Withheld
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.v1 import engine_pb2 as pb

Emit = Callable[[Sequence[Chunk]], object]
"""Receives chunks for the next TokensEmitted."""


def answer(
    engine: CommandedEngine,
    command: pb.WorkerCommand,
    emit: Emit,
    caught: type[Exception] = PacelineError,
) -> pb.WorkerEvent | None:
    """Executes a command; returns its answer, or a failure event if it failed.

    Returns None for commands without an answer or a number. After Shutdown, the caller ends its
    loop.
    """
    try:
        event = _carry_out(engine, command, emit)
    except caught as error:
        if not isinstance(error, PacelineError):
            error = InternalError(f"{type(error).__name__}: {error}")
        event = pb.WorkerEvent(failed=wire.failed_to(error))
    if event is None or not command.command_id:
        return None
    event.command_id = command.command_id
    return event


def _carry_out(
    engine: CommandedEngine, command: pb.WorkerCommand, emit: Emit
) -> pb.WorkerEvent | None:
    match command.WhichOneof("command"):
        case "enqueue":
            for message in command.enqueue.requests:
                emit(_enqueue(engine, message))
        case "abort":
            emit(engine.abort(frozenset(command.abort.request_ids) or None))
        case "get_health":
            return pb.WorkerEvent(health=wire.health_to(engine.load, engine.versions))
        case "release_memory":
            freed = engine.release_memory(_tags(command.release_memory.tags))
            return pb.WorkerEvent(done=pb.CommandDone(released_bytes=freed))
        case None:
            raise InvalidInput("a command without content", seen=command.command_id)
        case _:
            emit(_change(engine, command))
            return pb.WorkerEvent(done=pb.CommandDone())
    return None


def _change(engine: CommandedEngine, command: pb.WorkerCommand) -> Sequence[Chunk]:
    """Executes a command that is answered once it is done; returns the chunks of requests that it
    ended.
    """
    match command.WhichOneof("command"):
        case "pause":
            return engine.pause(wire.noun_of(wire.PAUSE_MODES, command.pause.mode))
        case "continue":
            engine.resume()
        case "prepare_weights":
            prepare = command.prepare_weights
            target = wire.noun_of(wire.TARGETS, prepare.target)
            path = Path(prepare.path)
            engine.prepare_weights(target, prepare.version, path, prepare.profile)
        case "commit_weights":
            commit = command.commit_weights
            mode = wire.noun_of(wire.PAUSE_MODES, commit.mode)
            return engine.commit_weights(versions_from_proto(commit.versions), mode)
        case "abort_weights":
            given_up = command.abort_weights
            engine.abort_weights(wire.noun_of(wire.TARGETS, given_up.target), given_up.version)
        case "set_speculation":
            engine.force_arm(command.set_speculation.forced_arm)
        case "quarantine":
            engine.quarantine(from_message(Withheld, command.quarantine))
        case "resume_memory":
            engine.resume_memory(_tags(command.resume_memory.tags))
        case "flush_cache":
            engine.flush_cache()
        case "shutdown":
            return engine.abort(None)
        case unknown:
            raise InvalidInput("an engine does not know this command", seen=unknown)
    return ()


def _tags(values: Sequence[pb.MemoryTag]) -> list[MemoryTag]:
    return [wire.noun_of(wire.MEMORY_TAGS, value) for value in values]


def _enqueue(engine: CommandedEngine, message: pb.EngineRequest) -> Sequence[Chunk]:
    """Queues a request; returns its last chunk if the engine refuses it."""
    try:
        engine.enqueue(wire.request_from(message))
    except PacelineError as error:
        # The gateway handles errors by their class, and an error's own reason may be narrower.
        refused = f"{type(error).reason}: {error}"
        return [Chunk(message.request_id, (), (), (), finish=Finish.ERROR, error=refused)]
    return ()
