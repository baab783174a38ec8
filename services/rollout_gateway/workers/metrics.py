"""Reports engine activity as metrics and span attributes, under the same names for every engine.

docs/metrics.md lists the names. A request counts when it ends. Workers are polled at the end of
every RunTasks, for GetStatus, and at a Prometheus scrape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from opentelemetry.trace import Span

from paceline.arm_names import speculator_of
from paceline.services.rollout_gateway import metrics
from paceline.services.rollout_gateway.engines.nouns import RoundSplit
from paceline.services.rollout_gateway.workers.generation import Generation
from paceline.telemetry import get_logger, names
from paceline.telemetry.metrics import Labels
from paceline.trajectory import SpeculationStats
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb


def regret(arms: Iterable[pb.ArmStats]) -> float:
    """Share of tokens per second lost to arms other than the best arm in hindsight; 0 to 1, 0
    without rounds.

    Of group g with arms a, n_a rounds and mean m_a tokens/s: sum_a n_a (max m - m_a) / max m,
    summed over the groups and divided by all their rounds.

    This is an estimate. Each arm is judged by the mean of its own rounds, although their batch
    sizes and contexts differ from other arms'. The mean covers the window, while rounds count since
    the start. An arm without a round in the window is left out.
    """
    groups: dict[int, list[pb.ArmStats]] = {}
    for one in arms:
        if one.pulls and one.mean_tokens_per_s > 0:
            groups.setdefault(one.batch_group, []).append(one)
    lost, rounds = 0.0, 0
    for group in groups.values():
        best = max(one.mean_tokens_per_s for one in group)
        lost += sum(one.pulls * (best - one.mean_tokens_per_s) / best for one in group)
        rounds += sum(one.pulls for one in group)

    return lost / rounds if rounds else 0.0


STAGES = tuple(one.name.removesuffix("_s") for one in fields(RoundSplit) if one.name.endswith("_s"))
"""Stages of a round with a measured time."""

log = get_logger(__name__)


class EngineMetrics:
    """Instruments of one gateway. `engine` is the engine kind and labels every point."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._lives: dict[int, _Life] = {}
        self.split = RoundSplit()
        """Sum of the rounds of all workers up to the last poll; not changed in place."""

    def ended(self, generation: Generation) -> None:
        """Record an ended request."""
        whole, engine = generation.whole, self._engine
        if not whole.token_ids or generation.request.probe:
            return
        metrics.TIME_TO_FIRST_TOKEN.record(whole.time_to_first_token_s, engine=engine)
        if generation.time_per_output_token_s is not None:
            metrics.TIME_PER_OUTPUT_TOKEN.record(generation.time_per_output_token_s, engine=engine)
        stats = generation.speculation
        if stats.drafted_rounds:
            metrics.ACCEPT_LENGTH.record(stats.accept_length, engine=engine)
        for position, (proposed, taken) in enumerate(
            zip(stats.proposed_at, stats.accepted_at, strict=True), 1
        ):
            metrics.DRAFTS_PROPOSED.record(proposed, engine=engine, position=position)
            metrics.DRAFTS_ACCEPTED.record(taken, engine=engine, position=position)

    def look(self, ready: pb.WorkerReady, health: pb.WorkerHealth) -> None:
        """Record a worker's health: only growth since the last poll counts.

        A process begins with counters of 0. Answers that arrive out of order count once.
        """
        life = self._lives.get(ready.worker_index)
        if life is None or life.pid != ready.pid:
            life = self._lives[ready.worker_index] = _Life(ready.pid)
        self._speed(life, ready, health)
        self._load(life, ready.worker_index, health)
        self._rounds(life, health.split)
        self._drafts(life, health.speculation)
        self._arms(life, ready.worker_index, health.arms)
        self._deaths(life, ready.worker_index, health.arms)
        self._prefixes(life, ready.worker_index, health.prefixes)

    def _speed(self, life: _Life, ready: pb.WorkerReady, health: pb.WorkerHealth) -> None:
        labels: Labels = {"engine": self._engine, "worker": ready.worker_index}
        tokens = life.grown(health.tokens_emitted, "tokens")
        seconds = life.grown(health.busy_s, "busy")
        metrics.ENGINE_TOKENS.record(int(tokens), **labels)
        metrics.BUSY_TIME.record(seconds, **labels)
        if ready.device_tflops:
            metrics.DEVICE_TFLOPS.record(ready.device_tflops, **labels)
        if seconds:
            speed = tokens / seconds
            metrics.TOKENS_PER_SECOND.record(speed, **labels)
            if ready.device_tflops:
                metrics.TOKENS_PER_SECOND_PER_TFLOPS.record(speed / ready.device_tflops, **labels)

    def _load(self, life: _Life, worker: int, health: pb.WorkerHealth) -> None:
        labels: Labels = {"engine": self._engine, "worker": worker}
        metrics.ENGINE_REQUESTS.record(health.running, **labels, state="running")
        metrics.ENGINE_REQUESTS.record(health.waiting, **labels, state="waiting")
        for reason, rows in (
            ("no_room", health.rows_dropped),
            ("invalid", health.rows_invalid),
        ):
            if new := int(life.grown(rows, "rows", reason)):
                metrics.ROWS_LEFT_OUT.record(new, engine=self._engine, reason=reason)

    def _drafts(self, life: _Life, told: tpb.SpeculationStats) -> None:
        """Counts of all sequences, running sequences included."""
        names = [one.name for one in fields(SpeculationStats) if one.type == "int"]
        new: dict[str, Any] = {
            name: int(life.grown(getattr(told, name), "drafts", name)) for name in names
        }
        stats = SpeculationStats(**new)
        if not stats.target_steps:
            return
        untrained = stats.drafted_rounds - stats.trained_rounds
        plain = stats.target_steps - stats.drafted_rounds
        rounds = {"none": plain, "untrained": untrained, "trained": stats.trained_rounds}
        tokens = {
            "untrained": stats.drafted_round_tokens - stats.trained_round_tokens,
            "trained": stats.trained_round_tokens,
        }
        fates = {
            "accepted": stats.accepted_tokens,
            "rejected": stats.drafted_tokens - stats.accepted_tokens,
        }
        for metric, label, counts in (
            (metrics.SEQUENCE_ROUNDS, "drafts", rounds),
            (metrics.SEQUENCE_ROUND_TOKENS, "drafts", tokens),
            (metrics.DRAFTED_TOKENS, "fate", fates),
        ):
            for kind, count in counts.items():
                if count > 0:
                    metric.record(count, **{"engine": self._engine, label: kind})

    def _rounds(self, life: _Life, told: pb.RoundSplit) -> None:
        names = [one.name for one in fields(RoundSplit)]
        new = {name: life.grown(getattr(told, name), "split", name) for name in names}
        split = RoundSplit(int(new.pop("rounds")), int(new.pop("nodes")), **new)
        if not split.rounds:
            return
        metrics.ROUNDS.record(split.rounds, engine=self._engine)
        metrics.VERIFIED_TOKENS.record(split.nodes, engine=self._engine)
        for stage in STAGES:
            metrics.ROUND_TIME.record(
                getattr(split, f"{stage}_s"), engine=self._engine, stage=stage
            )
        self.split += split

    def _arms(self, life: _Life, worker: int, stats: Sequence[pb.ArmStats]) -> None:
        for one in stats:
            arm: Labels = {
                "engine": self._engine,
                "arm": one.arm,
                "batch_group": one.batch_group,
            }
            if new := int(life.grown(one.pulls, "pulls", one.arm, one.batch_group)):
                metrics.ARM_ROUNDS.record(new, **arm)
            if new := int(life.grown(one.explorations, "explored", one.arm, one.batch_group)):
                metrics.ARM_EXPLORATIONS.record(new, **arm)
            if one.mean_tokens_per_s > 0:
                speed, length = one.mean_tokens_per_s, one.mean_accept_length
                metrics.ARM_TOKENS_PER_SECOND.record(speed, **arm, worker=worker)
                metrics.ARM_ACCEPT_LENGTH.record(length, **arm, worker=worker)
        if stats:
            metrics.REGRET.record(regret(stats), engine=self._engine, worker=worker)

    def _deaths(self, life: _Life, worker: int, stats: Sequence[pb.ArmStats]) -> None:
        """All arms of a drafter report the same deaths."""
        for one in stats:
            speculator, group = speculator_of(one.arm), one.batch_group
            new = int(life.grown(one.drafter_deaths, "deaths", speculator, group))
            if new:
                where: Labels = {
                    "worker": worker,
                    "speculator": speculator,
                    "batch_group": group,
                }
                metrics.DEAD_DRAFTERS.record(new, engine=self._engine, **where)
                log.warning(
                    "a drafter's tokens are not accepted; its arms rest", deaths=new, **where
                )

    def _prefixes(self, life: _Life, worker: int, stats: pb.PrefixStats) -> None:
        if not stats.prompt_tokens:
            return
        engine = self._engine
        metrics.PROMPT_TOKENS.record(int(life.grown(stats.prompt_tokens, "prompt")), engine=engine)
        metrics.KV_HIT_TOKENS.record(int(life.grown(stats.reused_tokens, "hit")), engine=engine)
        metrics.KV_LOOKUPS.record(int(life.grown(stats.lookups, "lookups")), engine=engine)
        for part, seconds in (("lookup", stats.lookup_s), ("copy", stats.copy_s)):
            metrics.KV_ACCESS_TIME.record(
                life.grown(seconds, "access", part), engine=engine, part=part
            )
        metrics.KV_HIT_RATE.record(
            stats.reused_tokens / stats.prompt_tokens, engine=engine, worker=worker
        )


