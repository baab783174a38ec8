"""Watches whether child processes run: each answers beats, and one that falls silent is killed.

A beat is a ping of ZeroMQ on a socket that carries nothing else. It is answered by a thread of
libzmq's in the child, which needs neither Python's lock nor the child's loop: a process that
computes, imports or compiles for minutes answers, a stopped one does not. Whether the loop of a
service gets on is hung.py's.

A silent child's connection is cut. One that was only late connects again within the grace, which
is as long as the machine is busy, and lives; nothing is lost by it. One that is neither stopped nor
gone, as its machine has it, gets several limits more: memory that is read back from a disk can keep
every thread of a process for seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import struct
from contextlib import suppress
from typing import Protocol

import psutil
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from paceline.config.shared import RunConfig
from paceline.local.patience import patient
from paceline.local.process_directory import socket_directory
from paceline.local.processes import HEARTBEAT_VARIABLE, stopped

LIMIT_S = RunConfig().heartbeat_s
"""Seconds of silence that a child may keep, unless set."""
_BEATS = 6  # in the limit
_LATE = 5  # limits that one has which is seen to run, or at least not to be stopped
_CONNECTED, _CUT = zmq.Event.ACCEPTED, zmq.Event.DISCONNECTED
_CONNECT_S = 10.0
_UNKNOWN = 0  # process of a connection that was cut before it was looked at
_numbers = itertools.count(1)
_answering: list[zmq.Socket[bytes]] = []


class Process(Protocol):
    """A child, as asyncio has it."""

    async def wait(self) -> int:
        """The returncode, once it has ended."""
        ...

    def kill(self) -> None:
        """SIGKILL."""
        ...


class Heartbeat:
    """The parent's end, of one child; use `environment` for its start and await `outlived`."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        """`limit_s`: seconds of silence after which, give or take a beat, a child is killed that
        has once answered; 0: never.
        """
        self._limit_s = limit_s
        self._watching: asyncio.Task[None] | None = None
        self.environment = {HEARTBEAT_VARIABLE: ""}
        self.verdict = ""
        """Why the child was killed, as a continuation of how it ended; "" when it was not."""
        if not limit_s:
            return
        beat_ms = max(round(limit_s / _BEATS * 1000), 1)
        self._path = socket_directory() / f"beats-{next(_numbers)}"
        self.environment = {HEARTBEAT_VARIABLE: f"ipc://{self._path}"}
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, beat_ms * (_BEATS - 1))
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, beat_ms)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, beat_ms * (_BEATS - 1))
        self._monitor = self._socket.get_monitor_socket(_CONNECTED | _CUT)
        self._socket.bind(self.environment[HEARTBEAT_VARIABLE])

    async def outlived(self, process: Process) -> int:
        """How the process ended. One that falls silent is killed, and its end waited for as long
        again: who would tell of it may be stopped too.
        """
        if not self._limit_s:
            return await process.wait()
        ending = asyncio.ensure_future(process.wait())
        silent = self._watching = asyncio.create_task(self._silent())
        try:
            await asyncio.wait({ending, silent}, return_when=asyncio.FIRST_COMPLETED)
            if silent.cancelled() or ending.done():
                return await ending
            silent.result()
            self.verdict = f", silent for {self._limit_s:g} s"
            process.kill()
            await asyncio.wait({ending}, timeout=self._limit_s)
            return ending.result() if ending.done() else -signal.SIGKILL
        finally:
            for task in (ending, silent):
                task.cancel()
            await asyncio.gather(ending, silent, return_exceptions=True)
            self.close()

    def expect_end(self) -> None:
        """The child has been told to end: from now on its silence means nothing."""
        if self._watching is not None:
            self._watching.cancel()

    async def _silent(self) -> None:
        """Returns when a process that has connected is away for longer than the grace, as one is
        that has ended: who awaits its end hears of that first.
        """
        connections: dict[int, int] = {}  # process of each, by its file
        known: set[int] = set()
        late_s = 0.0
        while True:
            away = known.difference(connections.values())
            grace_s = self._limit_s / _BEATS
            try:
                async with asyncio.timeout(patient(grace_s) if away else None):
                    event = await recv_monitor_message(self._monitor)
            except TimeoutError:
                late_s += grace_s
                if await self._monitor.poll(0):
                    continue  # it is this process that stood
                if late_s >= _LATE * self._limit_s or not all(map(_may_answer, away)):
                    return
                continue
            if event["event"] == _CONNECTED:
                connections[event["value"]] = process = _peer(event["value"])
                known = (known - {_UNKNOWN}) | {process}
                late_s = 0.0
            else:
                connections.pop(event["value"], None)

    def close(self) -> None:
        """Frees the socket; `outlived` does so itself. Idempotent."""
        if self._limit_s and not self._context.closed:
            self._socket.disable_monitor()
            self._context.destroy(linger=0)
            self._path.unlink(missing_ok=True)


def _peer(file: int) -> int:
    """The process at the other end of a unix socket of libzmq's."""
    with suppress(OSError), socket.socket(fileno=os.dup(file)) as connection:
        size = struct.calcsize("3i")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int(struct.unpack("3i", credentials)[0])
    return _UNKNOWN


def _may_answer(process: int) -> bool:
    """Whether it is there and nobody has stopped it, as far as is known."""
    return process == _UNKNOWN or (psutil.pid_exists(process) and not stopped([process]))


def answer_beats() -> None:
    """Lets the parent see that this process runs, until it ends; nothing without one that looks.
    Several processes of one child may answer: each of them must.

    It starts threads: one that forks calls it in its forks.
    """
    if address := os.environ.get(HEARTBEAT_VARIABLE):
        socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        monitor = socket.get_monitor_socket(zmq.Event.CONNECTED)
        socket.connect(address)
        monitor.poll(int(_CONNECT_S * 1000))  # watched from here on
        socket.disable_monitor()
        monitor.close()
        _answering.append(socket)  # never closed: it answers while the interpreter still ends
