"""From the launcher to the confined interpreter: broker, guard, code, in this order.

A root gateway gives each run a user id that no other process has. Only the run's processes can then
be signalled, no file of root can be written, and the process limit counts the run alone. Any other
gateway has no id to give, and the code keeps the gateway's.

Each failing step ends its process with a line on the report pipe; the code never runs without a
layer.
"""

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from . import linux, mounts
from .request import CODE_FILE, MEMORY_EXIT, RunRequest


def own_id() -> int | None:
    """A user id for this run alone, from this process's number; None if none is available."""
    if os.geteuid() != 0:
        return None
    with open("/proc/self/uid_map") as table:
        ranges = [tuple(map(int, line.split())) for line in table]
    start, _, count = max(ranges, key=lambda one: one[2])
    # The upper half of the map. In a container with a small map, parallel runs seldom share an id.
    return start + count // 2 + os.getpid() % (count // 2 - 1) if count > 4096 else None


def become(user: int | None, *, read_everything: bool) -> None:
    """Takes that user and group, without other groups, and drops every capability and every way to
    gain one.

    `read_everything` keeps one capability: reading files of any owner. Landlock still selects the
    files. Raises OSError.
    """
    kept = 1 << linux.CAP_DAC_READ_SEARCH if read_everything and user is not None else 0
    linux.shrink_bounding_set(kept)
    linux.prctl(linux.PR_CAP_AMBIENT, linux.PR_CAP_AMBIENT_CLEAR_ALL)
    if user is not None:
        linux.prctl(linux.PR_SET_KEEPCAPS, 1)
        # a user namespace made without root forbids it; groups then map to none
        with contextlib.suppress(PermissionError):
            os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)

    linux.set_capabilities(kept)
    if kept:
        linux.prctl(linux.PR_CAP_AMBIENT, linux.PR_CAP_AMBIENT_RAISE, linux.CAP_DAC_READ_SEARCH)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)


