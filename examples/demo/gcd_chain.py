"""Makes the demo's tasks: the greatest common divisor of two numbers, with Euclid's working.

One character of text is one token of the demo's vocabulary. A prompt is `048:036=`. A response
chooses one of three styles by its first character:

    direct       `#012`                        no working
    remainder    `%036012%012000#012`          each step is the pair (b, a mod b), until b is 0
    subtract     `-012036-012024-012012#012`   each step takes the smaller number from the larger,
                                               until both are equal
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, get_args

from paceline.errors import InvalidInput
from paceline.tasks import Task

Style = Literal["direct", "remainder", "subtract"]
Split = Literal["train", "heldout"]
Pair = tuple[int, int]

STYLES: tuple[Style, ...] = get_args(Style)
SPLITS: tuple[Split, ...] = get_args(Split)
_HELDOUT_PERCENT = 20
_MARKS: dict[str, Style] = {"#": "direct", "%": "remainder", "-": "subtract"}


@dataclass(frozen=True)
class Family:
    """Pairs a != b of numbers with `digits` digits and a working of limited length."""

    digits: int
    max_subtractions: int
    """Maximum number of steps in a working; other pairs are left out."""
    largest_divisor: int
    """Pairs with a larger divisor are never drawn; 0: all are."""

    @property
    def largest(self) -> int:
        """The largest number."""
        return int(10**self.digits) - 1

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt, the first of which is <bos>."""
        return 2 * self.digits + 3

    @property
    def longest(self) -> int:
        """Tokens of the longest document, <bos> and <eos> included."""
        working = self.max_subtractions * (2 * self.digits + 1)
        return self.prompt_tokens + working + self.digits + 2

    def prompt(self, a: int, b: int) -> str:
        """The prompt for the pair, every number with all its digits."""
        self._require(a, b)
        return f"{self._shown(a)}:{self._shown(b)}="

    def answer(self, a: int, b: int) -> str:
        """The greatest common divisor."""
        self._require(a, b)
        return self._shown(math.gcd(a, b))

    def solution(self, a: int, b: int, style: Style) -> str:
        """The response in one style; raises InvalidInput for a style that is not one of STYLES."""
        self._require(a, b)
        match style:
            case "direct":
                steps = ""
            case "remainder":
                steps = "".join(f"%{self._shown(x)}{self._shown(y)}" for x, y in remainders(a, b))
            case "subtract":
                steps = "".join(f"-{self._shown(x)}{self._shown(y)}" for x, y in subtractions(a, b))
            case _:
                raise InvalidInput("unknown style", seen=style, allowed=", ".join(STYLES))
        return f"{steps}#{self.answer(a, b)}"

    def split_of(self, a: int, b: int) -> Split:
        """The split of the unordered pair, by a hash: (a, b) and (b, a) always fall together."""
        self._require(a, b)
        digest = hashlib.sha256(f"{min(a, b)}:{max(a, b)}".encode()).digest()
        return "heldout" if int.from_bytes(digest[:4], "big") % 100 < _HELDOUT_PERCENT else "train"

    def pairs(self, split: Split) -> tuple[Pair, ...]:
        """Every ordered pair of one split."""
        if split not in SPLITS:
            raise InvalidInput("unknown split", seen=split, allowed=", ".join(SPLITS))
        return self._splits[split]

    @cached_property
    def _splits(self) -> dict[Split, tuple[Pair, ...]]:
        found: dict[Split, list[Pair]] = {split: [] for split in SPLITS}
        numbers = range(1, self.largest + 1)
        for a in numbers:
            for b in numbers:
                drawn = not self.largest_divisor or math.gcd(a, b) <= self.largest_divisor
                if a != b and drawn and count_subtractions(a, b) <= self.max_subtractions:
                    found[self.split_of(a, b)].append((a, b))
        return {split: tuple(own) for split, own in found.items()}

    def sample_tasks(self, count: int, split: Split, seed: int) -> list[Task]:
        """`count` distinct tasks, drawn by `weight` without replacement; the same for the same
        seed.

        Raises InvalidInput when the split holds fewer pairs. Keys u^(1/w): Efraimidis and Spirakis,
        2006.
        """
        family = self.pairs(split)
        if not 0 <= count <= len(family):
            raise InvalidInput(
                f"the split {split!r} does not hold so many tasks",
                seen=count,
                allowed=f"0..{len(family)}",
            )
        rng = random.Random(seed)
        keyed = sorted(
            ((rng.random() ** (1.0 / weight(a, b)), a, b) for a, b in family), reverse=True
        )
        return [self._task(a, b, split) for _, a, b in keyed[:count]]

    def _task(self, a: int, b: int, split: Split) -> Task:
        name = f"gcd-{self._shown(a)}-{self._shown(b)}"
        told = {"split": split, "format": self.solution(a, b, "subtract")}
        return Task(name, self.prompt(a, b), self.answer(a, b), told)

    def _shown(self, number: int) -> str:
        return str(number).zfill(self.digits)

    def _require(self, a: int, b: int) -> None:
        for number in (a, b):
            if not 1 <= number <= self.largest:
                raise InvalidInput(
                    "a number is outside the family", seen=number, allowed=f"1..{self.largest}"
                )


THREE_DIGITS = Family(digits=3, max_subtractions=52, largest_divisor=25)
TWO_DIGITS = Family(digits=2, max_subtractions=40, largest_divisor=0)
FAMILIES = {"three-digits": THREE_DIGITS, "two-digits": TWO_DIGITS}


class Draws:
    """Pairs of the train split, drawn with replacement by a weight of one's own."""

    def __init__(self, family: Family, exponent: float) -> None:
        """exponent: of the divisor; the weight of a pair is divisor ** exponent."""
        self._pairs = family.pairs("train")
        self._sums = list(accumulate(math.gcd(a, b) ** exponent for a, b in self._pairs))

    def draw(self, rng: random.Random) -> Pair:
        """The next pair."""
        return rng.choices(self._pairs, cum_weights=self._sums)[0]


def style_of(response: str) -> Style | None:
    """The style a response chose, by its first character; None when it starts with none of the
    three marks.
    """
    return _MARKS.get(response[:1])


def is_correct(response: str, expected: str) -> bool:
    """Whether the text after the last `#` is exactly the expected answer; working is not judged."""
    return "#" in response and response.rpartition("#")[2] == expected


def weight(a: int, b: int) -> float:
    """Relative probability of drawing the pair: its divisor to the power of 1.5.

    Uniform pairs are coprime in 61 % of cases, and a constant guess would be a strong policy.
    """
    return math.pow(math.gcd(a, b), 1.5)


def remainders(a: int, b: int) -> Iterator[Pair]:
    """The steps (b, a mod b) until b is 0."""
    while b:
        a, b = b, a % b
        yield a, b


def subtractions(a: int, b: int) -> Iterator[Pair]:
    """The pairs that remain of taking the smaller from the larger, until both are equal."""
    while a != b:
        a, b = (a - b, b) if a > b else (a, b - a)
        yield a, b


def count_subtractions(a: int, b: int) -> int:
    """How many `subtractions` yields: the quotients of Euclid's divisions, less one."""
    count = -1
    while b:
        count += a // b
        a, b = b, a % b
    return count
