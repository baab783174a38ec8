"""Reports what engines do as metrics and span attributes, under the same names for every engine.

docs/metrics.md lists the names. Requests are counted when they end, workers when somebody looks: at
the end of every RunTasks, for GetStatus, and when Prometheus asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from opentelemetry.metrics import Meter
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from paceline.arm_names import speculator_of
from paceline.messages import stats_from_proto
from paceline.telemetry import get_logger, meter
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import rollout_pb2 as rpb
from rollout_gateway.engines.nouns import RoundSplit
from rollout_gateway.workers.generation import Generation
from rollout_gateway.workers.regret import regret

# 15 ms and 50 ms are the lines of the service level.
TOKEN_BOUNDARIES_S = [0.002, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0]
FIRST_BOUNDARIES_S = [0.01, 0.015, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0]
LENGTH_BOUNDARIES = [1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0]
STAGES = tuple(one.name.removesuffix("_s") for one in fields(RoundSplit) if one.name.endswith("_s"))
"""Parts of a round whose seconds are told."""

log = get_logger(__name__)


class EngineMetrics:
    """Instruments of one gateway; `engine` is the kind and labels every point."""

    def __init__(self, engine: str) -> None:
        self._labels: dict[str, AttributeValue] = {"engine": engine}
        self._requests = _RequestInstruments(meter())
        self._instruments = _WorkerInstruments(meter())
        self._lives: dict[int, _Life] = {}
        self.split = RoundSplit()
        """Where the rounds of all workers went, up to the last look; not changed in place."""

    def ended(self, generation: Generation) -> None:
        """A request has ended."""
        whole, instruments = generation.whole, self._requests
        if not whole.token_ids:
            return
        instruments.first.record(whole.time_to_first_token_s, self._labels)
        if generation.time_per_output_token_s is not None:
            instruments.each.record(generation.time_per_output_token_s, self._labels)
        stats = stats_from_proto(whole.speculation)
        if stats.drafted_rounds:
            instruments.accept_length.record(stats.accept_length, self._labels)
        for position, (proposed, taken) in enumerate(
            zip(stats.proposed_at, stats.accepted_at, strict=True), 1
        ):
            instruments.proposed.add(proposed, {**self._labels, "position": position})
            instruments.accepted.add(taken, {**self._labels, "position": position})

    def look(self, ready: pb.WorkerReady, health: pb.WorkerHealth) -> None:
        """What a worker says of itself now; only what has come since the last look is counted.

        A process begins with counters of 0. Answers that overtake each other count once.
        """
        life = self._lives.get(ready.worker_index)
        if life is None or life.pid != ready.pid:
            life = self._lives[ready.worker_index] = _Life(ready.pid)
        self._speed(life, ready, health)
        self._rounds(life, health.split)
        self._arms(life, ready.worker_index, health.arms)
        self._deaths(life, ready.worker_index, health.arms)
        self._prefixes(life, ready.worker_index, health.prefixes)

    def _speed(self, life: _Life, ready: pb.WorkerReady, health: pb.WorkerHealth) -> None:
        labels = {**self._labels, "worker": ready.worker_index}
        instruments = self._instruments
        tokens, seconds = (
            life.grown(health.tokens_emitted, "tokens"),
            life.grown(health.busy_s, "busy"),
        )
        instruments.tokens.add(int(tokens), labels)
        instruments.busy.add(seconds, labels)
        if ready.device_tflops:
            instruments.tflops.set(ready.device_tflops, labels)
        if seconds:
            instruments.speed.set(tokens / seconds, labels)
            if ready.device_tflops:
                instruments.speed_per_tflops.set(tokens / seconds / ready.device_tflops, labels)

    def _rounds(self, life: _Life, told: pb.RoundSplit) -> None:
        names = [one.name for one in fields(RoundSplit)]
        new = {name: life.grown(getattr(told, name), "split", name) for name in names}
        split = RoundSplit(int(new.pop("rounds")), int(new.pop("nodes")), **new)
        if not split.rounds:
            return
        self._instruments.rounds.add(split.rounds, self._labels)
        self._instruments.verified.add(split.nodes, self._labels)
        for stage in STAGES:
            self._instruments.stages.add(
                getattr(split, f"{stage}_s"), {**self._labels, "stage": stage}
            )
        self.split += split

    def _arms(self, life: _Life, worker: int, stats: Sequence[pb.ArmStats]) -> None:
        for one in stats:
            new = int(life.grown(one.pulls, "pulls", one.arm, one.batch_group))
            if new:
                labels = {**self._labels, "arm": one.arm, "batch_group": one.batch_group}
                self._instruments.arm_rounds.add(new, labels)
        if stats:
            self._instruments.regret.set(regret(stats), {**self._labels, "worker": worker})

    def _deaths(self, life: _Life, worker: int, stats: Sequence[pb.ArmStats]) -> None:
        """All arms of a drafter tell of the same deaths."""
        for one in stats:
            speculator, group = speculator_of(one.arm), one.batch_group
            new = int(life.grown(one.drafter_deaths, "deaths", speculator, group))
            if new:
                where: dict[str, int | str] = {
                    "worker": worker,
                    "speculator": speculator,
                    "batch_group": group,
                }
                self._instruments.deaths.add(new, {**self._labels, **where})
                log.warning(
                    "a drafter's tokens are not accepted; its arms rest", deaths=new, **where
                )

    def _prefixes(self, life: _Life, worker: int, stats: pb.PrefixStats) -> None:
        """Access time has two parts: "lookup" finds what is cached, "copy" brings it where it is
        read.
        """
        instruments = self._instruments
        if not stats.prompt_tokens:
            return
        instruments.prompts.add(int(life.grown(stats.prompt_tokens, "prompt")), self._labels)
        instruments.hits.add(int(life.grown(stats.reused_tokens, "hit")), self._labels)
        instruments.lookups.add(int(life.grown(stats.lookups, "lookups")), self._labels)
        for part, seconds in (("lookup", stats.lookup_s), ("copy", stats.copy_s)):
            instruments.access.add(
                life.grown(seconds, "access", part), {**self._labels, "part": part}
            )
        instruments.hit_rate.set(
            stats.reused_tokens / stats.prompt_tokens, {**self._labels, "worker": worker}
        )


@dataclass(slots=True)
class _Life:
    """One process of a worker: its counters as they were last seen."""

    pid: int
    seen: dict[tuple[int | str, ...], float] = field(default_factory=dict)

    def grown(self, value: float, *key: int | str) -> float:
        """What a counter has grown by since the last look; 0 for an older answer."""
        new = max(value - self.seen.get(key, 0), 0)
        self.seen[key] = self.seen.get(key, 0) + new
        return new


class _RequestInstruments:
    """Recorded once per request."""

    def __init__(self, made_by: Meter) -> None:
        histogram, counter = made_by.create_histogram, made_by.create_counter
        self.first = histogram(
            "paceline.engine.time_to_first_token",
            unit="s",
            explicit_bucket_boundaries_advisory=FIRST_BOUNDARIES_S,
        )
        self.each = histogram(
            "paceline.engine.time_per_output_token",
            unit="s",
            explicit_bucket_boundaries_advisory=TOKEN_BOUNDARIES_S,
        )
        self.accept_length = histogram(
            "paceline.engine.accept_length",
            unit="{token}",
            explicit_bucket_boundaries_advisory=LENGTH_BOUNDARIES,
        )
        self.proposed = counter("paceline.engine.drafts_proposed", unit="{draft}")
        self.accepted = counter("paceline.engine.drafts_accepted", unit="{draft}")


class _WorkerInstruments:
    """Recorded at each look."""

    def __init__(self, made_by: Meter) -> None:
        counter, gauge = made_by.create_counter, made_by.create_gauge
        self.tokens = counter("paceline.engine.tokens", unit="{token}")
        self.busy = counter("paceline.engine.busy_time", unit="s")
        self.speed = gauge("paceline.engine.tokens_per_second", unit="{token}/s")
        self.tflops = gauge("paceline.engine.device_tflops", unit="{Tflop}")
        self.speed_per_tflops = gauge(
            "paceline.engine.tokens_per_second_per_tflops", unit="{token}/{Tflop}"
        )
        self.rounds = counter("paceline.engine.rounds", unit="{round}")
        self.verified = counter("paceline.engine.verified_tokens", unit="{token}")
        self.stages = counter("paceline.engine.round_time", unit="s")
        self.arm_rounds = counter("paceline.engine.arm_rounds", unit="{round}")
        self.regret = gauge("paceline.engine.regret", unit="1")
        self.deaths = counter("paceline.engine.dead_drafters", unit="{drafter}")
        self.prompts = counter("paceline.engine.prompt_tokens", unit="{token}")
        self.hits = counter("paceline.engine.kv_hit_tokens", unit="{token}")
        self.hit_rate = gauge("paceline.engine.kv_hit_rate", unit="1")
        self.lookups = counter("paceline.engine.kv_lookups", unit="{lookup}")
        self.access = counter("paceline.engine.kv_access_time", unit="s")


def describe(span: Span, generation: Generation) -> None:
    """How a request that has ended went, on its span."""
    whole = generation.whole
    stats = stats_from_proto(whole.speculation)
    span.set_attribute("response_tokens", len(whole.token_ids))
    span.set_attribute("cached_prompt_tokens", whole.cached_prompt_tokens)
    span.set_attribute("target_steps", stats.target_steps)
    if whole.token_ids:
        span.set_attribute("time_to_first_token_s", whole.time_to_first_token_s)
    if generation.time_per_output_token_s is not None:
        span.set_attribute("time_per_output_token_s", generation.time_per_output_token_s)
    if stats.drafted_rounds:
        span.set_attribute("accept_length", stats.accept_length)


def describe_rounds(span: Span, finished: rpb.TasksFinished, split: RoundSplit) -> None:
    """On the span of a rollout: rounds by arm and the regret since the engines began, the split of
    rounds since a look.

    split: of the rounds since the last look before the rollout.
    """
    rounds: dict[str, int] = {}
    for one in finished.arms:
        rounds[one.arm] = rounds.get(one.arm, 0) + one.pulls
    for arm, count in sorted(rounds.items()):
        span.set_attribute(f"arm_rounds.{arm}", count)
    span.set_attribute("regret", finished.regret)
    if split.rounds:
        span.set_attribute("rounds", split.rounds)
        span.set_attribute("verified_tokens", split.nodes)
        for stage in STAGES:
            span.set_attribute(f"round_time.{stage}_s", getattr(split, f"{stage}_s"))
