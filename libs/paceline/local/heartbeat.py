"""Watches whether child processes run, and kills a child that is stopped or falls silent.

A beat is a ping of ZeroMQ on a socket with no other traffic. A thread of libzmq in the child
answers it. So a child that computes, imports or compiles for minutes still answers.

A stopped child (SIGSTOP) is killed after more than the limit, if all checks found it stopped. There
are six checks per limit. Its silence alone does not count: a busy machine may have kept it silent
before a momentary stop.

The parent cuts the connection of a silent child. A child that was only late reconnects and lives;
no data is lost. A silent child that is not stopped gets several more limits, stretched by the
machine's load. Memory that returns from swap can block every thread for seconds.

hung.py watches whether the loop of a service makes progress.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

import psutil
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from paceline.config.shared import RunConfig
from paceline.local.patience import patient
from paceline.local.process_directory import socket_directory
from paceline.local.processes import HEARTBEAT_VARIABLE

LIMIT_S = RunConfig().heartbeat_s
"""Default of run.heartbeat_s: maximum seconds of silence of a child."""
_BEATS = 6  # beats per limit
_LATE = 5  # limits before a silent but unstopped process is killed
_CONNECTED, _CUT = zmq.Event.ACCEPTED, zmq.Event.DISCONNECTED
_CONNECT_S = 10.0
_UNKNOWN = 0  # process of a connection that was cut before its lookup
_Stop = tuple[int, int]  # (process, context switches); the count rises when the process runs
_numbers = itertools.count(1)
_answering: list[zmq.Socket[bytes]] = []


class Process(Protocol):
    """A child with asyncio's process interface."""

    @property
    def pid(self) -> int:
        """Process id."""
        ...

    async def wait(self) -> int:
        """Waits for the end and returns the returncode."""
        ...

    def kill(self) -> None:
        """SIGKILL."""
        ...


class Heartbeat:
    """The parent's side for one child; start the child with `environment`, then await
    `outlived`.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        """`limit_s`: maximum seconds of a stop, or of silence after the first answer; 0: no limit.

        The child is killed two beats after the limit.
        """
        self._limit_s = limit_s
        self._watching: asyncio.Task[None] | None = None
        self._known: set[int] = set()  # processes that have answered
        self.environment = {HEARTBEAT_VARIABLE: ""}
        self.verdict = ""
        """Reason of the kill, as a continuation of the exit description; "" without a kill."""
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
        """Waits for the end and returns the exit status. Kills a stopped or silent process.

        After a kill it waits at most one limit, because the process that reports the end may be
        stopped too.
        """
        if not self._limit_s:
            return await process.wait()
        ending = asyncio.ensure_future(process.wait())
        silent = self._watching = asyncio.create_task(self._watch(process.pid))
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
        """Ends the watch: the child was ordered to end, so its silence is normal."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self, pid: int) -> None:
        """Returns when the child is to be killed."""
        watches = [asyncio.create_task(one) for one in (self._silent(), self._stopped(pid))]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        finally:
            for one in watches:
                one.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _stopped(self, pid: int) -> None:
        """Returns when the child has been stopped without a break for longer than the limit."""
        beats, since = 0, frozenset[_Stop]()  # no clock: a pause of this process counts once
        while beats <= _BEATS:
            await asyncio.sleep(self._limit_s / _BEATS)
            seen = _stops(self._known | {pid})
            beats, since = (beats + 1, since & seen) if since & seen else (0, seen)

    async def _silent(self) -> None:
        """Returns when a connected process is silent for several limits or has ended.

        A caller that awaits the end of the process is notified of the end first.
        """
        connections: dict[int, int] = {}  # process by file descriptor of its connection
        late_s = 0.0
        while True:
            away = self._known.difference(connections.values())
            grace_s = self._limit_s / _BEATS
            try:
                async with asyncio.timeout(patient(grace_s) if away else None):
                    event = await recv_monitor_message(self._monitor)
            except TimeoutError:
                if await self._monitor.poll(0):
                    continue  # this process itself was stopped
                late_s += 0.0 if _stops(away) else grace_s
                if late_s >= _LATE * self._limit_s or not all(map(_exists, away)):
                    return
                continue
            if event["event"] == _CONNECTED:
                connections[event["value"]] = process = _peer(event["value"])
                self._known = (self._known - {_UNKNOWN}) | {process}
                late_s = 0.0
            else:
                connections.pop(event["value"], None)

    def close(self) -> None:
        """Closes the socket; `outlived` does so itself. Idempotent."""
        if self._limit_s and not self._context.closed:
            self._socket.disable_monitor()
            self._context.destroy(linger=0)
            self._path.unlink(missing_ok=True)


def _peer(file: int) -> int:
    """Process id of the peer of a libzmq unix socket."""
    with suppress(OSError), socket.socket(fileno=os.dup(file)) as connection:
        size = struct.calcsize("3i")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int(struct.unpack("3i", credentials)[0])
    return _UNKNOWN


def _exists(process: int) -> bool:
    """Whether a process exists; True if unknown."""
    return process == _UNKNOWN or psutil.pid_exists(process)


def _stops(processes: Iterable[int]) -> frozenset[_Stop]:
    """(process, context switches) of each process that is stopped now."""
    found = set()
    for one in processes:
        with suppress(psutil.Error):
            if (process := psutil.Process(one)).status() == psutil.STATUS_STOPPED:
                found.add((one, process.num_ctx_switches().voluntary))
    return frozenset(found)


def answer_beats() -> None:
    """Answers the parent's beats until this process ends; does nothing without a watching parent.

    Several processes of one child may call this; each caller must then keep answering.

    It starts threads, so a process that forks must call it in its forks.
    """
    if address := os.environ.get(HEARTBEAT_VARIABLE):
        socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        monitor = socket.get_monitor_socket(zmq.Event.CONNECTED)
        socket.connect(address)
        monitor.poll(int(_CONNECT_S * 1000))  # watched from now on
        socket.disable_monitor()
        monitor.close()
        _answering.append(socket)  # never closed: it answers during interpreter shutdown
