"""Runs side by side, cancelled runs, lost launchers and gateways, and invalid requests."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from paceline.errors import ConfigError, InvalidInput, Unavailable
from paceline.local.patience import patient
from paceline.services.rollout_gateway.config import SandboxConfig
from paceline.services.rollout_gateway.sandbox import Sandbox
from paceline.services.rollout_gateway.sandbox.launcher.request import (
    RunRequest,
    SandboxResult,
    encode,
    remove_tree,
)

SANDBOX = Path(__file__).parents[4] / "services" / "rollout_gateway" / "sandbox"
SLEEP = """
import subprocess, sys
open("begun", "w").close()
one = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(99)", {word!r}])
print("begun", flush=True)
one.wait()
"""


def bearers(word: str) -> list[psutil.Process]:
    """Processes with the word in their command line."""
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if word in " ".join(one.info["cmdline"] or [])
    ]


def launchers_of(gateway: int) -> list[psutil.Process]:
    """The launchers of a gateway."""
    return [
        one
        for one in psutil.Process(gateway).children()
        if "launcher.main" in " ".join(one.cmdline())
    ]


def boxes_below(folder: Path) -> list[Path]:
    """Directories of programs."""
    return list(folder.rglob("box-*"))


async def begun(word: str, still: asyncio.Task[object]) -> list[psutil.Process]:
    """The processes of a program that has begun; the deadline is the test's."""
    while not (found := bearers(word)):
        assert not still.done(), still.result()
        await asyncio.sleep(0.02)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("isolation", ["auto", "landlock", "limits"])
async def test_a_cancelled_run_leaves_nothing(
    isolation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sandbox = Sandbox(SandboxConfig.model_validate({"isolation": isolation, "wall_s": 60}))
    await _layers(sandbox)
    word = uuid.uuid4().hex
    run = asyncio.create_task(sandbox.run(SLEEP.format(word=word)))
    found = await begun(word, run)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    psutil.wait_procs(found, timeout=patient(10))
    assert bearers(word) == []
    assert boxes_below(tmp_path) == []
    assert (await sandbox.run("print(1)")).stdout == "1\n"


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["auto", "landlock", "limits"])
async def test_a_program_ends_with_its_gateway(isolation: str, tmp_path: Path) -> None:
    word = uuid.uuid4().hex
    gateway = f"""
        import asyncio
        from paceline.services.rollout_gateway.config import SandboxConfig
        from paceline.services.rollout_gateway.sandbox import Sandbox
        sandbox = Sandbox(SandboxConfig(isolation={isolation!r}, wall_s=60))
        asyncio.run(sandbox.run({SLEEP.format(word=word)!r}))
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(gateway), env=environment, stderr=subprocess.PIPE
    )
    waiting = asyncio.create_task(process.wait())
    while not [one for one in bearers(word) if one.cmdline()[-1] == word]:
        if waiting.done():
            pytest.skip((await process.stderr.read()).decode()[-200:] if process.stderr else "")
        await asyncio.sleep(0.02)
    found = [one for one in bearers(word) if one.pid != process.pid]
    found += launchers_of(process.pid)
    process.send_signal(signal.SIGKILL)
    await waiting
    _, alive = await asyncio.to_thread(psutil.wait_procs, found, patient(10))
    assert alive == []
    assert boxes_below(tmp_path) == []


async def test_no_more_run_at_once_than_allowed() -> None:
    sandbox = Sandbox(SandboxConfig(parallel=2, isolation="limits"))
    await sandbox.layers()
    code = "import time\nbegan = time.monotonic()\ntime.sleep(0.2)\nprint(began, time.monotonic())"
    results = await asyncio.gather(*(sandbox.run(code) for _ in range(6)))
    spans = [tuple(map(float, result.stdout.split())) for result in results]
    assert all(sum(start <= moment < end for start, end in spans) <= 2 for moment, _ in spans)


@pytest.mark.slow
def test_it_runs_under_uvloop_from_many_tasks() -> None:
    async def many() -> list[str]:
        sandbox = Sandbox(SandboxConfig(parallel=4))
        results = await asyncio.gather(*(sandbox.run(f"print({number})") for number in range(8)))
        return [result.stdout.strip() for result in results]

    assert uvloop.run(many()) == [str(number) for number in range(8)]


@pytest.mark.slow
def test_code_inherits_no_descriptor_even_when_the_gateway_leaks_one(tmp_path: Path) -> None:
    async def listed() -> str:
        with (tmp_path / "secret").open("w") as file:
            os.set_inheritable(file.fileno(), True)
            code = """
                import os
                for fd in range(256):
                    try:
                        print(fd, oct(os.fstat(fd).st_mode >> 12), file=sys.stderr)
                    except OSError:
                        pass
            """
            return (
                await Sandbox(SandboxConfig()).run("import sys\n" + textwrap.dedent(code))
            ).stderr

    for run in (asyncio.run, uvloop.run):
        # stdin is a file in memory, stdout and stderr are pipes
        assert run(listed()) == "0 0o10\n1 0o1\n2 0o1\n"


@pytest.mark.parametrize("name", ["../x", "/etc/x", "", ".", "main.py", "a/../../x", "a\0b"])
async def test_files_outside_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="relative paths"):
        await Sandbox(SandboxConfig()).run("", files={name: ""})


async def test_odd_texts_arrive_as_they_can() -> None:
    sandbox = Sandbox(SandboxConfig())
    result = await sandbox.run("import sys\nprint(ascii(sys.stdin.read()))", stdin="ü\r\n\0")
    assert result.stdout == "'\\xfc\\r\\n\\x00'\n"
    assert (await sandbox.run("x = 1\0")).exit_code == 1
    raw = await sandbox.run("import os\nos.write(1, b'\\xff\\xfe')")
    assert raw.stdout == "\ufffd\ufffd"


@pytest.mark.parametrize(
    ("code", "given"),
    [("'\ud800'", {}), ("", {"stdin": "\ud800"}), ("", {"files": {"a": "\ud800"}})],
)
async def test_text_that_utf_8_cannot_spell_is_refused(code: str, given: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidInput, match="unpaired surrogate; allowed: text that UTF-8 can encode"
    ):
        await Sandbox(SandboxConfig()).run(code, **given)


async def test_a_sandbox_without_a_place_is_no_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(Unavailable, match="no directory could be made"):
        await Sandbox(SandboxConfig()).run("print(1)")


async def test_an_isolation_that_cannot_be_had_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = (
        tmp_path / "python"
    )  # an interpreter that ends before it runs anything: no kind of isolation works
    other.write_text('#!/bin/sh\ncat >/dev/null; echo \'{"failed": "PermissionError: unshare"}\'\n')
    other.chmod(0o755)
    monkeypatch.setattr(sys, "_base_executable", str(other))
    for kind in ("auto", "namespaces", "landlock", "limits"):
        sandbox = Sandbox(SandboxConfig.model_validate({"isolation": kind}))
        with pytest.raises(ConfigError, match=f"isolation '{kind}'.*PermissionError: unshare"):
            await sandbox.run("print(1)")


WITHOUT = """
import asyncio, sys
from paceline.errors import ConfigError
from paceline.services.rollout_gateway.config import SandboxConfig
from paceline.services.rollout_gateway.sandbox import Sandbox
from paceline.services.rollout_gateway.sandbox.launcher import linux

