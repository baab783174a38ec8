"""Draws tokens with a real engine, which a trainer then scores again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.nouns import Chunk, Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.trajectory import BranchKey, Trajectory


def prompts(tasks: int, length: int, vocabulary: int, seed: int = 0) -> list[tuple[int, ...]]:
    """One sample per task."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(3, vocabulary) for _ in range(length)) for _ in range(tasks)]


def drawn(
    engine: Engine,
    tasks: Sequence[tuple[int, ...]],
    samples: int,
    tokens: int,
    *,
    temperature: float = 1.0,
    first: int = 0,
    arm: str = "",
    between: Callable[[int], None] = lambda round_number: None,
) -> list[Trajectory]:
    """Draws all samples of the tasks, by `arm` or the bandit's choice; calls `between` after each
    round.
    """
    asked: dict[int, Request] = {}
    for number in range(len(tasks) * samples):
        sampling = Sampling(
            seed=first + 1000 + number, max_tokens=tokens, temperature=temperature, ignore_eos=True
        )
        asked[first + number] = Request(
            first + number, tasks[number // samples], sampling, forced_arm=arm
        )
    for request in asked.values():
        engine.enqueue(request)
    ended: list[Trajectory] = []
    rounds = 0
    while engine.has_work:
        for chunk in engine.step():
            ended.append(_trajectory(chunk, asked[chunk.request_id], samples))
        rounds += 1
        between(rounds)
    return sorted(ended, key=lambda one: one.seed)


def _trajectory(chunk: Chunk, request: Request, samples: int) -> Trajectory:
    prompt, number = request.prompt, request.request_id
    spans = [
        tuple(
            replace(span, start=span.start + len(prompt), end=span.end + len(prompt))
            for span in listed
        )
        for listed in (chunk.version_spans, chunk.draw_spans)
    ]
    length = len(chunk.token_ids)
    return Trajectory(
        key=BranchKey("run", f"s{number}"),
        step=0,
        task_id=f"t{number // samples}",
        group_id=f"g{number // samples}",
        group_size=samples,
        task_index=number // samples,
        sample_index=number % samples,
        token_ids=prompt + chunk.token_ids,
        loss_mask=(0,) * len(prompt) + (1,) * length,
        behavior_logprobs=(0.0,) * len(prompt) + chunk.behavior_logprobs,
        version_spans=spans[0],  # type: ignore[arg-type]
        reward=float(number % 2),
        seed=request.sampling.seed,
        temperature=request.sampling.temperature,
        draw_spans=spans[1],  # type: ignore[arg-type]
    )
