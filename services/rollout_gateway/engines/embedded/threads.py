"""Chooses an engine's number of compute threads from measured rounds before the first request.

The fastest number depends on the model and the cores. Rounds of a small model are short pieces of
work, for which threads wait longer than they compute.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import geometric_mean, median

import torch

from paceline.arm_names import OFF
from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.telemetry import get_logger

SIZES = (4, 16, 64)
"""Batch sizes of the compared rounds."""
PROMPT_TOKENS = 8
TURNS, ROUNDS = 3, 3
"""Turns of each number of threads, and rounds of a turn. The first round of a turn is not counted,
because idle threads begin slowly.
"""
MEASURE_S = 5.0
"""After this time no further size is measured, so that a large model starts too."""
WORTH = 1.1
"""Minimum speed-up for twice as many threads; trainers need cores too."""

log = get_logger(__name__)


def choose_threads(engine: Engine, arms: Sequence[str], most: int, max_batch: int) -> int:
    """Finds the fastest number of threads for rounds, at most `most`, and sets it in torch. The
    rounds use the first of the serving `arms` with drafts, if there is such an arm. Its rounds are
    wider than plain rounds, which gain less from threads.

    The numbers are 1, 2, 4 and so on, and `most`. They take turns, so that a slowdown of the
    machine affects all numbers alike. No request is left afterwards.
    """
    counts = sorted({1 << power for power in range(most.bit_length())} | {most})
    sizes = sorted({min(size, max_batch) for size in SIZES})
    engine.force_arm(next((arm for arm in arms if arm != OFF), OFF))
    began, taken = time.perf_counter(), []
    for size in sizes:
        if time.perf_counter() - began < MEASURE_S:
            taken.append(_round_s(engine, size, counts))
    engine.force_arm("")
    chosen = fastest(counts, taken)
    torch.set_num_threads(counts[chosen])
    told = {
        f"threads_{count}_ms": [round(1e3 * of_size[number], 2) for of_size in taken if of_size]
        for number, count in enumerate(counts)
    }
    log.info("threads measured", chosen=counts[chosen], rows=sizes[: len(taken)], **told)
    return counts[chosen]


def fastest(counts: Sequence[int], taken: Sequence[Sequence[float]]) -> int:
    """Index of the chosen number in `counts`, which ascend. `taken`: per size, a round's seconds
    with each number, or an empty list if sequences were too short.
    """
    best, measured = 0, [of_size for of_size in taken if of_size]
    for number in range(1, len(counts)) if measured else ():
        faster = geometric_mean(of_size[best] / of_size[number] for of_size in measured)
        if faster >= WORTH ** math.log2(counts[number] / counts[best]):
            best = number
    return best


def _round_s(engine: Engine, size: int, counts: Sequence[int]) -> list[float]:
    """Seconds of a round with each number of threads; empty after too few rounds."""

    def turn(number: int) -> int:
        return number // ROUNDS % len(counts)

    def take_turn(number: int) -> None:
        torch.set_num_threads(counts[turn(number)])

    rounds = TURNS * ROUNDS * len(counts)
    timed = decoding_rounds(engine, size, rounds, time.perf_counter, take_turn)
    taken: list[list[float]] = [[] for _ in counts]
    for number, seconds in enumerate(timed):
        if number % ROUNDS:
            taken[turn(number)].append(seconds)
    return [median(one) for one in taken] if all(taken) else []


def decoding_rounds(
    engine: Engine,
    size: int,
    rounds: int,
    clock: Callable[[], float],
    before: Callable[[int], None] = lambda number: None,
) -> list[float]:
    """Seconds of up to `rounds` rounds in which `size` artificial requests decode; they are aborted
    at the end. `before` is called with each round's number.
    """
    room = engine.info.max_sequence_tokens
    length = min(PROMPT_TOKENS, room - 1)
    for number in range(size):
        prompt = tuple((7 * number + token) % engine.info.vocab_size for token in range(length))
        engine.enqueue(
            Request(
                number, prompt, Sampling(seed=number, max_tokens=room - length, ignore_eos=True)
            )
        )

    timed: list[float] = []
    emitted = 0
    while engine.has_work and len(timed) < rounds:
        before(len(timed))
        began = clock()
        engine.step()
        seconds = clock() - began
        load = engine.load
        # Count only rounds of this size: every request decodes and none has ended.
        if load.running == size and load.tokens_emitted - emitted >= size:
            timed.append(seconds)
        emitted = load.tokens_emitted

    engine.abort(None)
    return timed
