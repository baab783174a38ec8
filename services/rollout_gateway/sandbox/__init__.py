"""Runs a model's code in a process that cannot do harm: the runs' number, layers and results.

launcher/, a separate program, builds the layers, so that nothing happens between fork and exec
here.
"""

import asyncio
import json
import os
import secrets
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from paceline.errors import ConfigError, InvalidInput, Unavailable, is_whole
from paceline.local.child import Child
from paceline.local.patience import deadline, patient
from paceline.local.user_directory import enterable_directory, locked_directory, user_directory
from paceline.services.rollout_gateway.config import SandboxConfig
from paceline.services.rollout_gateway.sandbox.launcher import request as launch
from paceline.telemetry import get_logger

log = get_logger(__name__)
START_S = 30.0
"""Seconds beyond the code's limit after which a launcher is lost."""
STOP_S = 5.0
_START = "import sys; sys.path.insert(0, sys.argv[1]); from launcher.main import main; main()"
ALL_LAYERS = ("namespaces", "landlock", "seccomp")
# For each setting, the tried layers, strongest first. All but the last hide files and sockets of
# the host.
_LAYERS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "auto": (ALL_LAYERS, ("namespaces", "seccomp"), ("landlock", "seccomp")),
    "namespaces": (ALL_LAYERS,),
    "landlock": (("landlock", "seccomp"),),
    "limits": ((),),
}


class Sandbox:
    """Runs Python programs, each in a fresh process and an empty directory, which are removed
    afterwards.

    Memory is limited for all processes of a program together, CPU time for each process, and the
    number of processes. So a program can use the product of the last two. Without namespaces its
    directory is on the host's disk, of which it cannot use the last GiB. Safe for concurrent use
    within one event loop.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self._slots = asyncio.Semaphore(config.parallel)
        self._choosing = asyncio.Lock()
        self._layers: tuple[str, ...] | None = None

    async def layers(self) -> tuple[str, ...]:
        """The isolation layers besides limits, found by the first call, which runs a program.

        Raises ConfigError when the requested isolation is unavailable here.
        """
        async with self._choosing:
            if self._layers is None:
                self._layers = await self._strongest()
            return self._layers

    async def run(
        self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None
    ) -> launch.SandboxResult:
        """Runs a program as `python main.py` with the standard library, in a directory with
        `files`.

        `files` maps relative paths to texts; modules among them can be imported. Waits while
        `parallel` other programs run. Cancelling kills the program. Raises InvalidInput for a path
        outside the directory and for text that UTF-8 cannot encode, ConfigError as `layers`,
        Unavailable when the sandbox fails, which is independent of the code.
        """
        checked = checked_files(files or {})
        if not all(map(is_whole, (code, stdin, *checked.values()))):
            message = "a program, its input or one of its files has an unpaired surrogate"
            raise InvalidInput(message, allowed="text that UTF-8 can encode")
        layers = await self.layers()
        async with self._slots:
            answer = await self._launch(layers, code, stdin, checked)
        if answer.failed:
            raise Unavailable("the sandbox could not run a program", seen=answer.failed)
        return answer

    async def _strongest(self) -> tuple[str, ...]:
        failures: list[str] = []
        for layers in _LAYERS[self.config.isolation]:
            failure = await self._trial(layers)
            if not failure:
                if layers:
                    by = "+".join(layers)
                    log.info("model code is isolated", by=by, unavailable=failures)
                else:
                    message = "model code runs with limits only: it reads files and opens sockets"
                    log.warning(message, tried=failures)
                return layers
            failures.append(f"{'+'.join(layers) or 'limits'}: {failure}")
        message = f"isolation {self.config.isolation!r} of model code is unavailable on this host"
        allowed = (
            "a machine with these layers and memory enough for Python, or another "
            'gateway.rewards.sandbox.isolation; "limits" bounds time, memory and output alone: '
            "the code reads files and opens sockets as the gateway's user"
        )
        raise ConfigError(message, seen="; ".join(failures), allowed=allowed)

    async def _trial(self, layers: tuple[str, ...]) -> str:
        """The reason that a trivial program does not run with these layers; empty when it does.

        Raises Unavailable.
        """
        word = secrets.token_hex(8)
        async with self._slots:
            answer = await self._launch(layers, f"print({word!r})", "", {})
        if answer.reason in ("timeout", "cpu"):  # a busy machine does not justify weaker layers
            seen = f"{answer.reason}, {answer.wall_s:.1f} s"
            raise Unavailable("a trivial program is too slow in the sandbox", seen=seen)
        if not answer.failed and answer.stdout.strip() != word:
            ended = f"{answer.reason} {answer.exit_code}: {answer.stderr[-300:]}"
            return f"a trivial program ended with {ended}"
        return answer.failed

    async def _launch(
        self, layers: tuple[str, ...], code: str, stdin: str, files: dict[str, str]
    ) -> launch.SandboxResult:
        try:
            box = tempfile.mkdtemp(prefix="box-", dir=_boxes())
        except OSError as error:
            raise Unavailable("no directory could be made for a sandbox", seen=error) from error

        limits = self.config.model_dump(exclude={"parallel", "isolation"})
        request = launch.RunRequest(os.getpid(), box, layers, code, stdin, files, **limits)
        try:
            return await _ask_launcher(request)
        finally:
            await asyncio.shield(asyncio.to_thread(_remove, box))


async def _ask_launcher(request: launch.RunRequest) -> launch.SandboxResult:
    """Starts a launcher and waits for its answer; in every case the launcher has ended on return.

    Raises Unavailable.
    """
    try:
        command = (_python(), "-I", "-S", "-c", _START, str(Path(__file__).parent))
        environment = {"PYTHONUTF8": "1"}
        child = await Child.execute(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment)
    except OSError as error:
        raise Unavailable("no launcher of a sandbox could be started", seen=error) from error

    deadline_s = request.wall_s + patient(START_S)
    try:
        async with deadline(deadline_s, "a sandbox's launcher does not answer", Unavailable):
            out, err = await child.program.communicate(launch.encode(request))
    finally:
        await asyncio.shield(child.stop(STOP_S))  # the child kills its program first

    if child.returncode != 0 or not out:
        seen = f"exit code {child.returncode} {err[-500:].decode(errors='replace')}".strip()
        raise Unavailable("a sandbox's launcher was lost", seen=seen)
    return launch.SandboxResult(**json.loads(out))


def _remove(box: str) -> None:
    """Removes the directory if the launcher, which does so at its end, has left it."""
    if os.path.exists(box):
        try:
            launch.remove_tree(box)
        except OSError as error:
            log.warning("a sandbox's directory could not be removed", path=box, error=str(error))


def _boxes() -> Path:
    """This gateway's directory for runs; directories of killed gateways are removed."""
    private = os.geteuid() != 0  # otherwise the code has its own user id and must enter it
    parent = user_directory() / "boxes" if private else enterable_directory()
    return locked_directory(parent, 0o711, launch.remove_tree)


def _python() -> str:
    """The interpreter itself instead of a virtual environment's, whose packages are not for the
    code.
    """
    return os.path.realpath(str(getattr(sys, "_base_executable", sys.executable)))


def checked_files(files: Mapping[str, str]) -> dict[str, str]:
    """Files of a program. Raises InvalidInput for a path outside its directory."""
    for name in files:
        parts = PurePosixPath(name).parts
        if not parts or {"/", "//", ".."} & {*parts} or name == launch.CODE_FILE or "\0" in name:
            allowed = f"relative paths other than {launch.CODE_FILE}"
            raise InvalidInput("the path of a sandbox's file", seen=repr(name), allowed=allowed)
    return dict(files)
