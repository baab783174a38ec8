"""What the launcher is asked and what it answers, as JSON. Owns the two shapes; not what is done.

The gateway's side imports this module too.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

MEMORY_EXIT = 112
"""Exit code of the runner when nothing caught a MemoryError."""
CODE_FILE = "main.py"


@dataclass(frozen=True)
class RunRequest:
    """One program to run. Sizes in bytes, times in seconds."""

    parent: int  # process id of the gateway
    box: str  # an empty directory made for this run
    layers: tuple[
        str, ...
    ]  # of "namespaces", "landlock", "seccomp"; each must hold or nothing runs
    code: str
    stdin: str
    files: dict[str, str] = field(default_factory=dict)
    wall_s: float = 10
    cpu_s: int = 5
    memory_bytes: int = 1 << 29
    file_bytes: int = 1 << 24
    output_bytes: int = 1 << 16
    processes: int = 16

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, raw: bytes) -> RunRequest:
        values = json.loads(raw)
        return cls(**{**values, "layers": tuple(values["layers"])})


@dataclass(frozen=True)
class RunAnswer:
    """How it ended.

    `failed` is set when the sandbox itself could not do its work; the rest means nothing then.
    """

    stdout: str = ""
    stderr: str = ""
    truncated: bool = False
    exit_code: int = 0  # minus the signal's number where one ended it
    reason: str = "exit"
    wall_s: float = 0.0
    failed: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, raw: bytes) -> RunAnswer:
        return cls(**json.loads(raw))
