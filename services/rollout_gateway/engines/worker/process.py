"""Serves one engine over one socket: `python -m rollout_gateway.engines.worker.process`.

Commands are taken between rounds; while the engine has work nothing waits, otherwise the process
sleeps on the socket. At most one TokensEmitted leaves per round.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import zmq

from paceline.errors import PacelineError
from paceline.plugins import import_object
from paceline.v1 import engine_pb2 as pb
from rollout_gateway.engines import find_engine
from rollout_gateway.engines.base import Engine, RowSink
from rollout_gateway.engines.nouns import Chunk, Finish
from rollout_gateway.engines.worker import wire
from rollout_gateway.engines.worker.commands import carry_out
from rollout_gateway.engines.worker.ring import RowRing
from rollout_gateway.engines.worker.spec import SOCKET_VARIABLE, SPEC_VARIABLE, WorkerSpec

PARENT_CHECK_MS = 1000
SEND_DEADLINE_MS = 30_000
FAULTS_UNTIL_BROKEN = 3
_PR_SET_PDEATHSIG = 1


class EngineBroken(Exception):
    """The engine fails round after round; the process ends and the gateway starts another."""


def build_engine(spec: WorkerSpec, sink: RowSink | None) -> Engine:
    """The engine a spec names. Raises ConfigError for an unknown kind."""
    kind = find_engine(spec.kind)
    settings = import_object(kind.settings).model_validate(spec.engine)
    engine: Engine = import_object(kind.build)(settings, sink)
    return engine


class Worker:
    """One engine served over one socket."""

    def __init__(
        self, engine: Engine, socket: zmq.Socket[bytes], ring: RowRing | None, worker_index: int
    ) -> None:
        self._engine = engine
        self._socket = socket
        self._ring = ring
        self._index = worker_index
        self._parent = os.getppid()
        self._chunks: list[Chunk] = []
        self._rows_told = ring.rows_written if ring else 0
        self._faults = 0
        self._stopping = False

    def run(self) -> None:
        """Serve until Shutdown or the parent's death. Raises EngineBroken."""
        self._send(pb.WorkerEvent(ready=self._ready()))
        while not self._stopping:
            self._take_commands()
            if self._engine.has_work and not self._stopping:
                self._round()
            self._emit()
        self._engine.close()

    def _ready(self) -> pb.WorkerReady:
        engine = self._engine
        return wire.ready_to(
            engine.info, self._index, os.getpid(), engine.versions, engine.lm_head_hash
        )

    def _take_commands(self) -> None:
        """All waiting commands; sleeps for the first one only when the engine has nothing to do."""
        while not self._stopping:
            wait_ms = 0 if self._engine.has_work or self._chunks else PARENT_CHECK_MS
            if not self._socket.poll(wait_ms):
                if os.getppid() != self._parent:
                    self._stopping = True
                if wait_ms == 0 or self._stopping:
                    return
                continue
            self._answer(pb.WorkerCommand.FromString(self._socket.recv()))

    def _answer(self, command: pb.WorkerCommand) -> None:
        try:
            event = carry_out(self._engine, command, self._chunks.extend)
        except PacelineError as error:
            event = pb.WorkerEvent(failed=wire.failed_to(error))
        except Exception as error:  # noqa: BLE001 - a fault of the engine, whatever it is, answers the command
            message = f"{type(error).__name__}: {error}"
            event = pb.WorkerEvent(
                failed=pb.CommandFailed(reason="INTERNAL", message=message, family="INTERNAL")
            )
        self._stopping = self._stopping or command.HasField("shutdown")
        if event is not None and command.command_id:
            event.command_id = command.command_id
            if self._ring is not None and event.HasField("health"):
                event.health.rows_dropped = self._ring.rows_dropped
            self._send(event)

    def _round(self) -> None:
        try:
            self._chunks += self._engine.step()
            self._faults = 0
        except Exception as error:
            self._faults += 1
            text = f"{type(error).__name__}: {error}"
            ended = self._engine.abort(None)
            self._chunks += [
                dataclasses.replace(chunk, finish=Finish.ERROR, error=text) for chunk in ended
            ]
            if self._faults >= FAULTS_UNTIL_BROKEN:
                self._emit()
                raise EngineBroken(text) from error

    def _emit(self) -> None:
        """One message with all news; rows alone are told of when an eighth of the ring waits."""
        ring = self._ring
        unread = ring.rows_written - self._rows_told if ring else 0
        if not self._chunks and (ring is None or unread < max(ring.capacity // 8, 1)):
            return
        tokens = pb.TokensEmitted(chunks=[wire.chunk_to(chunk) for chunk in self._chunks])
        if ring is not None:
            self._rows_told = tokens.rows_written = ring.rows_written
            tokens.rows_dropped = ring.rows_dropped
        self._chunks.clear()
        self._send(pb.WorkerEvent(tokens=tokens))

    def _send(self, event: pb.WorkerEvent) -> None:
        self._socket.send(event.SerializeToString())


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when its parent ends (Linux); elsewhere the loop's check of the
    parent id serves.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        raise SystemExit(1)


def limit_threads(spec: WorkerSpec) -> None:
    """Set thread counts before any numeric library is imported, and pin cores where asked."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = str(spec.threads)
    if spec.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(
            0, set(spec.cores) & os.sched_getaffinity(0) or os.sched_getaffinity(0)
        )


def main() -> int:
    """Process entry; 0 after Shutdown, 1 when the engine is broken, 2 for wrong settings."""
    die_with_parent(int(os.environ.get("PACELINE_WORKER_PARENT", "0")))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number, signal.SIG_IGN
        )  # both may reach the whole group; the gateway decides when workers end
    spec = WorkerSpec.read(Path(os.environ.get(SPEC_VARIABLE) or sys.argv[1]))
    limit_threads(spec)
    context = zmq.Context(io_threads=1)
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDTIMEO, SEND_DEADLINE_MS)
    socket.setsockopt(zmq.SNDHWM, 10_000)
    socket.setsockopt(zmq.LINGER, 2000)
    socket.connect(os.environ[SOCKET_VARIABLE])
    ring = RowRing.attach(Path(spec.ring_path)) if spec.ring_path else None
    started = time.monotonic()
    try:
        Worker(build_engine(spec, ring), socket, ring, spec.worker_index).run()
    except PacelineError as error:
        socket.send(pb.WorkerEvent(failed=wire.failed_to(error)).SerializeToString())
        return 2
    except EngineBroken as error:
        lived = time.monotonic() - started
        print(f"worker {spec.worker_index}: broken after {lived:.1f} s: {error}", file=sys.stderr)
        return 1
    finally:
        socket.close()
        context.term()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
