"""Compares two mathematical answers with math-verify, under limits, in a child's main thread.

math-verify stops itself by SIGALRM between two operations of Python. A single long operation is
ended with the child, at rewards.deadline_s.
"""

import logging
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

# GMP aborts the whole process without memory; Python's integers raise MemoryError.
os.environ |= {"SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1"}

from math_verify import parse, verify

from paceline.services.rollout_gateway.environments import Episode

PARSE_S = 3
"""Maximum seconds to parse one answer."""
COMPARE_S = 3
"""Maximum seconds of one comparison."""
MORE_BYTES = 1 << 30
"""Bytes that one comparison may use beyond the process's mapped memory."""
_ENVIRONMENT = re.compile(r"\$|\\\(|\\\[|\\boxed|\\begin")
_LATEX = re.compile(r"[\\{}()\[\]^_]")


class MathEqual:
    """1.0 when an episode's text and its task's answer mean the same, else 0.0. Unreadable text is
    not equal.
    """

    def __init__(self) -> None:
        # math-verify logs the whole of any unreadable text
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def score(self, episode: Episode) -> float:
        """math-verify's `verify`, with the task's answer as gold."""
        return float(equal(episode.text, episode.task.answer))


@lru_cache(maxsize=4096)
def equal(given: str, expected: str) -> bool:
    """Whether two answers are equal. Verdicts are cached, since samples of one task often give the
    same answer.
    """
    with memory_limit():
        gold, answer = expression(expected), expression(given)
        return bool(gold and answer and verify(gold, answer, timeout_seconds=COMPARE_S))


@lru_cache(maxsize=1024)
def expression(text: str) -> list[Any]:
    r"""Expressions that math-verify reads in a text. LaTeX without dollar signs gets them; `{1, 2}`
    is read as the set `\{1, 2\}`.
    """
    if _LATEX.search(text) and not _ENVIRONMENT.search(text):
        if text.startswith("{") and text.endswith("}"):
            text = rf"\{{{text[1:-1]}\}}"
        text = f"${text}$"
    found: list[Any] = parse(text, parsing_timeout=PARSE_S)
    return found


@contextmanager
def memory_limit() -> Iterator[None]:
    """Limit memory to MORE_BYTES above the mapped memory (Linux); a larger allocation raises
    MemoryError.
    """
    if sys.platform != "linux":
        yield
        return
    pages, kind = int(Path("/proc/self/statm").read_text().split()[0]), resource.RLIMIT_AS
    before, limit = resource.getrlimit(kind), pages * resource.getpagesize() + MORE_BYTES
    resource.setrlimit(kind, (limit if before[1] < 0 else min(limit, before[1]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)
