"""Compares Paceline's reading of a model directory with transformers, in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from paceline.errors import ConfigError
from paceline.local.findings import Finding
from paceline.local.patience import patient
from paceline.local.processes import child_environment, describe_exit

PROBE = "paceline.services.rollout_gateway.reading_probe"
PROBE_S = 60.0
"""Limit of the probe, which imports transformers without torch in about two seconds."""


def reading_findings(model: Path, tokenizer: Path | None = None) -> list[Finding]:
    """The findings of the probe; none without tokenizer.json.

    `tokenizer`: its directory if different from the model's.
    """
    if not ((tokenizer or model) / "tokenizer.json").is_file():
        return []
    words = [sys.executable, "-m", PROBE, str(model), str(tokenizer or model)]
    try:
        done = subprocess.run(
            words,
            env=child_environment({"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=patient(PROBE_S),
        )
    except subprocess.TimeoutExpired:
        return [Finding("model reading", "warn", f"not compared: took longer than {PROBE_S:.0f} s")]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        seen = f"not compared: {describe_exit(done.returncode)}: {last}"
        return [Finding("model reading", "warn", seen)]
    return [Finding(**one) for one in json.loads(done.stdout.splitlines()[-1])]


def check_reading(model: Path, tokenizer: Path | None = None) -> list[str]:
    """Harmless differences from transformers, one line each.

    Raises ConfigError if text would be misread.
    """
    found = reading_findings(model, tokenizer)
    for one in found:
        if one.verdict == "fail":
            raise ConfigError(
                f"the model's text would be misread: {one.check} differs from transformers",
                seen=one.seen,
                allowed=one.advice or None,
            )
    return [f"{one.check}: {one.seen}" for one in found if one.verdict == "warn"]
