"""Permitted actions and failed attempts of code under each kind of isolation on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.errors import ConfigError
from paceline.local.patience import patient
from paceline.services.rollout_gateway.config import SandboxConfig
from paceline.services.rollout_gateway.sandbox import Sandbox
from paceline.services.rollout_gateway.sandbox.launcher.request import SandboxResult

LIMITS = SandboxConfig(
    wall_s=60,
    cpu_s=4,
    memory_bytes=256 << 20,
    file_bytes=1 << 20,
    output_bytes=4096,
    processes=12,
    parallel=2,
)
WALLS = ("auto", pytest.param("namespaces", marks=pytest.mark.slow), "landlock")
"""On most machines "auto" has namespaces too."""
CAP_SYS_PTRACE = 19
SLACK_BYTES = 128 << 20  # growth of the processes between two checks


@pytest.fixture(scope="module", params=[*WALLS, "limits"])
def any_kind(request: pytest.FixtureRequest) -> Sandbox:
    """Every kind."""
    return available(request.param)


@pytest.fixture(scope="module", params=WALLS)
def walled(request: pytest.FixtureRequest) -> Sandbox:
    """The kinds that keep code from the host."""
    return available(request.param)


def available(kind: str) -> Sandbox:
    made = Sandbox(LIMITS.model_copy(update={"isolation": kind}))
    try:
        asyncio.run(made.layers())
    except ConfigError as error:
        pytest.skip(str(error))
    return made


async def told(sandbox: Sandbox, code: str) -> dict[str, object]:
    """Return each attempt's outcome: `attempt(name, f)` in the code records f's value, or its
    error's type.
    """
    head = """
        import json, os
        outcome = {}
        def attempt(name, f):
            try:
                outcome[name] = repr(f())
            except BaseException as error:
                outcome[name] = type(error).__name__
    """
    tail = "print(json.dumps(outcome))"
    result = await sandbox.run("\n".join([textwrap.dedent(head), textwrap.dedent(code), tail]))
    assert result.reason == "exit", result
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refused(outcome: dict[str, object]) -> bool:
    return all(
        value in ("PermissionError", "FileNotFoundError", "OSError") for value in outcome.values()
    )


@pytest.fixture
def mark() -> Iterator[str]:
    """A word in the command line of every process that the code starts; none with it may remain."""
    word = f"survivor-{uuid.uuid4().hex}"
    yield word
    left = [
        one.pid
        for one in psutil.process_iter(["cmdline"])
        if word in " ".join(one.info["cmdline"] or [])
    ]
    assert left == []


async def test_a_normal_program_runs(any_kind: Sandbox) -> None:
    code = """
        import collections, dataclasses, fractions, hashlib, itertools, json, math, os, random, re, subprocess, sys
        import tempfile, threading, warnings
        import helper
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of forks beside threads

        @dataclasses.dataclass
        class Point:
            x: int

        with tempfile.NamedTemporaryFile("w+") as file:
            file.write("kept"); file.seek(0); kept = file.read()
        os.makedirs("a/b"); os.rename("a/b", "c"); os.symlink("c", "d")
        thread = threading.Thread(target=lambda: found.append(1)); found = []; thread.start(); thread.join()
        child = os.fork()
        if child == 0:
            os._exit(7)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        again = subprocess.run([sys.executable, "-S", "-c", "print(6*7)"], capture_output=True, text=True)
        print(json.dumps([math.factorial(5), re.findall("o+", "foo"), collections.Counter("aab").most_common(1),
            str(Point(3)), kept, found, code, again.stdout, helper.WORD, sys.stdin.read(), sorted(os.listdir(".")),
            hash("a") == int(sys.argv[1]) if sys.argv[1:] else None, __name__]))
        exit(3)
    """
    result = await any_kind.run(
        textwrap.dedent(code), stdin="told\n", files={"helper.py": "WORD = 'ü'"}
    )
    assert result.stderr == ""
    files = ["a", "c", "d", "helper.py", "main.py"]
    expected = [
        120,
        ["oo"],
        [["a", 2]],
        "Point(x=3)",
        "kept",
        [1],
        7,
        "42\n",
        "ü",
        "told\n",
        files,
        None,
        "__main__",
    ]
    assert json.loads(result.stdout) == expected
    assert (result.exit_code, result.reason, result.truncated) == (3, "exit", False)


async def test_an_error_is_shown_as_python_shows_it(any_kind: Sandbox) -> None:
    result = await any_kind.run("def f():\n    return 1 / 0\nf()\n")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        'Traceback (most recent call last):\n  File "main.py", line 3, in <module>\n'
    )
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")
    broken = await any_kind.run("def f(:\n")
    assert broken.exit_code == 1
    assert 'File "main.py", line 1' in broken.stderr
    assert "SyntaxError" in broken.stderr


async def test_the_order_of_a_set_is_the_same_in_every_run(any_kind: Sandbox) -> None:
    code = "print({str(i) for i in range(50)})"
    assert (await any_kind.run(code)).stdout == (await any_kind.run(code)).stdout


@pytest.mark.slow
async def test_computing_without_end_is_stopped_by_its_seconds(any_kind: Sandbox) -> None:
    # A second of CPU time may take minutes on a busy machine.
    quick = Sandbox(any_kind.config.model_copy(update={"cpu_s": 1, "wall_s": 600}))
    stubborn = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    ends = await asyncio.gather(*(quick.run(code) for code in ("while True: pass", stubborn)))
    assert [end.reason for end in ends] == ["cpu", "cpu"]


@pytest.mark.few(1)
async def test_waiting_without_end_is_stopped_by_the_clock(any_kind: Sandbox, mark: str) -> None:
    code = f"""
        import subprocess, sys, time
        print("begun", flush=True)
        for _ in range(3):
            subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(99)", "{mark}"])
        time.sleep(99)
    """
    for wall_s in (0.7, 7.0, 70.0):  # on a busy machine it may be stopped before it has begun
        quick = Sandbox(any_kind.config.model_copy(update={"wall_s": wall_s}))
        await quick.layers()
        result = await quick.run(textwrap.dedent(code))
        assert result.reason == "timeout"
        assert wall_s <= result.wall_s < wall_s + patient(20)
        if result.stdout:
            break
    assert result.stdout == "begun\n"


async def test_ten_gigabytes_are_too_many(any_kind: Sandbox) -> None:
    result = await any_kind.run("kept = bytearray(10 << 30)")
    assert (result.reason, result.stdout) == ("memory", "")
    assert "MemoryError" in result.stderr
    caught = await any_kind.run(
        "try:\n    bytearray(10 << 30)\nexcept MemoryError:\n    print('caught')"
    )
    assert (caught.reason, caught.stdout) == ("exit", "caught\n")


@pytest.mark.few(1)
async def test_memory_is_counted_over_all_processes(any_kind: Sandbox) -> None:
    code = """
        import os, time
        for _ in range(6):
            if os.fork() == 0:
                kept = []
                for _ in range(150):
                    kept.append(b"x" * (1 << 20))
                    os.write(1, b"m")
                time.sleep(99)
        time.sleep(99)
    """
    result = await any_kind.run(textwrap.dedent(code))
    assert result.reason == "memory", result
    assert len(result.stdout) << 20 < LIMITS.memory_bytes + patient(SLACK_BYTES)


def told_what_is_shared() -> bool:
    """Return whether the launcher can look into a process of the code's own user."""
    held = int(re.findall(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())[0], 16)
    return os.geteuid() != 0 or bool(held >> CAP_SYS_PTRACE & 1)


