"""Makes the demo's tasks: the greatest common divisor of two numbers, with Euclid's working.

One character of text is one token of the demo's vocabulary. A prompt is `48:36=`. A response
chooses one of three styles by its first character:

    direct       `#12`                  no working
    remainder    `%3612%1200#12`        each step is the pair (b, a mod b), until b is 0
    subtract     `-1236-1224-1212#12`   each step takes the smaller number from the larger, until
                                        both are equal
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from functools import cache
from typing import Literal, get_args

from paceline.errors import InvalidInput
from paceline.tasks import Task

Style = Literal["direct", "remainder", "subtract"]
Split = Literal["train", "heldout"]

STYLES: tuple[Style, ...] = get_args(Style)
SPLITS: tuple[Split, ...] = get_args(Split)
LARGEST = 99
MAX_SUBTRACTIONS = 40
"""Pairs that need more subtractions are outside the family, so that no worked solution exceeds 203
characters.
"""
_HELDOUT_PERCENT = 20
_MARKS: dict[str, Style] = {"#": "direct", "%": "remainder", "-": "subtract"}


def prompt(a: int, b: int) -> str:
    """The prompt for the pair: two digits each, six characters in all."""
    _require_pair(a, b)
    return f"{a:02d}:{b:02d}="


def answer(a: int, b: int) -> str:
    """The greatest common divisor as two digits."""
    _require_pair(a, b)
    return f"{math.gcd(a, b):02d}"


def solution(a: int, b: int, style: Style) -> str:
    """The response in one style; raises InvalidInput for a style that is not one of STYLES."""
    _require_pair(a, b)
    match style:
        case "direct":
            steps = ""
        case "remainder":
            steps = "".join(f"%{x:02d}{y:02d}" for x, y in _remainders(a, b))
        case "subtract":
            steps = "".join(f"-{x:02d}{y:02d}" for x, y in _subtractions(a, b))
        case _:
            raise InvalidInput("unknown style of solution", seen=style, allowed=", ".join(STYLES))
    return f"{steps}#{answer(a, b)}"


def style_of(response: str) -> Style | None:
    """The style a response chose, by its first character; None when it starts with none of the
    three marks.
    """
    return _MARKS.get(response[:1])


def is_correct(response: str, expected: str) -> bool:
    """Whether the text after the last `#` is exactly the expected answer; working is not judged."""
    return "#" in response and response.rpartition("#")[2] == expected


def split_of(a: int, b: int) -> Split:
    """The split of the unordered pair, by a hash: (a, b) and (b, a) always fall together."""
    _require_pair(a, b)
    digest = hashlib.sha256(f"{min(a, b)}:{max(a, b)}".encode()).digest()
    return "heldout" if int.from_bytes(digest[:4], "big") % 100 < _HELDOUT_PERCENT else "train"


@cache
def pairs(split: Split) -> tuple[tuple[int, int], ...]:
    """Every ordered pair of the family in one split: a != b, both in 1..99, at most
    MAX_SUBTRACTIONS steps.
    """
    if split not in SPLITS:
        raise InvalidInput("unknown split", seen=split, allowed=", ".join(SPLITS))
    numbers = range(1, LARGEST + 1)
    return tuple(
        (a, b)
        for a in numbers
        for b in numbers
        if a != b
        and split_of(a, b) == split
        and sum(1 for _ in _subtractions(a, b)) <= MAX_SUBTRACTIONS
    )


def weight(a: int, b: int) -> float:
    """How likely the pair is drawn, relative to others: its divisor to the power of 1.5.

    Uniform pairs are coprime in 61 % of cases, and a constant guess would be a strong policy; among
    512 held-out pairs drawn with this weight, 24 % are.
    """
    return math.pow(math.gcd(a, b), 1.5)


def sample_tasks(count: int, split: Split, seed: int) -> list[Task]:
    """`count` distinct tasks, drawn by `weight` without replacement; the same for the same seed.

    Raises InvalidInput when the split holds fewer pairs. Keys u^(1/w): Efraimidis and Spirakis,
    2006.
    """
    family = pairs(split)
    if not 0 <= count <= len(family):
        raise InvalidInput(
            f"the split {split!r} does not hold so many tasks",
            seen=count,
            allowed=f"0..{len(family)}",
        )
    rng = random.Random(seed)
    keyed = sorted(((rng.random() ** (1.0 / weight(a, b)), a, b) for a, b in family), reverse=True)
    return [_task(a, b, split) for _, a, b in keyed[:count]]


def _task(a: int, b: int, split: Split) -> Task:
    return Task(f"gcd-{a:02d}-{b:02d}", prompt(a, b), answer(a, b), {"split": split})


def _remainders(a: int, b: int) -> Iterator[tuple[int, int]]:
    while b:
        a, b = b, a % b
        yield a, b


def _subtractions(a: int, b: int) -> Iterator[tuple[int, int]]:
    while a != b:
        a, b = (a - b, b) if a > b else (a, b - a)
        yield a, b


def _require_pair(a: int, b: int) -> None:
    for number in (a, b):
        if not 1 <= number <= LARGEST:
            raise InvalidInput(
                "a number is outside the family", seen=number, allowed=f"1..{LARGEST}"
            )
