"""Measures what a round of each arm costs before any request comes.

Owns the made-up requests, not the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paceline.services.rollout_gateway.bandits.base import CostSample
from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.embedded.stopwatch import compute_clock
from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.sampling import Sampling

SIZES = (1, 4, 16, 64, 256)
PROMPT_TOKENS = 8
WARM_UPS, ROUNDS = 2, 3
PROFILE_S = 5.0
"""No further size is begun after this long, so that a large model starts as well; what is missing
is learned later.
"""


def profile(engine: Engine, arms: Sequence[str], max_batch: int) -> Sequence[CostSample]:
    """Seconds of some rounds of each arm at growing batch sizes, at the shortest context; leaves no
    request behind.

    A round here holds what surrounds draft and verification, too; the bandit corrects it by rounds
    that count.
    """
    sizes = sorted({min(size, max_batch) for size in SIZES})
    samples: list[CostSample] = []
    began = time.perf_counter()
    for size in sizes:
        for arm in arms:
            if time.perf_counter() - began > PROFILE_S:
                break
            engine.force_arm(arm)
            samples += [CostSample(arm, size, PROMPT_TOKENS, one) for one in _rounds(engine, size)]

    engine.force_arm("")
    return samples


def _rounds(engine: Engine, size: int) -> list[float]:
    clock = compute_clock()
    return decoding_rounds(engine, size, WARM_UPS + ROUNDS, clock)[WARM_UPS:]


def decoding_rounds(
    engine: Engine,
    size: int,
    rounds: int,
    clock: Callable[[], float],
    before: Callable[[int], None] = lambda number: None,
) -> list[float]:
    """Seconds of so many rounds in which `size` requests decode, fewer where these end earlier;
    leaves no request behind. `before` is told the number of the round that may come.
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
        # Only rounds in which every request decodes and none has ended are rounds of this size.
        if load.running == size and load.tokens_emitted - emitted >= size:
            timed.append(seconds)
        emitted = load.tokens_emitted

    engine.abort(None)
    return timed
