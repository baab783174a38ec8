"""A model's code attacks the gateway, its workers and Redis from the sandbox of a gateway."""

from __future__ import annotations

import json
import os
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from conftest import RedisServer
from integration.gateway.conftest import serving, sums, tiny_model

from paceline.errors import ConfigError
from paceline.local.patience import patient
from paceline.local.user_directory import user_directory
from paceline.services.rollout_gateway.config import SandboxConfig
from paceline.services.rollout_gateway.sandbox import Sandbox
from paceline.services.rollout_gateway.sandbox.launcher.request import SandboxResult

pytestmark = pytest.mark.attack
KINDS = ("namespaces", "landlock")
SECRETS = ("PACELINE_TOKEN", "REDIS_URL", "OPENAI_API_KEY")
WORD = "only-the-gateway-knows"
SLACK_BYTES = 128 << 20  # growth of processes between two measurements, which load delays

ATTACK = """
import ctypes, json, os, signal, socket, sys

targets = json.loads(sys.stdin.read())
libc = ctypes.CDLL(None, use_errno=True)
done = []

def attempt(name, f, *arguments):
    try:
        f(*arguments)
    except (OSError, ValueError):
        return
    done.append(name)

def call(f, *arguments):
    if f(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")

def connected(family, address):
    one = socket.socket(family)
    one.settimeout(2)
    one.connect(address)

def datagram(address):
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    pair[0].sendto(b"x", address)

def read(path):
    with open(path, "rb") as file:
        return file.read(64)

def write(path):
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT))

for host, port in targets["tcp"]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    attempt(f"tcp {host} {port}", connected, family, (host, port))
for path in targets["unix"]:
    attempt(f"unix {path!r}", connected, socket.AF_UNIX, path)
    attempt(f"datagram {path!r}", datagram, path)
for path in targets["files"]:
    attempt(f"read {path}", read, path)
    attempt(f"write {path}", write, path)
    attempt(f"remove {path}", os.remove, path)
for path in targets["folders"]:
    attempt(f"list {path}", os.listdir, path)
    attempt(f"new {path}", write, path + "/new")
buffer = ctypes.create_string_buffer(64)
for pid in targets["pids"]:
    for name in ("environ", "mem", "maps", "cmdline", "root", "cwd", "fd/0", "fd/3"):
        attempt(f"/proc/{pid}/{name}", read, f"/proc/{pid}/{name}")
    for number in (signal.SIGSTOP, signal.SIGKILL):
        attempt(f"signal {number} {pid}", os.kill, pid, number)
    attempt(f"ptrace {pid}", call, libc.ptrace, 16, pid, 0, 0)
    attempt(f"memory {pid}", call, libc.process_vm_readv, pid, buffer, 1, buffer, 1, 0)
    attempt(f"descriptors {pid}", call, libc.syscall, 434, pid, 0)
    attempt(f"limits {pid}", call, libc.prlimit, pid, 7, None, buffer)
    attempt(f"slower {pid}", os.setpriority, os.PRIO_PROCESS, pid, 19)
for fd in range(3, 1024):
    attempt(f"descriptor {fd}", os.fstat, fd)
held = repr(dict(os.environ))
if targets["word"] in held or set(targets["secrets"]) & set(os.environ):
    done.append(f"environment {held}")
print(json.dumps(done))
"""


def sockets_of(processes: Sequence[psutil.Process]) -> dict[str, list[object]]:
    """Addresses on which the processes listen."""
    pids = {one.pid for one in processes}
    tcp = [
        list(one.laddr)
        for one in psutil.net_connections("inet")
        if one.pid in pids and one.status == psutil.CONN_LISTEN
    ]
    unix = [one.laddr for one in psutil.net_connections("unix") if one.pid in pids and one.laddr]
    return {"tcp": tcp, "unix": [path.replace("@", "\0", 1) for path in unix]}


