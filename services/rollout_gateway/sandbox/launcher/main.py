"""The launcher's own loop: output, wall clock, memory and end. The layers are built in confine.py.

Counts the resources of a run's processes, and kills every process that the code has started. The
launcher is a subreaper: a process without living parents becomes its child and cannot escape.

RLIMIT_AS bounds one process. The system-call filter refuses memory outside of any process's size:
files in memory, segments, mostly unmapped shared mappings, pages left in pipes.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable

from . import linux
from .confine import Confinement
from .request import MEMORY_EXIT, RunRequest, SandboxResult, encode, remove_tree

_PIECE = 1 << 16
# for output of processes that could not be killed; only reached without any isolation
_DRAIN_S = 1.0


def kill_all(group: int, sweep: Callable[[], None]) -> None:
    """Kills and reaps every descendant. `group` is a process group to kill first; `sweep` kills
    further processes.

    A group dies at once, and so do the processes of `sweep`. A process outside its group, possible
    only without a system-call filter, is found by descent, repeatedly until none is left.
    """
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid:  # a finished child
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        sweep()
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def children(pid: int) -> list[int]:
    """Process ids of a process's children; none when it has ended."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def descendants(pid: int) -> list[int]:
    """Process ids of all that come from a process."""
    found, new = [], [pid]
    while new:
        new = [child for parent in new for child in children(parent)]
        found += new
    return found


_FILL_BYTES_PER_S = 2 << 30  # bytes that one core can fill in pages of 4 KiB
_SHORTEST_S, _LONGEST_S = 0.002, 0.1
_FREE_BYTES, _FREE_FILES = 1 << 30, 10_000
_PAGE = os.sysconf("SC_PAGE_SIZE")


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except (FileNotFoundError, ProcessLookupError):  # the process has ended
        return 0


def _proportional(pid: int) -> int:
    """Resident bytes with shares of shared pages; all of them if a root without CAP_SYS_PTRACE
    cannot read shares.
    """
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            fields = (line.split() for line in file)
            return next(int(field[1]) << 10 for field in fields if field[0] == "Pss:")
    except PermissionError:
        return _resident(pid)
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _check_disk(box: str) -> None:
    there = os.statvfs(box)
    free = there.f_bavail * there.f_frsize
    if free < _FREE_BYTES or (there.f_files and there.f_favail < _FREE_FILES):
        seen = f"{free} bytes and {there.f_favail} files are free"
        kept = f"{_FREE_BYTES} and {_FREE_FILES} are kept for others"
        raise OSError(f"the disk of {box} is nearly full: {seen}, {kept}")


class _Output:
    """One stream of the code: the first bytes are kept, the rest is read and dropped."""

    def __init__(self, limit: int) -> None:
        self.reader, self.writer = os.pipe()
        self._limit = limit
        self._kept = bytearray()
        self.truncated = False

    def read(self) -> bool:
        """Reads the available bytes; returns False at the end."""
        piece = os.read(self.reader, _PIECE)
        room = self._limit - len(self._kept)
        self._kept += piece[:room]
        self.truncated |= len(piece) > room
        return bool(piece)

    @property
    def text(self) -> str:
        return self._kept.decode("utf-8", "replace")