# clone, unshare: of another user namespace; landlock_create_ruleset; prctl: of a filter
bits = {"namespaces": {56: (0, 0x10000000), 272: (0, 0x10000000)}, "landlock": {444: None},
        "seccomp": {157: (0, 22)}}
filter_ = [(0x20, 0, 0, 0)]
for layer in sys.argv[2:]:
    for number, argument in bits[layer].items():
        refused = [] if argument is None else linux._is_none_of(0, [argument[1]], argument[1])
        filter_ += linux._refuse(number) if argument is None else linux._check(number, refused)
linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
linux.install_filter([*filter_, (0x06, 0, 0, 0x7FFF0000)])
try:
    print(*asyncio.run(Sandbox(SandboxConfig(isolation=sys.argv[1])).layers()))
except ConfigError as error:
    print(error)
"""


@pytest.mark.few(1)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names system calls by number")
@pytest.mark.parametrize(
    ("isolation", "lacking", "said"),
    [
        ("auto", ("namespaces",), r"^landlock seccomp$"),  # as in most containers
        ("auto", ("landlock",), r"^namespaces seccomp$"),
        (
            "auto",
            ("namespaces", "landlock"),
            r"no namespaces .*no landlock .*isolation; \"limits\"",
        ),
        ("auto", ("seccomp",), r"no seccomp here.*isolation; \"limits\""),
        ("namespaces", ("landlock",), r"no landlock here.*another gateway.rewards.sandbox.isola"),
        ("namespaces", ("seccomp",), r"no seccomp here"),
        ("limits", ("namespaces", "landlock", "seccomp"), r"^$"),
    ],
)
def test_a_layer_that_is_not_there_is_named_and_nothing_weaker_taken_than_asked_for(
    isolation: str, lacking: tuple[str, ...], said: str
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WITHOUT, isolation, *lacking]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = done.stdout.splitlines()[-1]
    assert re.search(said, found), found


@pytest.mark.parametrize("isolation", ["auto", "namespaces"])
async def test_layers_are_the_same_however_private_the_files_of_its_gateway_are(
    isolation: str,
) -> None:
    async def layers() -> str:
        try:
            return " ".join(await Sandbox(SandboxConfig(isolation=isolation)).layers())
        except ConfigError as error:  # this machine has none
            return str(error)

    before = os.umask(0o022)
    try:
        shared = await layers()
        os.umask(0o077)
        assert await layers() == shared
    finally:
        os.umask(before)


@pytest.mark.slow
async def test_a_launcher_that_is_killed_is_no_result() -> None:
    sandbox = Sandbox(SandboxConfig(wall_s=60))
    await sandbox.layers()
    word = uuid.uuid4().hex
    run = asyncio.create_task(sandbox.run(SLEEP.format(word=word)))
    found = await begun(word, run)
    [launcher] = launchers_of(os.getpid())
    launcher.kill()
    with pytest.raises(Unavailable, match="launcher was lost; seen: exit code -9"):
        await run
    _, alive = await asyncio.to_thread(psutil.wait_procs, found, patient(10))
    assert alive == [] or "namespaces" not in await sandbox.layers()


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run without privileges then")
@pytest.mark.parametrize(
    "layers", [(), ("landlock", "seccomp"), ("namespaces", "landlock", "seccomp")]
)
def test_a_gateway_without_privileges_can_shut_code_in_too(layers: tuple[str, ...]) -> None:
    python = Path("/usr/bin/python3")
    if (
        not python.exists()
        or not os.access(SANDBOX, os.X_OK)
        or subprocess.run([python, "-c", ""], user=4711).returncode
    ):
        pytest.skip("no Python that another user can run")
    box = tempfile.mkdtemp()
    os.chown(box, 4711, 4711)
    code = """
