"""Findings about a machine: its disk, missing packages, and the reading of a model directory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from paceline.errors import ConfigError, PacelineError
from paceline.local.patience import patient
from paceline.local.processes import child_environment, describe_exit
from paceline.whole_files import NO_ROOM

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str  # subject of the check
    verdict: Verdict  # fail: a run would not start, or soon fail
    seen: str
    advice: str = ""  # recommended action; "" if all is well

    @classmethod
    def of_error(cls, check: str, error: PacelineError, verdict: Verdict = "fail") -> Finding:
        """A finding from an error; the allowed values become the advice."""
        seen = error.message if error.seen is None else f"{error.message}: {error.seen}"
        return cls(check, verdict, seen, error.allowed or "")


def looked_at(check: str, look: Callable[[], str]) -> Finding:
    """A finding from a check function: its text, or the error that it raised."""
    try:
        return Finding(check, "ok", look())
    except PacelineError as error:
        return Finding.of_error(check, error)


ROOM_BYTES = 32 << 20
"""Minimum free bytes: a batch of trajectories, a rewritten log."""


def lack_of_room(directory: Path) -> str:
    """Describes a full disk, quota or file size limit; "" if there is room."""
    usage, why = shutil.disk_usage(directory), "the disk is full"
    if usage.free >= ROOM_BYTES:
        try:
            with tempfile.TemporaryFile(dir=directory, buffering=0) as probe:
                left = memoryview(bytes(ROOM_BYTES))
                while left:
                    left = left[probe.write(left) :]
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            why = error.strerror or why
        else:
            return ""
    free, total = usage.free / 2**20, usage.total / 2**20
    return (
        f"{why}: {free:.1f} MiB free of {total:.0f} MiB where {directory} lies, "
        f"{ROOM_BYTES >> 20} MiB needed; the run goes on when there is room"
    )


MODULES = {
    "serve": ("torch", "transformers"),
    "train": ("torch", "transformers", "jaxtyping"),
    "ray": ("ray",),
}
"""Extra of pyproject.toml -> modules that prove its installation."""


def require_extra(extra: str, what: str) -> None:
    """Raises ConfigError with the install command if the extra is absent. `what`: its user, for the
    message.
    """
    absent = [module for module in MODULES[extra] if find_spec(module) is None]
    if absent:
        raise ConfigError(
            f"{what} needs {', '.join(absent)}: pip install 'paceline[{extra}]', or make setup in "
            "a clone",
            reason="NOT_INSTALLED",
        )


def run_checks(
    check: str, module: str, words: Sequence[str], limit_s: float, failure: Verdict = "warn"
) -> list[Finding]:
    """The findings that a module prints as a JSON list, run as a program because it imports much.

    A finding of `check` with the verdict `failure` if the program fails or exceeds its limit.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            env=child_environment({"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=patient(limit_s),
        )
    except subprocess.TimeoutExpired:
        return [Finding(check, failure, f"not checked: took longer than {limit_s:.0f} s")]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [Finding(check, failure, f"not checked: {describe_exit(done.returncode)}: {last}")]
    return [Finding(**one) for one in json.loads(done.stdout.splitlines()[-1])]


PROBE = "paceline.services.rollout_gateway.reading_probe"
PROBE_S = 60.0
"""Limit of the probe, which imports transformers without torch in about two seconds."""


def reading_findings(model: Path, tokenizer: Path | None = None) -> list[Finding]:
    """The findings of the probe; none without tokenizer.json.

    `tokenizer`: its directory if different from the model's.
    """
    if not ((tokenizer or model) / "tokenizer.json").is_file():
        return []
    return run_checks("model reading", PROBE, [str(model), str(tokenizer or model)], PROBE_S)


def check_reading(model: Path, tokenizer: Path | None = None) -> list[str]:
    """Harmless differences from transformers, one line each.

    Raises ConfigError if text would be misread.
    """
    found = reading_findings(model, tokenizer)
    for one in found:
        if one.verdict == "fail":
            message = f"the model's text would be misread: {one.check} differs from transformers"
            raise ConfigError(message, seen=one.seen, allowed=one.advice or None)
    return [f"{one.check}: {one.seen}" for one in found if one.verdict == "warn"]
