"""Builds every new grammar first in a separate process, which is killed when the build takes too
long.

Some schemas of a few bytes take hours to build, whatever limits are set: a large multipleOf, or
many patterns in an allOf. The builder cannot be interrupted. For an accepted grammar, the engine
repeats the build in the same time and no longer.
"""

from __future__ import annotations

import json
import resource
import select
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

from paceline.local.patience import patient
from paceline.local.processes import child_environment, die_with_parent
from paceline.services.rollout_gateway.engines.requests.grammar_tokens import GrammarTokens
from paceline.services.rollout_gateway.engines.requests.json_schema import (
    GrammarFault,
    build_matcher,
)

BUILD_DEADLINE_S = 2.0
"""Deadline for building a grammar, in seconds; a slower grammar is rejected. The deadline is
patient.
"""
START_DEADLINE_S = 60.0
"""Deadline for the process to read the tokenizer, in seconds."""
MAX_ADDRESS_BYTES = 8 << 30
"""Address space of the process. A grammar that outgrows it ends the process and is rejected."""


class GrammarJudge:
    """Starts its process at the first grammar, and a new process after a kill."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._arguments = [str(tokenizer), str(vocab_size), json.dumps(list(eos_token_ids))]
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., GrammarJudge] | None = None

    def judge(self, grammar: str) -> None:
        """Raises GrammarFault for a grammar that cannot be built within the deadline and address
        space.
        """
        process = self._process or self._start()
        assert process.stdin is not None
        deadline_s = patient(BUILD_DEADLINE_S)
        try:
            process.stdin.write(json.dumps(grammar).encode() + b"\n")
            process.stdin.flush()
            fault = self._answer(process, deadline_s)
        except OSError:
            fault = None

        if fault is None:
            self.close()
            raise GrammarFault(
                f"its grammar was not built within {deadline_s:g} s and "
                f"{MAX_ADDRESS_BYTES >> 30} GiB"
            )

        if fault:
            raise GrammarFault(fault)

    def close(self) -> None:
        """End the process, if there is one."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "paceline.services.rollout_gateway.engines.requests.grammar_judge",
                *self._arguments,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
        self._process, self._finalizer = process, weakref.finalize(self, _end, process)
        deadline_s = patient(START_DEADLINE_S)
        if self._answer(process, deadline_s) is None:
            self.close()
            raise GrammarFault(f"nothing that builds grammars started within {deadline_s:g} s")
        return process

    @staticmethod
    def _answer(process: subprocess.Popen[bytes], deadline_s: float) -> str | None:
        """The fault of a grammar, empty for none; None when the process has ended or is late."""
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], deadline_s)
        line = process.stdout.readline() if readable else b""  # lines are written whole
        return json.loads(line) if line else None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def main() -> int:
    """Process entry: reads grammars from stdin and writes the fault of each grammar to stdout.

    Arguments: tokenizer.json, vocabulary size, end tokens.
    """
    path, vocab_size, eos_token_ids = sys.argv[1:]
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
    tokens = GrammarTokens(Path(path), int(vocab_size), json.loads(eos_token_ids))
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        fault = ""
        try:
            build_matcher(tokens.guide, json.loads(line))
        except GrammarFault as error:
            fault = str(error) or type(error).__name__
        print(json.dumps(fault), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