@pytest.mark.slow
async def test_memory_that_processes_share_counts_once(any_kind: Sandbox) -> None:
    if "namespaces" not in await any_kind.layers() and not told_what_is_shared():
        pytest.skip("a root without CAP_SYS_PTRACE is not told what processes share")
    code = """
        import os, time
        kept = b"x" * (120 << 20)
        children = []
        for _ in range(4):
            if (child := os.fork()) == 0:
                found = kept.count(b"x")  # reads every page
                time.sleep(0.3)
                os._exit(found >> 20)
            children.append(child)
        print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
    """
    result = await any_kind.run(textwrap.dedent(code))
    assert (result.reason, result.stdout) == ("exit", "[120, 120, 120, 120]\n")


async def test_no_memory_can_be_held_that_no_process_shows(walled: Sandbox) -> None:
    code = """
        import ctypes, fcntl, mmap, platform, socket
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        def call(f, *arguments):
            done = f(*arguments)
            if done in (-1, 2**64 - 1):
                raise OSError(ctypes.get_errno(), "refused")
            return done
        def mapped(flags, fd=-1):
            return call(libc.mmap, None, ctypes.c_size_t(2 << 20), 3, flags, fd, ctypes.c_long(0))
        reader, writer = os.pipe()
        ours, theirs = socket.socketpair()
        attempt("memfd", lambda: os.memfd_create("held"))
        attempt("secret memfd", lambda: call(libc.syscall, 447, 0))
        attempt("shared mapping", lambda: mmap.mmap(-1, 1 << 20))
        attempt("shared zeroes", lambda: mapped(1, os.open("/dev/zero", os.O_RDWR)))
        attempt("huge pages", lambda: mapped(0x40022))
        attempt("transparent huge pages", lambda: call(libc.prctl, 41, 0, 0, 0, 0))
        attempt("segment", lambda: call(libc.shmget, 0, 1 << 20, 0o1600))
        attempt("named segment", lambda: os.open("/dev/shm/held", os.O_CREAT | os.O_RDWR))
        attempt("pages in a pipe", lambda: call(libc.vmsplice, writer, 0, 0, 0))
        attempt("files in a pipe", lambda: os.splice(os.open("main.py", 0), writer, 4096))
        attempt("wide pipe", lambda: fcntl.fcntl(writer, 1031, 1 << 20))
        attempt("wide socket", lambda: ours.setsockopt(1, socket.SO_SNDBUF, 1 << 20))
        attempt("file on its way", lambda: socket.send_fds(ours, [b"x"], [0]))
        attempt("standard input", lambda: os.write(0, b"x") + os.ftruncate(0, 1 << 20))
        attempt("its size unseen", lambda: call(libc.prctl, 4, 0, 0, 0, 0))
    """
    assert refused(await told(walled, code))