def tasks_of(user: int) -> int:
    """Number of threads under a user id now; the process limit counts them."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                if os.stat(f"/proc/{name}").st_uid == user:
                    total += len(os.listdir(f"/proc/{name}/task"))
    return total


# No file of the gateway is readable any more, so the first code is passed as text. The program sees
# itself as `__main__` with its own traceback. exit() works although `site` did not run, since
# `site` would search for packages.
_FIRST = f"""
def first():
    import os, site, sys, types
    site.setquit()
    sys.argv[:] = [{CODE_FILE!r}]
    sys.path.insert(0, os.getcwd())
    module = types.ModuleType("__main__")
    module.__file__ = {CODE_FILE!r}
    module.__builtins__ = __builtins__
    sys.modules["__main__"] = module
    code = 0
    try:
        with open({CODE_FILE!r}, encoding="utf-8") as file:
            text = file.read()
        exec(compile(text, {CODE_FILE!r}, "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = {MEMORY_EXIT} if isinstance(error, MemoryError) else 1
    if code == {MEMORY_EXIT}:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    sys.exit(code)

main_before = __import__("sys").modules["__main__"]
first()
"""


def replace_process() -> None:
    """Never returns. Raises OSError when the interpreter cannot be started."""
    here = os.getcwd()
    environment = {
        **dict.fromkeys(("HOME", "TMPDIR"), here),
        "PATH": "",
        "LANG": "C.UTF-8",
        "PYTHONUTF8": "1",
        "PYTHONHASHSEED": "0",  # sets have the same order in every run, so scores are reproducible
    }
    executable = os.path.realpath(sys.executable)
    os.execve(executable, [executable, "-S", "-s", "-P", "-B", "-c", _FIRST], environment)  # noqa: S606


OPEN_FILES = 64
_COUNTED_BY_NAMESPACE = (5, 14)  # since this Linux a user namespace counts its own processes only


class Confinement:
    """The isolation layers of one program.

    Built in the launcher before the first fork, so that a broken setting appears there.
    """

    def __init__(self, request: RunRequest, streams: tuple[int, int, int], report: int) -> None:
        """`streams`: descriptors of the code's stdin, stdout and stderr. `report`: of the pipe for
        JSON lines: {"started": true}, then {"exit_code", "cpu_s"}, or {"failed": text}.

        Raises OSError.
        """
        self._request = request
        self._streams, self._report = streams, report
        self._own_id = own_id()
        self._python = mounts.find()
        self._spaces = "namespaces" in request.layers
        self._others = self._others_counted()

    def start(self) -> int:
        """Forks. Returns the process id of the child that ends last. Raises OSError."""
        if not self._spaces:
            return _forked(self._guard, self._report)
        asking, asked = os.pipe()
        answered, answer = os.pipe()
        child = _forked(lambda: self._broker(asked, answered), self._report)
        os.close(asked)
        os.close(answered)
        if os.read(asking, 1):  # nothing: it failed and has reported the reason
            with _layer("namespaces"):
                self._map_ids(child)
            os.write(answer, b"m")
        os.close(asking)
        os.close(answer)
        return child

    def sweep(self) -> None:
        """Kills every process of the run's own user id at once; no effect without such an id."""
        if self._own_id is None:
            return
        user = self._own_id
        child = os.fork()
        if child == 0:
            try:
                os.setresuid(user, user, user)
                os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
        os.waitpid(child, 0)

    def _map_ids(self, child: int) -> None:
        folder, user = Path(f"/proc/{child}"), self._own_id
        if user is None:
            (folder / "setgroups").write_text("deny")
        for name, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
            # 0 is a root launcher, 1 is the code
            ids = f"1 {own} 1\n" if user is None else f"0 0 1\n1 {user} 1\n"
            (folder / name).write_text(ids)

    def _broker(self, asked: int, answered: int) -> None:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        with _layer("namespaces"):
            linux.unshare(linux.ALL_NAMESPACES)
        os.write(asked, b"u")
        if not os.read(answered, 1):
            raise OSError("the ids of a user namespace could not be mapped")
        os.waitpid(_forked(self._guard, self._report), 0)

    def _guard(self) -> None:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        linux.prctl(linux.PR_SET_DUMPABLE, 0)  # no process of the same user may attach to it
        box, request = self._request.box, self._request
        if self._spaces:
            characters = len(request.code) + sum(map(len, request.files.values()))
            with _layer("namespaces"):
                mounts.build(box, self._python, request.file_bytes, 4 * characters)
            box = mounts.BOX

        self._fill(box)
        os.setsid()
        child = _forked(lambda: self._code(box), self._report)
        for stream in self._streams:
            os.close(stream)
        while True:  # in a pid namespace it also inherits the code's orphans
            pid, status, used = os.wait4(-1, 0)
            if pid == child:
                break

        exit_code, cpu_s = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        _report(self._report, {"exit_code": exit_code, "cpu_s": cpu_s})

    def _fill(self, box: str) -> None:
        for name, text in {**self._request.files, CODE_FILE: self._request.code}.items():
            path = Path(box, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            # a model's text may be invalid text
            path.write_text(text, encoding="utf-8", errors="replace", newline="")
        if (user := self._inner_id()) is not None:
            for made in (Path(box), *Path(box).rglob("*")):
                os.chown(made, user, user)

    def _inner_id(self) -> int | None:
        return 1 if self._spaces and self._own_id is not None else self._own_id

    def _code(self, box: str) -> None:
        for number, stream in enumerate(self._streams):
            os.dup2(stream, number, inheritable=True)
        os.chdir(box)
        os.umask(0o077)
        for caught in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(caught, signal.SIG_DFL)
        self._set_limits()
        hidden = not self._spaces and (self._python.private() or not mounts.enterable(box))
        become(self._inner_id(), read_everything=hidden)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of ids clears it
        # most of a huge page can be returned without the kernel's reclaiming it
        linux.prctl(linux.PR_SET_THP_DISABLE, 1)
        scoped = False
        if "landlock" in self._request.layers:
            with _layer("landlock"):
                scoped = linux.restrict_files(self._rules(box))
        if "seccomp" in self._request.layers:
            with _layer("seccomp"):
                about = {"alone": self._spaces, "scoped": scoped}
                program = linux.filter_program(os.uname().machine, **about, pid=os.getpid())
                linux.install_filter(program)
        _report(self._report, {"started": True})
        replace_process()

    def _rules(self, box: str) -> list[tuple[str, int]]:
        rules = [(path, linux.EXECUTE) for path in self._python.executables]
        rules += [(path, linux.READ) for path in self._python.readable]
        rules += [(path, linux.READ_WRITE) for path in mounts.DEVICES]
        return [*rules, (box, linux.EVERYTHING)]

    def _others_counted(self) -> int:
        """Other processes that count for the limit of the code's user."""
        if self._own_id is not None:
            return 0
        ours = 1 + self._spaces  # guard and broker
        release = tuple(int(part) for part in os.uname().release.split(".")[:2])
        if self._spaces and release >= _COUNTED_BY_NAMESPACE:
            return ours
        return tasks_of(os.geteuid()) + ours

    def _set_limits(self) -> None:
        request = self._request
        for kind, limit, more in (
            (resource.RLIMIT_CORE, 0, 0),
            (resource.RLIMIT_MSGQUEUE, 0, 0),
            (resource.RLIMIT_MEMLOCK, 0, 0),
            (resource.RLIMIT_NOFILE, OPEN_FILES, 0),
            (resource.RLIMIT_FSIZE, request.file_bytes, 0),
            (resource.RLIMIT_NPROC, request.processes + self._others, 0),
            (resource.RLIMIT_CPU, request.cpu_s, 1),  # SIGXCPU first, SIGKILL a second later
            (resource.RLIMIT_AS, request.memory_bytes, 0),
        ):
            resource.setrlimit(kind, (limit, limit + more))


@contextlib.contextmanager
def _layer(name: str) -> Iterator[None]:
    """Names the layer of a failure inside the block."""
    try:
        yield
    except OSError as error:
        raise OSError(f"no {name} here: {error}") from error


def _report(report: int, line: Mapping[str, object]) -> None:
    os.write(report, json.dumps(line).encode() + b"\n")


def _forked(body: Callable[[], None], report: int) -> int:
    """Runs `body` in a child, which then ends and reports a failure; returns the child's process
    id.
    """
    child = os.fork()
    if child:
        return child
    try:
        body()
    except BaseException as error:  # noqa: BLE001  (a child that went on would be a second launcher)
        _report(report, {"failed": f"{type(error).__name__}: {error}"})
        os._exit(1)
    os._exit(0)
