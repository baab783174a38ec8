"""The launcher's request and answer, as JSON.

The gateway imports this module too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

MEMORY_EXIT = 112
"""Exit code of the runner after an uncaught MemoryError."""
CODE_FILE = "main.py"


@dataclass(frozen=True)
class RunRequest:
    """One program to run. Sizes in bytes, times in seconds."""

    parent: int  # process id of the gateway
    box: str  # an empty directory for this run
    layers: Sequence[str]  # of "namespaces", "landlock", "seccomp"; each one is required
    code: str
    stdin: str
    files: Mapping[str, str]
    wall_s: float
    cpu_s: int
    memory_bytes: int
    file_bytes: int
    output_bytes: int
    processes: int


@dataclass(frozen=True)
class SandboxResult:
    """Result of a run.

    `failed` is set when the sandbox itself failed; the other fields then have no meaning.
    """

    stdout: str = ""  # undecodable bytes replaced
    stderr: str = ""
    truncated: bool = False  # whether output was cut
    exit_code: int = 0  # minus the signal's number, if a signal ended it
    # "exit", "timeout", "cpu", "memory" (an uncaught MemoryError, or too much by all processes
    # together), or "killed": by a signal that no limit of ours sent.
    reason: str = "exit"
    wall_s: float = 0.0  # seconds, without building the layers
    failed: str = ""


def encode(value: RunRequest | SandboxResult) -> bytes:
    """JSON of an object with the class's arguments."""
    return json.dumps(asdict(value)).encode()