async def attacked(kind: str, code: str, stdin: str = "", **limits: int) -> SandboxResult:
    """Runs code in a sandbox; skips where the machine lacks a layer of the kind."""
    sandbox = Sandbox(SandboxConfig.model_validate({"isolation": kind, "wall_s": 30, **limits}))
    try:
        return await sandbox.run(textwrap.dedent(code), stdin=stdin)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("kind", KINDS)
async def test_code_in_the_sandbox_reaches_nothing_of_the_services(
    kind: str, tmp_path: Path, durable_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, WORD)
    model_dir = tiny_model(tmp_path / "tiny-model")
    redis = {"durable_url": durable_server.url}
    async with serving(model_dir, sums(model_dir), redis=redis, trajectories=False) as served:
        assert durable_server.process is not None
        me = psutil.Process()
        ours = [me, psutil.Process(durable_server.process.pid), *me.children(recursive=True)]
        sockets = sockets_of(ours)
        assert len(sockets["tcp"]) >= 2  # HTTP and gRPC
        assert sockets["unix"]  # workers
        places = [one for top in (tmp_path, user_directory()) for one in (top, *top.rglob("*"))]
        targets = {
            **sockets,
            "files": [str(one) for one in places if not one.is_dir()],
            "folders": [str(one) for one in places if one.is_dir()],
            "pids": [one.pid for one in ours],
            "secrets": SECRETS,
            "word": WORD,
        }
        result = await attacked(kind, ATTACK, json.dumps(targets))
        assert (result.exit_code, result.stdout) == (0, "[]\n"), result
        assert (await served.http.get("/health")).status_code == 200
        assert all(one.status() != psutil.STATUS_STOPPED for one in ours)


HOGS = {
    "processes": """
        for _ in range(10):
            if os.fork() == 0:
                kept = []
                while True:
                    kept.append(b"x" * (1 << 20))
                    os.write(1, b"m")
        os.wait()
    """,
    "files in its directory": """
        kept = []
        try:
            for number in range(10_000):
                kept.append(open(f"held{number}", "wb", buffering=0))
                for _ in range(8):
                    os.write(1, b"m" * (kept[-1].write(bytes(1 << 20)) >> 20))
                os.remove(f"held{number}")
                if number % 50 == 49 and os.fork() == 0:
                    kept.clear()
        except OSError:
            pass
    """,
}


@pytest.mark.parametrize("hog", HOGS)
async def test_a_box_takes_no_more_memory_than_it_may(hog: str) -> None:
    """The code prints one character for each megabyte that it holds."""
    limit, file_bytes = 256 << 20, 8 << 20
    code = "import os\n" + textwrap.dedent(HOGS[hog])
    result = await attacked("namespaces", code, memory_bytes=limit, file_bytes=file_bytes)
    held = len(result.stdout) << 20
    if hog == "processes":
        assert result.reason == "memory", result
        assert limit // 2 < held <= limit + patient(SLACK_BYTES)
    else:
        assert result.reason == "exit", result
        assert 2 * file_bytes < held <= 5 * file_bytes


@pytest.mark.parametrize("kind", KINDS)
async def test_a_program_holds_nobody_up_and_leaves_nothing(kind: str) -> None:
    code = f"""
        import os, signal, sys, threading
        block = b"x" * (1 << 20)
        for _ in range(3):
            if os.fork() == 0:
                signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
                try:
                    os.setsid()
                except OSError:
                    pass
                while True:
                    os.write(1, block)  # holds the pipe, and prints gigabytes
        threading.Thread(target=signal.pause).start()
        os._exit({os.getpid() % 7})
    """
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    began = time.monotonic()
    result = await attacked(kind, code, output_bytes=4096)
    assert (result.reason, result.exit_code) == ("exit", os.getpid() % 7)
    assert len(result.stdout) <= 4096
    assert time.monotonic() - began < patient(20)
    assert {one.pid for one in psutil.Process().children(recursive=True)} <= before