@dataclass(slots=True)
class _Life:
    """One process of a worker, with its last counters."""

    pid: int
    seen: dict[tuple[int | str, ...], float] = field(default_factory=dict)

    def grown(self, value: float, *key: int | str) -> float:
        """Growth of a counter since the last poll; 0 for an older answer."""
        new = max(value - self.seen.get(key, 0), 0)
        self.seen[key] = self.seen.get(key, 0) + new
        return new


def describe(span: Span, generation: Generation) -> None:
    """Set an ended request's results on its span."""
    whole = generation.whole
    stats = generation.speculation
    span.set_attribute(names.GEN_AI_OUTPUT_TOKENS, len(whole.token_ids))
    span.set_attribute(names.GEN_AI_CACHED_TOKENS, whole.cached_prompt_tokens)
    span.set_attribute(names.TARGET_STEPS, stats.target_steps)
    if whole.token_ids:
        span.set_attribute(names.GEN_AI_FIRST_CHUNK_S, whole.time_to_first_token_s)
    if generation.time_per_output_token_s is not None:
        span.set_attribute(names.TIME_PER_OUTPUT_TOKEN_S, generation.time_per_output_token_s)
    if stats.drafted_rounds:
        span.set_attribute(names.ACCEPT_LENGTH, stats.accept_length)


def describe_rounds(span: Span, finished: rpb.TasksFinished, split: RoundSplit) -> None:
    """Set a rollout's results on its span: rounds by arm and regret since the engines' start, and
    the split of rounds.

    split: of the rounds since the last poll before the rollout.
    """
    rounds: dict[str, int] = {}
    for one in finished.arms:
        rounds[one.arm] = rounds.get(one.arm, 0) + one.pulls
    for arm, count in sorted(rounds.items()):
        span.set_attribute(names.arm_rounds(arm), count)
    span.set_attribute(names.REGRET, finished.regret)
    if split.rounds:
        span.set_attribute(names.ROUNDS, split.rounds)
        span.set_attribute(names.VERIFIED_TOKENS, split.nodes)
        for stage in STAGES:
            span.set_attribute(names.round_time_s(stage), getattr(split, f"{stage}_s"))
