"""Builds every new grammar first in a separate process, which is killed when the build takes too
long.

Imports no torch. llguidance is part of the engine's installation, and is imported only where tokens
are loaded.

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
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError, InvalidInput
from paceline.local import patience, processes
from paceline.models.reading import read_text
from paceline.services.rollout_gateway.engines.requests import structures, tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class GrammarTokens:
    """The tokens of a tokenizer.json in the form that a grammar needs."""

    def __init__(self, path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Reads the file, in about a second for 100 000 tokens.

        Raises InvalidInput naming a decoder that does not map tokens to bytes.
        """
        from llguidance import LLTokenizer, TokenizerWrapper

        try:
            _, self._within = tokenizer.read_tokenizers(read_text(path.parent))
            kinds = tokenizer.TokenSpelling(self._within).kinds
        except (ConfigError, InvalidInput) as error:
            message = f"structured output needs another tokenizer than {path}: {error}"
            raise InvalidInput(message) from error
        found = tokenizer.token_bytes(self._within)
        lost = [] if kinds == ("ByteLevel",) else tokenizer.lost_at_front(self._within, found)
        added = self._within.get_added_tokens_decoder().items()
        self.special = {token.content: token_id for token_id, token in added if token.special}
        """Special tokens by name."""
        self._within.encode_special_tokens = True  # the name of a special token is text here
        # A model's vocabulary is often padded beyond its tokenizer's.
        self.tokens = found + [b""] * (vocab_size - len(found))
        kept = np.ones(len(self.tokens), dtype=np.bool_)
        kept[lost] = False
        kept[list(eos_token_ids)] = True
        self.kept_at_front: npt.NDArray[np.uint8] = np.packbits(kept, bitorder="little")
        """[ceil(V / 8)] bitmask, lowest bit first: tokens that keep all bytes at the start of a
        response. Other tokens lose bytes there, mostly a space.
        """
        self.special_token_ids = sorted({*self.special.values(), *eos_token_ids})
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        wrapped, slices = TokenizerWrapper(self), LLTokenizer.json_slices()
        ends = list(eos_token_ids)
        self.guide: LLTokenizer = LLTokenizer(wrapped, eos_token=ends, slices=slices)
        """The tokens for a matcher; llguidance calls `__call__` to tokenize a text."""

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a UTF-8 text in the middle of another text, as the tokenizer splits it.

        Where the tokenizer changes the text, or uses special tokens, the longest tokens that fit
        are returned.
        """
        try:
            ids: list[int] = self._within.encode(text.decode(), add_special_tokens=False).ids
        except Exception:  # noqa: BLE001 - tokenizers has no class of its own for unknown words
            ids = []
        same = b"".join(self.tokens[token] for token in ids) == text
        kept = same and not any(token in self.special_token_ids for token in ids)
        if kept or not hasattr(self, "guide"):
            return ids
        return self.guide.greedy_tokenize(text.decode())


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

    def __init__(self, path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._arguments = [str(path), str(vocab_size), json.dumps(list(eos_token_ids))]
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., GrammarJudge] | None = None

    def judge(self, grammar: str) -> None:
        """Raises GrammarFault for a grammar that cannot be built within the deadline and address
        space.
        """
        process = self._process or self._start()
        assert process.stdin is not None
        deadline_s = patience.patient(BUILD_DEADLINE_S)
        try:
            process.stdin.write(json.dumps(grammar).encode() + b"\n")
            process.stdin.flush()
            fault = self._answer(process, deadline_s)
        except OSError:
            fault = None

        if fault is None:
            self.close()
            limits = f"{deadline_s:g} s and {MAX_ADDRESS_BYTES >> 30} GiB"
            fault = f"its grammar was not built within {limits}"
        if fault:
            raise structures.GrammarFault(fault)

    def close(self) -> None:
        """End the process, if there is one."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _start(self) -> subprocess.Popen[bytes]:
        module = "paceline.services.rollout_gateway.engines.requests.grammar_judge"
        command, pipe = [sys.executable, "-m", module, *self._arguments], subprocess.PIPE
        environment = processes.child_environment()
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
        self._process, self._finalizer = process, weakref.finalize(self, _end, process)
        deadline_s = patience.patient(START_DEADLINE_S)
        if self._answer(process, deadline_s) is None:
            self.close()
            message = f"nothing that builds grammars started within {deadline_s:g} s"
            raise structures.GrammarFault(message)
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
    processes.die_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
    tokens = GrammarTokens(Path(path), int(vocab_size), json.loads(eos_token_ids))
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        fault = ""
        try:
            structures.build_matcher(tokens.guide, json.loads(line))
        except structures.GrammarFault as error:
            fault = str(error) or type(error).__name__
        print(json.dumps(fault), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
