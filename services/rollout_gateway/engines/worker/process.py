"""The worker process, which serves one engine over one socket.

The process receives commands between rounds and sends at most one TokensEmitted per round. It never
waits while the engine has work; otherwise it sleeps on the socket.
"""

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

from paceline.errors import PacelineError
from paceline.local.processes import die_with_parent
from paceline.plugins import import_object
from paceline.services.rollout_gateway.engines import base, find_engine, nouns
from paceline.services.rollout_gateway.engines.worker import WorkerSpec, wire
from paceline.services.rollout_gateway.engines.worker.peer import Peer
from paceline.services.rollout_gateway.engines.worker.ring import RowRing
from paceline.v1 import engine_pb2 as pb

PARENT_CHECK_MS = 1000
FAULTS_UNTIL_BROKEN = 3


class EngineBroken(Exception):
    """The engine failed in several consecutive rounds; the process exits and the gateway starts
    another.
    """


class Worker:
    """The command loop of one engine."""

    def __init__(self, engine: base.Engine, peer: Peer, worker_index: int) -> None:
        self._engine = engine
        self._peer = peer
        self._index = worker_index
        self._parent = os.getppid()
        self._faults = 0
        self._stopping = False

    def run(self) -> None:
        """Serve until Shutdown or the parent's death.

        Raises EngineBroken.
        """
        engine = self._engine
        ready = wire.ready_to(engine.info, self._index, engine.versions, engine.lm_head_hash)
        self._peer.send(pb.WorkerEvent(ready=ready))
        while not self._stopping:
            self._execute_commands()
            if engine.has_work and not self._stopping:
                self._round()
            self._peer.flush()
        engine.close()

    def _execute_commands(self) -> None:
        """Execute all waiting commands. It sleeps until the first command only if the engine has no
        work.
        """
        while not self._stopping:
            wait_ms = 0 if self._engine.has_work or self._peer.chunks else PARENT_CHECK_MS
            if self._peer.poll(wait_ms):
                self._answer(pb.WorkerCommand.FromString(self._peer.receive()))
            else:
                self._stopping = os.getppid() != self._parent
                if wait_ms == 0:
                    return

    def _answer(self, command: pb.WorkerCommand) -> None:
        # Any fault of the engine is returned as the answer to the command.
        self._peer.execute(self._engine, command, caught=Exception)
        self._stopping = self._stopping or command.HasField("shutdown")

    def _round(self) -> None:
        try:
            self._peer.chunks += self._engine.step()
            self._faults = 0
        except Exception as error:
            self._faults += 1
            text = f"{type(error).__name__}: {error}"
            ended = self._engine.abort(None)
            self._peer.chunks += [
                dataclasses.replace(chunk, finish=nouns.Finish.ERROR, error=text) for chunk in ended
            ]
            if self._faults >= FAULTS_UNTIL_BROKEN:
                self._peer.flush()
                raise EngineBroken(text) from error


def begin() -> WorkerSpec:
    """Ties this process to its parent and reads its spec."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        # A signal may reach the whole process group; the gateway decides when workers end.
        signal.signal(number, signal.SIG_IGN)
    return WorkerSpec.read()


def main() -> int:
    """Process entry. Returns 0 after Shutdown, 1 if the engine is broken, 2 for wrong settings."""
    spec = begin()
    if spec.cores:
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, set(spec.cores) & allowed or allowed)
    ring = RowRing.attach(Path(spec.ring_path)) if spec.ring_path else None
    peer = Peer(ring)
    started = time.monotonic()
    try:
        kind = find_engine(spec.kind)
        settings = import_object(kind.settings).model_validate(spec.engine)
        engine: base.Engine = import_object(kind.build)(settings, ring)
        Worker(engine, peer, spec.worker_index).run()
    except PacelineError as error:
        peer.fail(error)
        return 2
    except EngineBroken as error:
        lived = time.monotonic() - started
        print(f"worker {spec.worker_index}: broken after {lived:.1f} s: {error}", file=sys.stderr)
        return 1
    finally:
        peer.close()

    return 0


if __name__ == "__main__":
    raise SystemExit(main())
