"""Parses the numbers and lists of numbers on the command line of a bench."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def above_zero(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """A type for argparse: a number greater than 0."""
    return _checked(kind, lambda value: value > 0, "> 0")


def not_negative(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """A type for argparse: 0 or more."""
    return _checked(kind, lambda value: value >= 0, ">= 0")


def counts(text: str) -> tuple[int, ...]:
    """A type for argparse: a comma-separated list of counts, in ascending order."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ArgumentTypeError(f"{text!r} is no list of counts, e.g. 1,4,8")
    return tuple(sorted({int(part) for part in parts}))


def _checked(
    kind: Callable[[str], Number], fits: Callable[[Number], bool], allowed: str
) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError as error:
            raise ArgumentTypeError(f"{text!r} is no number; allowed: {allowed}") from error
        if not fits(value):
            raise ArgumentTypeError(f"seen: {value}; allowed: {allowed}")
        return value

    return parse