import os, signal
alive = 1
try:
    while os.fork():
        alive += 1
    signal.pause()
except BlockingIOError:
    print(alive)
print(open("/etc/passwd").read()[:4])
"""
    limits = SandboxConfig(processes=8).model_dump(exclude={"parallel", "isolation"})
    request = RunRequest(
        parent=os.getpid(), box=box, layers=layers, code=code, stdin="", files={}, **limits
    )
    start = "import sys; sys.path.insert(0, sys.argv[1]); from launcher.main import main; main()"
    command = [python, "-I", "-S", "-B", "-c", start, SANDBOX]
    done = subprocess.run(
        command, input=encode(request), capture_output=True, user=4711, group=4711, extra_groups=[]
    )
    assert not os.path.exists(box)
    answer = SandboxResult(**json.loads(done.stdout))
    if answer.failed and layers:
        pytest.skip(answer.failed)
    assert (
        6 <= int(answer.stdout.split()[0]) <= 8
    )  # the user may have begun another process meanwhile
    assert ("root" in answer.stdout) == (not layers)


FULL_DISK = """
import asyncio, subprocess, sys, tempfile
from pathlib import Path
from paceline.errors import Unavailable
from paceline.services.rollout_gateway.config import SandboxConfig
from paceline.services.rollout_gateway.sandbox import Sandbox

free = (1 << 30) + (256 << 20)
mount = ["mount", "-t", "tmpfs", "-o", f"size={free},mode=755", "none", sys.argv[1]]
subprocess.run(mount, check=True)
tempfile.tempdir = sys.argv[1]
code = '''
import os
kept = []
while True:
    file = open("big", "wb", buffering=0)
    os.remove("big")
    kept.append(file)
    for _ in range(8):
        file.write(bytes(1 << 20))
'''
try:
    print(asyncio.run(Sandbox(SandboxConfig(isolation="landlock")).run(code)))
except Unavailable as error:
    print(error)
print([*Path(sys.argv[1]).rglob("box-*")])
"""


@pytest.mark.slow
def test_code_does_not_fill_the_disk_where_it_has_no_file_system_of_its_own(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = ["unshare", *([] if os.geteuid() == 0 else ["-Ur"]), "-m", sys.executable, "-c"]
    command += [FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr[-200:]}")
    assert "is nearly full" in done.stdout, done
    assert done.stdout.endswith("[]\n")


def test_a_directory_of_any_depth_and_mode_is_removed(tmp_path: Path) -> None:
    top = tmp_path / "box"
    top.mkdir()
    outside = tmp_path / "outside"
    outside.write_text("kept")
    (top / "link").symlink_to(outside)
    (top / "folder").symlink_to(tmp_path)
    here = os.getcwd()
    os.chdir(top)
    for _ in range(1200):
        os.mkdir("d")
        os.chdir("d")
    Path("file").touch()
    os.mkdir("closed", 0)
    os.chdir(here)
    began = time.monotonic()
    remove_tree(str(top))
    assert os.listdir(tmp_path) == ["outside"]
    assert time.monotonic() - began < 30


async def _layers(sandbox: Sandbox) -> None:
    try:
        await sandbox.layers()
    except ConfigError as error:
        pytest.skip(str(error))