@pytest.mark.few(1)
async def test_a_gigabyte_of_output_is_cut(any_kind: Sandbox) -> None:
    code = """
        import os
        block = b"x" * (1 << 20)
        for _ in range(1 << 10):
            os.write(1, block)
        os.write(2, b"done")
    """
    result = await any_kind.run(textwrap.dedent(code))
    assert result.truncated
    assert result.stdout == "x" * LIMITS.output_bytes
    assert result.reason == "cpu" or result.stderr == "done"


async def test_a_file_does_not_outgrow_its_limit(any_kind: Sandbox) -> None:
    code = """
        def fill():
            with open("big", "wb", buffering=0) as file:
                for _ in range(64):
                    file.write(bytes(1 << 16))
        attempt("fill", fill)
        outcome["size"] = os.path.getsize("big")
    """
    assert await told(any_kind, code) == {"fill": "OSError", "size": LIMITS.file_bytes}


async def test_a_fork_bomb_stays_small_and_dies(any_kind: Sandbox, mark: str) -> None:
    code = f"""
        import os, sys, time
        reader, writer = os.pipe()
        def bomb(depth):
            while True:
                try:
                    if os.fork() == 0:
                        os.write(writer, b"x")
                        os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(99)", "{mark}"])
                except BlockingIOError:
                    return
        bomb(0)
        os.set_blocking(reader, False)
        time.sleep(0.3)
        print(len(os.read(reader, 10_000)))
    """
    result = await any_kind.run(textwrap.dedent(code))
    assert 1 <= int(result.stdout) < LIMITS.processes, result


async def test_a_daemon_does_not_survive_its_program(any_kind: Sandbox, mark: str) -> None:
    code = f"""
        import os, sys
        if os.fork() == 0:
            try:
                os.setsid()
            except PermissionError:
                pass
            if os.fork() == 0:
                import signal
                for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)
                os.close(0); os.close(1); os.close(2)
                os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(99)", "{mark}"])
            os._exit(0)
        os.wait()
        print("daemon begun")
    """
    result = await any_kind.run(textwrap.dedent(code))
    assert (result.reason, result.stdout) == ("exit", "daemon begun\n")
    assert result.wall_s < patient(20)


async def test_the_parent_cannot_be_signalled(any_kind: Sandbox) -> None:
    if any_kind.config.isolation == "limits" and os.geteuid():
        pytest.skip("without isolation and without a user id of its own, nothing forbids it")
    code = f"""
        import signal
        attempt("gateway", lambda: os.kill({os.getpid()}, signal.SIGKILL))
        attempt("guard", lambda: os.kill(os.getppid(), signal.SIGKILL) if os.getppid() > 1 else os.kill(-1, 0))
    """
    outcome = await told(any_kind, code)
    assert set(outcome.values()) <= {"PermissionError", "ProcessLookupError"}


