"""What the launcher is asked and what it answers, as JSON. Owns the two shapes; not what is done.

The gateway's side imports this module too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

MEMORY_EXIT = 112
"""Exit code of the runner when nothing caught a MemoryError."""
CODE_FILE = "main.py"


@dataclass(frozen=True)
class RunRequest:
    """One program to run. Sizes in bytes, times in seconds."""

    parent: int  # process id of the gateway
    box: str  # an empty directory made for this run
    layers: Sequence[str]  # of "namespaces", "landlock", "seccomp"; each must hold or nothing runs
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
    """What came of a run.

    `failed` is set when the sandbox itself could not do its work; the rest means nothing then.
    """

    stdout: str = ""  # undecodable bytes replaced
    stderr: str = ""
    truncated: bool = False  # whether output was cut
    exit_code: int = 0  # minus the signal's number where one ended it
    # "exit", "timeout", "cpu", "memory": nothing caught a MemoryError, or all processes together
    # held too much, or "killed": a signal that no limit of ours sent.
    reason: str = "exit"
    wall_s: float = 0.0  # seconds, without the building of the walls
    failed: str = ""


def encode(value: RunRequest | SandboxResult) -> bytes:
    """JSON, whose object is the arguments of the class."""
    return json.dumps(asdict(value)).encode()
