"""What engines do, as metrics and span attributes: the same names for every engine. Owns no measurement of its own."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.trace import Span

from paceline.telemetry import meter
from paceline.v1 import engine_pb2 as pb
from rollout_gateway.engines import wire
from rollout_gateway.generation import Generation

TOKEN_BOUNDARIES_S = [0.002, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0]
FIRST_BOUNDARIES_S = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0]
LENGTH_BOUNDARIES = [1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0]


class EngineMetrics:
    """Instruments of one gateway; `engine` is the kind and labels every point."""

    def __init__(self, engine: str) -> None:
        self._labels = {"engine": engine}
        instruments = meter()
        self._first = instruments.create_histogram(
            "paceline.engine.time_to_first_token",
            unit="s",
            explicit_bucket_boundaries_advisory=FIRST_BOUNDARIES_S,
        )
        self._each = instruments.create_histogram(
            "paceline.engine.time_per_output_token",
            unit="s",
            explicit_bucket_boundaries_advisory=TOKEN_BOUNDARIES_S,
        )
        self._accepted = instruments.create_histogram(
            "paceline.engine.accept_length",
            unit="{token}",
            explicit_bucket_boundaries_advisory=LENGTH_BOUNDARIES,
        )
        self._proposed = instruments.create_counter("paceline.engine.drafts_proposed", unit="{draft}")
        self._taken = instruments.create_counter("paceline.engine.drafts_accepted", unit="{draft}")
        self._rounds = instruments.create_counter("paceline.engine.arm_rounds", unit="{round}")
        self._prompts = instruments.create_counter("paceline.engine.prompt_tokens", unit="{token}")
        self._hits = instruments.create_counter("paceline.engine.kv_hit_tokens", unit="{token}")
        self._hit_rate = instruments.create_gauge("paceline.engine.kv_hit_rate", unit="1")
        self._lookups = instruments.create_counter("paceline.engine.kv_lookups", unit="{lookup}")
        self._access = instruments.create_counter("paceline.engine.kv_access_time", unit="s")
        self._seen: dict[tuple[int | str, ...], float] = {}

    def ended(self, generation: Generation, seconds: float) -> None:
        """A request has ended `seconds` after it was queued."""
        whole = generation.whole
        if not whole.token_ids:
            return
        self._first.record(whole.time_to_first_token_s, self._labels)
        if len(whole.token_ids) > 1:
            rest = max(seconds - whole.time_to_first_token_s, 0.0)
            self._each.record(rest / (len(whole.token_ids) - 1), self._labels)
        stats = wire.stats_from(whole.speculation)
        if stats.drafted_rounds:
            self._accepted.record(stats.accept_length, self._labels)
        for position, (proposed, taken) in enumerate(zip(stats.proposed_at, stats.accepted_at, strict=True), 1):
            self._proposed.add(proposed, {**self._labels, "position": position})
            self._taken.add(taken, {**self._labels, "position": position})

    def arms(self, worker_index: int, stats: Iterable[pb.ArmStats]) -> None:
        """Rounds by arm and batch-size group since the last look; a restarted worker counts from 0."""
        for one in stats:
            new = int(self._new(one.pulls, worker_index, one.arm, one.batch_group))
            if new:
                self._rounds.add(new, {**self._labels, "arm": one.arm, "batch_group": one.batch_group})

    def prefixes(self, worker_index: int, stats: pb.PrefixStats) -> None:
        """Reuse of cached prompts since the last look; the hit rate is that of the worker since it started.

        Access time has two parts: "lookup" finds what is cached, "copy" brings it where it is read.
        """
        if not stats.prompt_tokens:
            return
        self._prompts.add(int(self._new(stats.prompt_tokens, worker_index, "prompt")), self._labels)
        self._hits.add(int(self._new(stats.reused_tokens, worker_index, "hit")), self._labels)
        self._lookups.add(int(self._new(stats.lookups, worker_index, "lookups")), self._labels)
        for part, seconds in (("lookup", stats.lookup_s), ("copy", stats.copy_s)):
            self._access.add(self._new(seconds, worker_index, part), {**self._labels, "part": part})
        self._hit_rate.set(stats.reused_tokens / stats.prompt_tokens, {**self._labels, "worker": worker_index})

    def _new(self, value: float, *key: int | str) -> float:
        """What a counter of a worker has grown by since the last look; all of it when the worker began anew."""
        before = self._seen.get(key, 0)
        self._seen[key] = value
        return value - before if value >= before else value


def describe(span: Span, whole: pb.TokenChunk) -> None:
    """What speculation did for a request, on its span."""
    stats = wire.stats_from(whole.speculation)
    span.set_attribute("response_tokens", len(whole.token_ids))
    span.set_attribute("target_steps", stats.target_steps)
    if stats.drafted_rounds:
        span.set_attribute("accept_length", stats.accept_length)


def describe_arms(span: Span, arms: Iterable[pb.ArmStats]) -> None:
    """Rounds by arm since the engines began, on the span of a rollout."""
    rounds: dict[str, int] = {}
    for one in arms:
        rounds[one.arm] = rounds.get(one.arm, 0) + one.pulls
    for arm, count in sorted(rounds.items()):
        span.set_attribute(f"arm_rounds.{arm}", count)