async def test_files_of_the_host_cannot_be_read(walled: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    code = f"""
        paths = ["/etc/passwd", "/etc/shadow", "/etc/hostname", "/proc/self/environ", "/proc/1/environ",
                 {str(secret)!r},
                 "/proc/{os.getpid()}/environ", "/proc/self/root/etc/passwd", {__file__!r}, "/box/../etc/passwd"]
        for path in paths:
            attempt(path, lambda: open(path).read())
        for path in ["/root", "/home", "/proc", "/tmp", "/", "/etc", "/dev/shm", "/sys"]:
            attempt(path, lambda: [name for name in os.listdir(path)])
        os.symlink("/etc/passwd", "link")
        attempt("symbolic link", lambda: open("link").read())
        attempt("hard link", lambda: os.link("/etc/passwd", "hard"))
        os.symlink("/etc", "folder")
        attempt("through a linked folder", lambda: open("folder/passwd").read())
        attempt("relative", lambda: open("../../../../../etc/passwd").read())
        for fd in range(3, 200):
            attempt(f"fd {{fd}}", lambda: os.fstat(fd))
            if outcome[f"fd {{fd}}"] == "OSError":
                del outcome[f"fd {{fd}}"]
    """
    outcome = await told(walled, code)
    # In namespaces these directories exist, and hold Python's own files alone.
    own = {"/": {"box", "dev", "etc", "lib", "lib64", "root", "usr", "opt", "home", "work", "nix"}}
    own |= {
        "/etc": {"ld.so.cache"},
        "/root": {".pyenv", ".local"},
        "/home": {Path.home().name, "runner"},
    }
    if "namespaces" in await walled.layers():
        for path, names in own.items():
            listed = str(outcome.pop(path))
            if listed.startswith("["):
                assert set(json.loads(listed.replace("'", '"'))) <= names
    assert refused(outcome), outcome


def _anybodys_file(folder: Path) -> Path:
    """A file that every user may write, in a directory that every user may write."""
    for above in folder.parents[:2]:
        above.chmod(0o755)
    folder.chmod(0o777)
    there = folder / "there"
    there.write_text("as it was")
    there.chmod(0o666)
    return there


async def test_nothing_outside_its_directory_can_be_written(
    walled: Sandbox, tmp_path: Path
) -> None:
    there = _anybodys_file(tmp_path)
    code = f"""
        import sys
        folder, there = {str(tmp_path)!r}, {str(there)!r}
        def write(path, flags=os.O_WRONLY | os.O_CREAT):
            os.write(os.open(path, flags, 0o666), b"changed")
        for path in [folder + "/new", there, "/tmp/new-file", "/dev/shm/new", "/etc/new", "/new", "/var/tmp/new",
                     os.__file__, sys.executable, "/dev/null/x", "../new"]:
            attempt(path, lambda: write(path))
        attempt("truncate", lambda: os.truncate(there, 0))
        attempt("chmod", lambda: os.chmod(there, 0))
        attempt("utime", lambda: os.utime(there))
        attempt("remove", lambda: os.remove(there))
        attempt("rename", lambda: os.rename(there, "stolen"))
        attempt("rename out", lambda: os.rename("main.py", folder + "/main.py"))
        attempt("mkdir", lambda: os.mkdir(folder + "/d"))
        attempt("mkfifo", lambda: os.mkfifo(folder + "/f"))
        os.symlink(there, "link")
        attempt("link", lambda: write("link", os.O_WRONLY | os.O_TRUNC))
        attempt("python's own", lambda: os.chmod(os.__file__, 0o777))
    """
    outcome = await told(walled, code)
    outcome = {
        name: "OSError" if value == "NotADirectoryError" else value
        for name, value in outcome.items()
    }
    assert refused(outcome), outcome
    assert there.read_text() == "as it was"
    assert os.listdir(tmp_path) == ["there"]
    assert there.stat().st_mode & 0o777 == 0o666


async def test_a_real_listener_is_out_of_reach(walled: Sandbox, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(f"\0{uuid.uuid4().hex}")
        unix.listen()
        code = f"""
            import socket
            def connect(family, address):
                with socket.socket(family) as one:
                    one.settimeout(3)
                    one.connect(address)
            attempt("tcp", lambda: connect(socket.AF_INET, ("127.0.0.1", {tcp.getsockname()[1]})))
            attempt("unix", lambda: connect(socket.AF_UNIX, {unix.getsockname()!r}))
            attempt("raw", lambda: connect(socket.AF_INET, ("10.255.255.1", 80)))
            attempt("name", lambda: socket.getaddrinfo("example.org", 80))
        """
        outcome = await told(walled, code)
        outcome = {
            name: "OSError" if value in ("gaierror", "ConnectionRefusedError") else value
            for name, value in outcome.items()
        }
        assert refused(outcome), outcome
        for listener in (tcp, unix):
            listener.settimeout(0)
            with pytest.raises(BlockingIOError):
                listener.accept()


async def test_the_hosts_shared_memory_datagrams_and_signals_are_out_of_reach(
    walled: Sandbox, tmp_path: Path
) -> None:
    _anybodys_file(tmp_path)
    libc = ctypes.CDLL(None)
    segment = libc.shmget(0, 4096, 0o1666)
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as named,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract,
        ):
            named.bind(str(tmp_path / "socket"))
            (tmp_path / "socket").chmod(0o777)
            abstract.bind(f"\0{uuid.uuid4().hex}")
            code = f"""
                import ctypes, fcntl, select, socket
                libc = ctypes.CDLL(None, use_errno=True)
                libc.shmat.restype = ctypes.c_long
                def call(f, *arguments):
                    if f(*arguments) < 0:
                        raise OSError(ctypes.get_errno(), "refused")
                    return "done"
                def sent(kind, address):
                    one, other = socket.socketpair(socket.AF_UNIX, kind)
                    return one.sendto(b"x", address)
                for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
                    attempt(f"named {{kind}}", lambda: sent(kind, {str(tmp_path / "socket")!r}))
                    attempt(f"abstract {{kind}}", lambda: sent(kind, {abstract.getsockname()!r}))
                attempt("attach", lambda: call(libc.shmat, {segment}, 0, 0))
                attempt("remove", lambda: call(libc.shmctl, {segment}, 0, 0))
                reader, writer = os.pipe()
                attempt("owner", lambda: fcntl.fcntl(reader, 8, {os.getpid()}))
                fcntl.fcntl(reader, 10, {int(signal.SIGUSR1)})
                fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
                os.write(writer, b"x")
                attempt("watch", lambda: call(libc.inotify_add_watch, libc.inotify_init(), b"/", 2))
            """
            assert refused(await told(walled, code))
            for one in (named, abstract):
                one.setblocking(False)
                with pytest.raises(BlockingIOError):
                    one.recv(1)
        assert libc.shmctl(segment, 0, None) == 0  # still there
        assert heard == []
    finally:
        signal.signal(signal.SIGUSR1, before)


async def test_no_other_program_can_be_run(walled: Sandbox) -> None:
    code = """
        import shutil, sys
        for path in ["/bin/sh", "/bin/ls", "/usr/bin/env", "/sbin/init"]:
            attempt(path, lambda: os.execv(path, [path]))
        if os.path.getsize(sys.executable) < 1 << 20:
            shutil.copyfile(sys.executable, "copy")
        attempt("copy", lambda: os.execv("./copy", ["copy"]))
        os.symlink("/bin/sh", "sh")
        attempt("linked", lambda: os.execv("./sh", ["sh"]))
    """
    outcome = await told(walled, code)
    assert refused(outcome), outcome


async def test_the_kernel_lends_no_other_way_out(walled: Sandbox) -> None:
    code = """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        def call(f, *arguments):
            if f(*arguments) < 0:
                raise OSError(ctypes.get_errno(), "refused")
            return "done"
        attempt("user namespace", lambda: call(libc.unshare, 0x10000000))
        attempt("mount", lambda: call(libc.mount, b"proc", b"/box", b"proc", 0, None))
        attempt("chroot", lambda: os.chroot("."))
        attempt("setuid", lambda: os.setuid(0) if os.getuid() else os.setuid(1))
        attempt("ptrace", lambda: call(libc.ptrace, 16, os.getppid(), 0, 0))
        attempt("limits", lambda: __import__("resource").setrlimit(__import__("resource").RLIMIT_CPU, (99, 99)))
        attempt("mknod", lambda: os.mknod("disk", 0o60666, os.makedev(254, 0)))
    """
    outcome = await told(walled, code)
    assert outcome.pop("limits") in ("ValueError", "PermissionError")
    outcome = {
        name: "OSError" if value == "ProcessLookupError" else value
        for name, value in outcome.items()
    }
    assert refused(outcome), outcome


async def test_the_environment_is_clean(any_kind: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SECRET", "token")
    result: SandboxResult = await any_kind.run("import os\nprint(sorted(os.environ))")
    allowed = {"HOME", "LANG", "LC_CTYPE", "PATH", "PYTHONHASHSEED", "PYTHONUTF8", "TMPDIR"}
    assert set(json.loads(result.stdout.replace("'", '"'))) <= allowed
