"""Times the embedded engine on a model: prefills, and decode rounds beside their products."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.result import Goal, Row, at_least, at_most, paired_ratio
from paceline.models import decoder
from paceline.models.decoder import DecoderWeights
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.services.rollout_gateway.engines.settings import Precision

SHORT, LONG = 512, 4000
PROMPTS_S = {"float32": 3.2, "bfloat16": 5.4}
"""Prompts of SHORT tokens a second by vLLM, SmolLM2-135M, two threads of an EPYC, 2026-11-29."""
LONG_CPU_S = 7.9
"""CPU seconds of a prompt of LONG tokens by the same, float32."""
OUTSIDE_SHARE = 0.05


def engine_times(model: Path, dtype: Precision, pairs: int) -> tuple[list[Row], list[Goal]]:
    """Rows and goals of both prompts and of the decode round, torch's threads."""
    spec = EmbeddedSpec(
        model_dir=str(model),
        dtype=dtype,
        threads=torch.get_num_threads(),
        max_batch=1,
        max_sequence_tokens=LONG + 2,
        prefix_slots=0,
        drafter="off",
    )
    engine = EmbeddedEngine(spec)
    rows, goals = list[Row](), list[Goal]()
    for tokens, runs in ((SHORT, pairs), (LONG, min(pairs, 3))):
        timed = [_prefill(engine, tokens, run) for run in range(runs + 1)][1:]  # the first warms up
        wall, cpu = (median(one) for one in zip(*timed, strict=True))
        rows.append({"section": f"prefill, {dtype}", "tokens": tokens, "s": wall, "CPU s": cpu})
        if tokens == SHORT:
            name = f"prompts of {tokens} tokens a second, {dtype}"
            goals.append(at_least(name, PROMPTS_S[dtype], 1 / wall))
        elif dtype == "float32":
            goals.append(at_most(f"CPU seconds of {tokens} tokens", LONG_CPU_S, cpu))
    row, goal = _decode_round(engine, dtype, 8 * pairs)
    engine.close()
    return [*rows, row], [*goals, goal]


def _enqueue(engine: EmbeddedEngine, tokens: int, number: int, answer: int) -> None:
    generator = torch.Generator().manual_seed(number)
    prompt = torch.randint(engine.info.vocab_size, (tokens,), generator=generator).tolist()
    sampling = Sampling(seed=number, max_tokens=answer, temperature=0.0, ignore_eos=True)
    engine.enqueue(Request(number, tuple(prompt), sampling))


def _prefill(engine: EmbeddedEngine, tokens: int, number: int) -> tuple[float, float]:
    """Wall and CPU seconds to the first token of a prompt."""
    _enqueue(engine, tokens + 1, number, answer=1)
    wall, cpu = time.perf_counter(), time.process_time()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - wall, time.process_time() - cpu


def _decode_round(engine: EmbeddedEngine, dtype: str, rounds: int) -> tuple[Row, Goal]:
    """Rounds of one request after 125 tokens, in turns with their matrix products."""
    _enqueue(engine, LONG // 32, 0, answer=rounds + 2)
    for _ in range(2):  # the prompt and the first round
        engine.step()
    seconds, alone = list[float](), list[float]()
    while engine.has_work:
        began = time.perf_counter()
        engine.step()
        between = time.perf_counter()
        _products(engine._weights.policy)
        seconds.append(between - began)
        alone.append(time.perf_counter() - between)
    share = 1 - paired_ratio(alone, seconds).value
    row: Row = {
        "section": f"decode round of the engine, batch 1, {dtype}",
        "ms": 1e3 * median(seconds),
        "products alone, ms": 1e3 * median(alone),
        "share outside products": share,
    }
    return row, at_most(f"share of a round outside products, {dtype}", OUTSIDE_SHARE, share)


@torch.inference_mode()
def _products(weights: DecoderWeights) -> None:
    """The matrix products of one token, each in the form that the engine uses."""
    config, dtype = weights.config, weights.head.dtype
    x = torch.zeros(1, config.hidden_size, dtype=dtype)
    attended = torch.zeros(1, config.num_heads * config.head_dim, dtype=dtype)
    for layer in weights.layers:
        decoder.project(x, layer.qkv)
        decoder.add_projected(x, attended, layer.output)
        gate, _ = decoder.project(x, layer.gate_up).chunk(2, dim=-1)
        decoder.add_projected(x, gate, layer.down)
    decoder.head_logits(weights, x)
