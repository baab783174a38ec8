"""Makes tables of the serving bench's results for each engine."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.bench_worker import EndedRequest
from benchmarks.result import Row

LEVELS_MS = (50.0, 15.0)
"""Levels of time per output token, milliseconds."""
TIER = "device"
"""Memory of the keys and values of cached prompts; neither engine moves any to the host."""
KEPT = {"embedded": "slots of its own, copied", "sglang": "pages of the KV pool, shared"}
"""Form in which an engine keeps cached keys and values."""


@dataclass(frozen=True, slots=True)
class Served:
    """One batch of requests."""

    first_s: tuple[float, ...]  # time to first token of each
    per_token_s: tuple[float, ...]  # mean of each request's tokens after the first
    decoded: int  # tokens after each request's first
    decoding_s: float  # from the last first token to the last token
    tokens: tuple[tuple[int, ...], ...]

    @property
    def decode_rate(self) -> float:
        """Tokens a second."""
        return self.decoded / self.decoding_s if self.decoding_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Reused:
    """One prompt with a cached share."""

    first_s: float
    found: int  # tokens
    lookup_s: float
    copy_s: float


@dataclass(frozen=True, slots=True)
class EngineFound:
    """All measurements of one engine."""

    tflops: float  # measured by its worker
    prefill: float  # tokens a second
    served: dict[str, dict[int, list[Served]]]  # by arms and requests at once
    reused: dict[float, list[Reused]]  # by share

    def answers(self) -> set[tuple[tuple[int, ...], ...]]:
        """Tokens of the largest batch; all exact runs give the same tokens."""
        return {run.tokens for served in self.served.values() for run in served[max(served)]}


def served_of(ended: Sequence[EndedRequest]) -> Served:
    """Times of one batch, from its last chunks."""
    firsts = tuple(one.chunk.time_to_first_token_s for one in ended)
    several = [
        (one.after_s - first, len(one.chunk.token_ids) - 1)
        for one, first in zip(ended, firsts, strict=True)
        if len(one.chunk.token_ids) > 1
    ]
    return Served(
        firsts,
        tuple(seconds / tokens for seconds, tokens in several),
        sum(tokens for _, tokens in several),
        max(one.after_s for one in ended) - max(firsts),
        tuple(tuple(one.chunk.token_ids) for one in ended),
    )


def rate_of(runs: Sequence[Served]) -> float:
    """Decoded tokens a second."""
    return statistics.median(one.decode_rate for one in runs)


def per_token_ms(runs: Sequence[Served]) -> float:
    """Mean over the requests; for several runs, the median of their means."""
    return 1e3 * statistics.median(statistics.fmean(one.per_token_s or (0.0,)) for one in runs)


def table_rows(found: Mapping[str, EngineFound], tflops: float) -> list[Row]:
    """All tables: the measures in a column for each engine and kind of arms, then rows by batch
    size and by cached share.
    """
    columns = {
        f"{kind}, {arms}": measures(one, arms, tflops)
        for kind, one in found.items()
        for arms in one.served
    }
    names = list(next(iter(columns.values())))
    rows: list[Row] = [
        {"section": "measures", "measure": name, **{at: one[name] for at, one in columns.items()}}
        for name in names
    ]
    for kind, one in found.items():
        for arms, served in one.served.items():
            rows += [batch_row(kind, arms, batch, runs) for batch, runs in served.items()]
    for kind, one in found.items():
        rows += [reuse_row(kind, share, several) for share, several in one.reused.items()]
    return rows


def measures(one: EngineFound, arms: str, tflops: float) -> dict[str, str | float | None]:
    """One column: throughput of the device, and of its TFLOPS, under each level."""
    served = one.served[arms]
    alone = [run.first_s[0] for run in served[min(served)]]
    found: dict[str, str | float | None] = {
        "peak TFLOPS": tflops,
        f"TTFT ms, {min(served)} at once": round(1e3 * statistics.median(alone), 1),
        "prefill tokens/s": round(one.prefill),
        "prefill tokens/s per TFLOPS": round(one.prefill / tflops) if tflops else None,
    }
    for level in LEVELS_MS:
        kept = [batch for batch, runs in served.items() if per_token_ms(runs) <= level]
        best = max(kept, key=lambda batch: rate_of(served[batch]), default=0)
        rate, name = rate_of(served[best]) if best else 0.0, f"TPOT <= {level:g} ms"
        found[f"{name}: decode tokens/s"] = round(rate) if best else "none"
        found[f"{name}: per TFLOPS"] = round(rate / tflops) if best and tflops else None
        found[f"{name}: requests at once"] = best or None
    return found


def batch_row(kind: str, arms: str, batch: int, runs: Sequence[Served]) -> Row:
    """Latencies of one batch size."""
    firsts = [1e3 * second for one in runs for second in one.first_s]
    each = [1e3 * second for one in runs for second in one.per_token_s]
    return {
        "section": "by requests at once",
        "engine": kind,
        "arms": arms,
        "batch": batch,
        "TTFT p50 ms": float(np.percentile(firsts, 50)),
        "TTFT p90 ms": float(np.percentile(firsts, 90)),
        "TPOT mean ms": per_token_ms(runs),
        "TPOT p90 ms": float(np.percentile(each, 90)) if each else None,
        "decode tokens/s": round(rate_of(runs)),
    }


def reuse_row(kind: str, share: float, found: Sequence[Reused]) -> Row:
    """Time that a cached share saves, and the cost of reading it."""
    tokens = statistics.median(one.found for one in found)
    copied = statistics.median(one.copy_s for one in found)
    tells = any(one.lookup_s for one in found)
    return {
        "section": "keys and values of cached prompts",
        "engine": kind,
        "tier": TIER,
        "kept in": KEPT[kind],
        "reused %": round(100 * share),
        "tokens found": int(tokens),
        "TTFT ms": 1e3 * statistics.median(one.first_s for one in found),
        "lookup us": 1e6 * statistics.median(one.lookup_s for one in found) if tells else None,
        "copy us": 1e6 * copied if tells else None,
    }
