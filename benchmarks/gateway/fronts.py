"""Starts and ends the measured fronts, our gateway and LiteLLM's proxy, each in a process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gateway.backends import MAX_BATCH, MODEL
from benchmarks.result import say
from examples.scripted_engine.engine import SCRIPTED_PATH
from paceline.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    NotFound,
    Unavailable,
)
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.local.processes import child_environment, last_lines

OURS, LITELLM = "gateway", "LiteLLM"
START_DEADLINE_S = 120.0
INSTALL_DEADLINE_S = 900.0
STOP_GRACE_S = 10.0
LOOK_EVERY_S = 0.05
SESSIONS_OPEN = 1_000_000
DYING_EXEC = (
    "import os, sys; from paceline.local.processes import die_with_parent; "
    "die_with_parent(); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Program that becomes another program and ends with the bench, even when the bench is killed."""


AT_ONCE = 16
"""Sessions opened at once."""

SESSION_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Front:
    """A front that serves.

    `pid` is the process measured for CPU and memory; its backend is another process.
    """

    name: str
    port: int
    pid: int

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def gateway(
    folder: Path, model: Path, script: Path, settings: Sequence[str] = ()
) -> AsyncIterator[Front]:
    """Runs our gateway with one scripted engine worker; `settings` are as on the command line."""
    own = {
        "model": str(model),
        "engine.kind": SCRIPTED_PATH,
        "engine.options.file": str(script),
        "engine.workers": 1,
        "engine.max_batch": MAX_BATCH,
        "run.dir": str(folder),
        "sessions.limit": SESSIONS_OPEN,
    }
    async with gateway_with(folder, OURS, own, settings) as front:
        yield front


@asynccontextmanager
async def gateway_with(
    folder: Path,
    name: str,
    own: Mapping[str, Any],
    settings: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Front]:
    """Runs our gateway with the settings `own`, except addresses. `settings` are as on the command
    line; the last value of a key is valid.

    The log `name`.log is in the folder. environment: variables beside the bench's own.
    """
    port = free_port()
    own = {
        **own,
        "security.run_tokens": False,
        "addresses.gateway": "127.0.0.1:0",
        "addresses.http": f"127.0.0.1:{port}",
    }
    words = [f"{key}={json.dumps(value)}" for key, value in own.items()]
    command = [sys.executable, "-m", "paceline.services.rollout_gateway", *words, *settings]
    async with _serving(name, command, port, "/health", folder, environment) as front:
        yield front


@asynccontextmanager
async def litellm(folder: Path, python: Path, backend_port: int) -> AsyncIterator[Front]:
    """Runs LiteLLM's proxy before an OpenAI-compatible backend: one worker, no database, no keys,
    no retries.
    """
    port = free_port()
    to = {
        "model": f"openai/{MODEL}",
        "api_base": f"http://127.0.0.1:{backend_port}/v1",
        "api_key": "none",
    }
    config = {
        "model_list": [{"model_name": MODEL, "litellm_params": to}],
        "litellm_settings": {"num_retries": 0, "telemetry": False},
    }
    path = folder / "litellm.json"  # YAML holds JSON
    path.write_text(json.dumps(config))
    command = [
        str(python.with_name("litellm")),
        "--config",
        str(path),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command = [sys.executable, "-c", DYING_EXEC, str(python), *command]
    environment = {
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no download
        # on loopback; ours has no token either
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    async with _serving(LITELLM, command, port, "/health/liveliness", folder, environment) as front:
        yield front


@asynccontextmanager
async def _serving(
    name: str,
    command: Sequence[str],
    port: int,
    health: str,
    folder: Path,
    extra: Mapping[str, str] | None = None,
) -> AsyncIterator[Front]:
    """Runs the process until the end of the block.

    Raises Unavailable with its last output if it ends early, DeadlineExceeded if it does not serve
    in time.
    """
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=child_environment(dict(extra or {})),
            start_new_session=True,  # Ctrl-C reaches only the bench, which then ends its children
        )

    try:
        await _until_healthy(name, process, f"http://127.0.0.1:{port}{health}", log)
        yield Front(name, port, process.pid)
    finally:
        await _end(process)


async def _until_healthy(
    name: str, process: asyncio.subprocess.Process, url: str, log: Path
) -> None:
    deadline_s = patient(START_DEADLINE_S)
    deadline = time.monotonic() + deadline_s
    async with httpx.AsyncClient(timeout=5.0) as client:
        while time.monotonic() < deadline:
            if process.returncode is not None:
                raise Unavailable(
                    f"{name} ended before it served: {last_lines(log)}", seen=process.returncode
                )
            try:
                if (await client.get(url)).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet; another program's server gives no event
            await asyncio.sleep(LOOK_EVERY_S)

    raise DeadlineExceeded(
        f"{name} does not serve: {last_lines(log)}", allowed=f"{deadline_s:.0f} s"
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(STOP_GRACE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def litellm_python(given: Path | None) -> Path:
    """The interpreter with LiteLLM: the given interpreter, or a venv that the first call makes.

    Raises NotFound for a given interpreter without LiteLLM, FailedPrecondition if the installation
    fails.
    """
    if given is not None:
        if not given.with_name("litellm").is_file():
            raise NotFound(
                "no litellm beside this interpreter",
                seen=given,
                allowed='pip install "litellm[proxy]"',
            )
        return given

    folder = cache_folder() / "litellm"
    python = folder / "bin" / "python"
    if not python.with_name("litellm").is_file():
        say(f"installing LiteLLM into {folder}, once")
        await _command(sys.executable, "-m", "venv", str(folder))
        await _command(str(python), "-m", "pip", "install", "--quiet", "litellm[proxy]")

    return python


def cache_folder() -> Path:
    """Folder of files that outlive a bench."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


async def _command(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(INSTALL_DEADLINE_S):
            code = await process.wait()
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"{' '.join(command)} takes too long", allowed=f"{INSTALL_DEADLINE_S} s"
        ) from error
    finally:
        await _end(process)
    if code:
        raise FailedPrecondition(f"{' '.join(command)} failed", seen=code)


async def version_of_litellm(python: Path) -> str:
    """The installed version of LiteLLM."""
    code = "from importlib.metadata import version; print(version('litellm'))"
    process = await asyncio.create_subprocess_exec(
        str(python), "-c", code, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return output.decode().strip()


async def open_sessions(front: Front, count: int, timeout_s: float) -> Sequence[str]:
    """Opens sessions with an idle timeout of `timeout_s`; returns their keys.

    Raises InternalError if a session cannot be opened.
    """
    numbers = iter(range(count))
    keys: list[str] = []

    async def some(client: httpx.AsyncClient) -> None:
        for number in numbers:
            body = {"task_id": f"bench-{number}", "trainable": False, "timeout_s": timeout_s}
            answer = await client.post("/v1/sessions", json=body)
            if answer.status_code != 201:
                raise InternalError(
                    "a session cannot be opened", seen=f"{answer.status_code}: {answer.text[:300]}"
                )
            keys.append(answer.json()["api_key"])

    async with (
        httpx.AsyncClient(base_url=front.url, timeout=SESSION_DEADLINE_S) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(AT_ONCE):
            group.create_task(some(client))

    return keys