class _Launcher:
    """One run."""

    def __init__(self, request: RunRequest) -> None:
        self._request = request
        outputs = [_Output(request.output_bytes) for _ in ("stdout", "stderr")]
        self._outputs = {output.reader: output for output in outputs}
        self._report_reader, self._report_writer = os.pipe()
        self._report = b""
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        signal.set_wakeup_fd(self._wake_writer)
        signal.signal(signal.SIGTERM, lambda *_: None)
        self._spaces = "namespaces" in request.layers
        self._child = 0  # the launcher's child; the broker if there are namespaces
        self._began: float | None = None
        self._next_check = 0.0
        self._seconds = 0.0
        self._stopped_by = ""

    def run(self) -> SandboxResult:
        """Starts, watches, kills remaining processes and drains output. Raises OSError before the
        start.
        """
        stdin = _stdin(self._request.stdin.encode("utf-8", "replace"))
        out, err = (output.writer for output in self._outputs.values())
        confinement = Confinement(self._request, (stdin, out, err), self._report_writer)
        self._child = confinement.start()
        try:
            for fd in (stdin, out, err, self._report_writer):
                os.close(fd)
            self._watch()
        finally:
            kill_all(self._child, confinement.sweep)
        self._drain()
        return self._answer()

    def _watch(self) -> None:
        """Returns when the child has ended, its time is over, it exceeds a limit, or a stop is
        requested.
        """
        self._check_memory()
        ended = os.pidfd_open(self._child)
        poll = select.poll()
        for fd in (*self._outputs, self._report_reader, self._wake_reader, ended):
            poll.register(fd, select.POLLIN)
        while not self._stopped_by:
            patience = self._next_check_s()
            if self._stopped_by:
                break
            ready = [fd for fd, _ in poll.poll(None if patience is None else patience * 1000)]
            for fd in ready:
                if fd == self._wake_reader:
                    self._stopped_by = "killed"
                elif fd != ended and not self._read(fd):
                    poll.unregister(fd)
            if ended in ready:
                break

        if self._began is not None:
            self._seconds = time.monotonic() - self._began
        os.close(ended)

    def _next_check_s(self) -> float | None:
        """Seconds until the next check or the end of the run's time, whichever is first; None
        before the code has begun.
        """
        if self._began is None:
            return None
        if time.monotonic() >= self._next_check:
            room = self._check_memory()
            self._stopped_by = "memory" if room < 0 else ""
            fill = _FILL_BYTES_PER_S * min(os.cpu_count() or 1, self._request.processes)
            pause = min(_LONGEST_S, max(_SHORTEST_S, room / fill))  # short near the limit
            self._next_check = time.monotonic() + pause
        now = time.monotonic()
        left = self._began + self._request.wall_s - now
        if left <= 0:
            self._stopped_by = "timeout"
        return max(0.0, min(left, self._next_check - now))  # negative: for ever

    def _check_memory(self) -> int:
        """Bytes of memory that the run may still use; negative if it exceeds its memory.

        Raises OSError when the disk of its directory is nearly full, from any cause.
        """
        if not self._spaces:  # otherwise it is a separate file system of bounded size
            _check_disk(self._request.box)
        room = self._room()
        return room if room >= 0 else self._room()  # a fork between two readings counts twice

    def _room(self) -> int:
        ours = {self._child, *(children(self._child) if self._spaces else ())}  # broker and guard
        pids = [pid for pid in descendants(os.getpid()) if pid not in ours]
        limit, resident = self._request.memory_bytes, sum(_resident(pid) for pid in pids)
        if resident > limit:  # then shared pages count once
            resident = sum(_proportional(pid) for pid in pids)
        return limit - resident

    def _read(self, fd: int) -> bool:
        if fd in self._outputs:
            return self._outputs[fd].read()
        piece = os.read(fd, _PIECE)
        self._report += piece
        if self._began is None and b"started" in self._report:
            self._began = time.monotonic()
        return bool(piece)

    def _drain(self) -> None:
        """Reads the rest of the pipes, which close with the last process."""
        until = time.monotonic() + _DRAIN_S
        open_ = {*self._outputs, self._report_reader}
        while open_:
            ready, _, _ = select.select([*open_], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return
            open_ -= {fd for fd in ready if not self._read(fd)}

    def _answer(self) -> SandboxResult:
        lines: dict[str, object] = {}
        for line in self._report.splitlines():
            lines |= json.loads(line)
        if "failed" in lines or "started" not in lines:
            failed = lines.get("failed", "the sandbox ended before the code began")
            return SandboxResult(failed=str(failed))

        exit_code, cpu_s = lines.get("exit_code", -signal.SIGKILL), lines.get("cpu_s", 0.0)
        if not isinstance(exit_code, int) or not isinstance(cpu_s, float):
            return SandboxResult(failed=f"the sandbox's report is broken: {self._report[:200]!r}")
        out, err = self._outputs.values()
        truncated, reason = out.truncated or err.truncated, self._reason(exit_code, cpu_s)
        return SandboxResult(out.text, err.text, truncated, exit_code, reason, self._seconds)

    def _reason(self, exit_code: int, cpu_s: float) -> str:
        if self._stopped_by:
            return self._stopped_by
        spent = exit_code == -signal.SIGKILL and cpu_s >= self._request.cpu_s
        if spent or exit_code == -signal.SIGXCPU:
            return "cpu"
        if exit_code == MEMORY_EXIT:
            return "memory"
        return "killed" if exit_code < 0 else "exit"


def _stdin(text: bytes) -> int:
    """A read-only file in memory, so that the code cannot enlarge it."""
    whole = os.memfd_create("stdin")
    with open(whole, "wb") as file:
        file.write(text)
        file.flush()
        return os.open(f"/proc/self/fd/{whole}", os.O_RDONLY)


def main() -> None:
    """Reads the request as JSON from stdin, writes the answer as JSON to stdout."""
    os.closerange(3, 1 << 20)  # descriptors that the gateway may have left open
    # so that it can still kill its processes
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGTERM)
    request = RunRequest(**json.loads(sys.stdin.buffer.read()))
    if os.getppid() != request.parent:
        return
    try:
        os.stat("/proc/thread-self/children")  # kill_all needs it
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        answer = _Launcher(request).run()
    except OSError as error:
        answer = SandboxResult(failed=f"{type(error).__name__}: {error}")

    with contextlib.suppress(OSError):  # the gateway, if it still exists, tries again and reports
        remove_tree(request.box)
    with contextlib.suppress(BrokenPipeError):  # the gateway has gone
        sys.stdout.buffer.write(encode(answer))
        sys.stdout.buffer.flush()
