"""Builds an embedded engine from its settings, and measures its best number of compute threads.

The fastest number depends on the model and the cores. Rounds of a small model are short pieces of
work, for which threads wait longer than they compute.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean, median

import torch

from paceline.arm_names import OFF, ArmName
from paceline.local.processes import usable_cores
from paceline.models import decoder, in_place, loading, profiles
from paceline.models.config import ModelConfig, read_config
from paceline.services.rollout_gateway.engines import base, nouns, sampling
from paceline.services.rollout_gateway.engines.embedded import (
    capture,
    drafters,
    kv_cache,
    prefill,
    speculative,
    verify,
)
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec, row_layout
from paceline.services.rollout_gateway.engines.embedded.weights import EngineWeights
from paceline.services.rollout_gateway.engines.requests import control, timing
from paceline.speculators.base import CaptureSpec, SpeculatorSetup
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


def choose_threads(engine: base.Engine, arms: Sequence[str], most: int, max_batch: int) -> int:
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


def _round_s(engine: base.Engine, size: int, counts: Sequence[int]) -> list[float]:
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
    engine: base.Engine,
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
            nouns.Request(
                number,
                prompt,
                sampling.Sampling(seed=number, max_tokens=room - length, ignore_eos=True),
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


def build_embedded(spec: EmbeddedSpec, sink: base.RowSink | None = None) -> base.Engine:
    """Builds an engine that is ready for requests.

    Raises InvalidInput, WeightsError, DataLoss or ConfigError for an unusable checkpoint, drafter
    or arm.
    """
    torch.set_num_threads(spec.threads or usable_cores())
    model_dir = Path(spec.model_dir)
    config = read_config(model_dir)
    admission = control.Admission.of_model(config, model_dir, spec.max_sequence_tokens)
    inner = row_layout(model_dir, (spec.drafter, *spec.more_drafters), spec.capture_inner).inner
    kinds = drafters.engine_kinds(spec)
    arms = drafters.engine_arms(spec, kinds)
    capacity = admission.max_sequence_tokens + drafters.slack(arms.values())
    model = served_model(spec, config, capacity)
    policy = model.load(model_dir)
    with torch.inference_mode():
        speculation = speculative.Speculation(
            spec, arms, _drafters(spec, kinds, arms, policy, capacity, inner)
        )
        store = _store(spec, speculation, policy, capacity, inner, captured=sink is not None)
    weights = EngineWeights(policy, speculation, model, model_dir, memory_saver=spec.memory_saver)

    def engine(rows: base.RowSink | None, tflops: float = 0.0) -> EmbeddedEngine:
        return EmbeddedEngine(
            weights,
            speculation,
            prefill.Scheduler(spec.max_batch, spec.prefill_tokens),
            store,
            kv_cache.PrefixCache(
                spec.max_batch, spec.prefix_slots, capacity, store, spec.prefix_tokens
            ),
            capture.Capture(rows, store, spec.features_dtype),
            admission,
            verify.Grammars(config, model_dir),
            tflops,
        )

    if spec.threads == 0:
        cores = usable_cores() if policy.head.device.type == "cpu" else 1
        speculation.measuring = True
        choose_threads(engine(None), speculation.served, cores, spec.max_batch)
        speculation.forget_rounds()
    return engine(sink, timing.square_product_tflops(policy.head.device, policy.head.dtype))


def served_model(spec: EmbeddedSpec, config: ModelConfig, positions: int) -> in_place.ServedModel:
    """The engine's way of serving policy versions.

    Raises InvalidInput for an unknown profile.
    """
    return in_place.ServedModel(
        config,
        loading.DTYPES[spec.dtype],
        positions,
        profiles.chosen_profile(spec.profile),
        start=Path(spec.model_dir),
    )


def _drafters(
    spec: EmbeddedSpec,
    kinds: drafters.Kinds,
    arms: dict[str, ArmName],
    policy: decoder.DecoderWeights,
    capacity: int,
    inner: tuple[int, ...],
) -> drafters.Drafters:
    setup = SpeculatorSetup(
        policy,
        spec.max_batch,
        capacity,
        policy.head.dtype,
        spec.seed,
        layers=CaptureSpec(inner).layers,
        answer_versions=spec.answer_versions,
    )
    used: dict[str, int] = {}
    for arm in arms.values():
        used[arm.speculator] = max(used.get(arm.speculator, 0), arm.shape.steps)
    return drafters.Drafters(kinds, used, setup)


def _store(
    spec: EmbeddedSpec,
    speculation: speculative.Speculation,
    policy: decoder.DecoderWeights,
    capacity: int,
    inner: tuple[int, ...],
    *,
    captured: bool,
) -> kv_cache.SlotStore:
    keep_hidden = speculation.drafters.needs_hidden or captured  # capture reads the kept states
    slots = spec.max_batch + spec.prefix_slots
    return kv_cache.SlotStore(policy, slots, capacity, keep_hidden=keep_hidden, inner=inner)
