"""Imports modules once and forks processes that run them.

Usage: `python -m paceline.local.forkserver MODULE ...`, with a listening unix socket as stdin. Each
connection orders one process. The client sends an order with two files for its output. The server
replies with the process id, and with the exit status at the end. If the client closes the
connection earlier, its process is killed. An empty order gets an immediate reply, as proof that the
imports are complete.

A fork is safe if the parent has one thread and no open GPU. Otherwise the fork executes `python -m
MODULE` instead, which is correct but as slow as a normal start. It also does so for a module that
is not imported here, and for different PYTHON* variables.
"""

import atexit
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn, TypedDict

from setproctitle import setproctitle

from paceline.local import importing, processes

ORDER_BYTES = 1 << 20
OUTPUTS = 2
_READ_BYTES = 1 << 16
_OWN = {signal.SIGINT, signal.SIGTERM}


class ForkOrder(TypedDict):
    """The description of a new process; one line of JSON."""

    module: str  # with the main() to run
    environment: dict[str, str]  # the complete environment
    directory: str  # the working directory


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    order: bytes = b""
    outputs: list[int] = field(default_factory=list)
    pid: int = 0  # 0: not forked yet

    def tell(self, **fact: int) -> None:
        with suppress(OSError):  # the client has disconnected
            self.socket.sendall(json.dumps(fact).encode() + b"\n")


def main() -> NoReturn:
    """Imports, then serves orders. A fork ends with the status of its module's main."""
    processes.die_with_parent()
    processes.keep_files_private()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process stops it
    modules = sys.argv[1:]
    os.environ["SPT_NOENV"] = "1"  # keeps a new title from overwriting the visible environment
    setproctitle(f"python -m {__spec__.name}")  # omits the modules, by which users find the forks
    with importing.uncollected():
        for module in modules:
            with suppress(Exception, SystemExit):  # the fork imports it again, and fails
                importlib.import_module(module)
    parent, imported = os.getpid(), modules if _is_safe_to_fork() else ()
    order, outputs = _Server(socket.socket(fileno=0)).next_fork()
    _become(order, outputs, parent, imported)


class _Server:
    """Serves orders and reports on their processes, in one thread with poll only."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._woken, waking = socket.socketpair()
        for each in (listening, self._woken, waking):
            each.setblocking(False)
        self._waking = waking
        self._connections: dict[int, _Connection] = {}
        self._ending = False
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        self._poll = select.poll()
        self._poll.register(listening, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)

    def next_fork(self) -> tuple[ForkOrder, list[int]]:
        """Serves orders until a fork; returns its order and output files, in each fork only.

        After SIGTERM the server exits once its last process has ended.
        """
        while not self._ending or any(one.pid for one in self._connections.values()):
            heard = [number for number, _ in self._poll.poll()]
            if self._woken.fileno() in heard:
                self._reap()
            for number in heard:
                if number == self._listening.fileno():
                    self._accept()
                elif number not in self._connections:  # the child has just ended
                    continue
                elif (
                    order := self._heard(connection := self._connections[number])
                ) and self._forked(connection):
                    return order, connection.outputs
        raise SystemExit(0)

    def _end(self, *_: object) -> None:
        self._ending = True

    def _accept(self) -> None:
        with suppress(OSError):  # the client has disconnected
            accepted, _ = self._listening.accept()
            accepted.setblocking(False)
            self._connections[accepted.fileno()] = _Connection(accepted)
            self._poll.register(accepted, select.POLLIN)

    def _heard(self, connection: _Connection) -> ForkOrder | None:
        """Reads available bytes. Returns the order once it is complete."""
        try:
            read, outputs, _, _ = socket.recv_fds(connection.socket, _READ_BYTES, OUTPUTS)
        except BlockingIOError:
            return None
        except OSError:
            read, outputs = b"", []
        connection.outputs += outputs
        connection.order += read
        if not read or len(connection.order) > ORDER_BYTES:
            self._drop(connection)
        elif connection.order == b"\n":
            connection.order = b""
            connection.tell(pid=os.getpid())
        elif not connection.pid and connection.order.endswith(b"\n"):
            order: ForkOrder = json.loads(connection.order)
            return order
        return None

    def _forked(self, connection: _Connection) -> bool:
        """Forks. Returns True in the fork."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _OWN)  # until the fork sets its handlers
        with warnings.catch_warnings():
            # Python 3.12 warns about threads of libraries, which no fork uses.
            warnings.simplefilter("ignore", DeprecationWarning)
            connection.pid = os.fork()
        if not connection.pid:
            self._leave(connection)
            return True
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OWN)
        connection.tell(pid=connection.pid)
        self._close_outputs(connection)
        return False

    def _leave(self, own: _Connection) -> None:
        """Closes all files of the server in the fork."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for connection in self._connections.values():
            connection.socket.close()
            if connection is not own:
                self._close_outputs(connection)
        self._listening.detach()  # stdin, which is replaced later
        self._woken.close()
        self._waking.close()

    def _drop(self, connection: _Connection) -> None:
        """Ends a connection. A running process is killed and reaped later."""
        if connection.pid:
            os.kill(connection.pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
        self._poll.unregister(connection.socket)
        if not connection.pid:
            self._forget(connection)

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            while self._woken.recv(_READ_BYTES):
                pass
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                for connection in list(self._connections.values()):
                    if connection.pid == ended[0]:
                        connection.tell(code=os.waitstatus_to_exitcode(ended[1]))
                        self._forget(connection)

    def _forget(self, connection: _Connection) -> None:
        with suppress(KeyError):
            self._poll.unregister(connection.socket)
        del self._connections[connection.socket.fileno()]
        self._close_outputs(connection)
        connection.socket.close()

    @staticmethod
    def _close_outputs(connection: _Connection) -> None:
        for output in connection.outputs:
            os.close(output)
        connection.outputs.clear()


def _become(
    order: ForkOrder, outputs: Sequence[int], parent: int, imported: Sequence[str]
) -> NoReturn:
    """Runs the module in this fork and exits with its main's status.

    `imported`: modules that this fork can run without a new start.
    """
    module, environment = order["module"], order["environment"]
    changed = _python_variables(environment) != _python_variables(os.environ)
    os.environ.clear()
    os.environ.update({**environment, processes.PARENT_VARIABLE: str(parent)})
    processes.die_with_parent()
    if os.getppid() != parent:  # the parent died before prctl
        os._exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OWN)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for output, number in zip(outputs, (1, 2), strict=True):
        os.dup2(output, number)
        os.close(output)
    os.chdir(order["directory"])
    if changed or module not in imported:
        os.execv(sys.executable, [sys.executable, "-m", module])  # noqa: S606 - no shell is meant
    sys.argv = [module]
    setproctitle(f"python -m {module}")
    status: int | None = importlib.import_module(module).main()
    _leave_at_once(status or 0)  # as sys.exit does


def _leave_at_once(status: int) -> NoReturn:
    """Exits like Python, but frees no memory. Freeing writes to every shared page, which takes half
    a second with torch and transformers.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads, ends pools
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _python_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("PYTHON")}


def _is_safe_to_fork() -> bool:
    """Whether this process has one thread and no open GPU; False if that cannot be determined."""
    try:
        threads = os.listdir("/proc/self/task")
        with os.scandir("/proc/self/fd") as opened:  # the scan itself opens a file
            files = [os.readlink(each.path) for each in opened]
    except OSError:
        return False
    return len(threads) == 1 and not any(name.startswith("/dev/nvidia") for name in files)


if __name__ == "__main__":
    main()
