"""Reports engine activity as metrics and span attributes, under the same names for every engine.

docs/metrics.md lists the names. A request counts when it ends. Workers are polled at the end of
every RunTasks, for GetStatus, and at a Prometheus scrape.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields

from opentelemetry.trace import Span

from paceline.arm_names import speculator_of
from paceline.services.rollout_gateway import metrics
from paceline.services.rollout_gateway.engines.nouns import RoundSplit
from paceline.services.rollout_gateway.workers.generation import Generation
from paceline.telemetry import get_logger, names
from paceline.telemetry.metrics import Counter, Labels
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

    def record_end(self, generation: Generation) -> None:
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

    def record_health(self, ready: pb.WorkerReady, health: pb.WorkerHealth) -> None:
        """Record a worker's health: only growth since the last poll counts.

        A process begins with counters of 0. Answers that arrive out of order count once.
        """
        life = self._lives.get(ready.worker_index)
        if life is None or life.pid != ready.pid:
            life = _Life(self._engine, ready.worker_index, ready.pid)
            self._lives[ready.worker_index] = life
        life.record_speed(health, ready.device_tflops)
        life.record_load(health)
        self.split += life.record_rounds(health.split)
        life.record_drafts(health.speculation)
        life.record_arms(health.arms)
        if health.prefixes.prompt_tokens:
            life.record_prefixes(health.prefixes)


class _Life:
    """One process of a worker, with its last counters."""

    def __init__(self, engine: str, worker: int, pid: int) -> None:
        self._engine = engine
        self._own: Labels = {"engine": engine, "worker": worker}
        self.pid = pid
        self._seen: dict[tuple[object, ...], float] = {}

    def _count(self, metric: Counter, value: float, **labels: str | float) -> float:
        """Record the growth of a counter since the last poll and return it; 0 for an older
        answer.
        """
        key = (metric.name, *labels.items())
        new = max(value - self._seen.get(key, 0), 0)
        if new:
            self._seen[key] = value
            metric.record(new, engine=self._engine, **labels)
        return new

    def record_speed(self, health: pb.WorkerHealth, tflops: float) -> None:
        """`tflops`: measured speed of the worker's device; 0: not measured."""
        worker = self._own["worker"]
        tokens = self._count(metrics.ENGINE_TOKENS, health.tokens_emitted, worker=worker)
        seconds = self._count(metrics.BUSY_TIME, health.busy_s, worker=worker)
        if seconds:
            metrics.TOKENS_PER_SECOND.record(tokens / seconds, **self._own)
        if tflops:
            metrics.DEVICE_TFLOPS.record(tflops, **self._own)
        if seconds and tflops:
            metrics.TOKENS_PER_SECOND_PER_TFLOPS.record(tokens / seconds / tflops, **self._own)

    def record_load(self, health: pb.WorkerHealth) -> None:
        """Requests, and rows that were left out."""
        metrics.ENGINE_REQUESTS.record(health.running, **self._own, state="running")
        metrics.ENGINE_REQUESTS.record(health.waiting, **self._own, state="waiting")
        self._count(metrics.ROWS_LEFT_OUT, health.rows_dropped, reason="no_room")
        self._count(metrics.ROWS_LEFT_OUT, health.rows_invalid, reason="invalid")

    def record_drafts(self, stats: tpb.SpeculationStats) -> None:
        """Counts of all sequences, running sequences included."""
        drafted, trained = stats.drafted_rounds, stats.trained_rounds
        rounds, tokens = metrics.SEQUENCE_ROUNDS, metrics.SEQUENCE_ROUND_TOKENS
        untrained_tokens = stats.drafted_round_tokens - stats.trained_round_tokens
        rejected = stats.drafted_tokens - stats.accepted_tokens
        self._count(rounds, stats.target_steps - drafted, drafts="none")
        self._count(rounds, drafted - trained, drafts="untrained")
        self._count(rounds, trained, drafts="trained")
        self._count(tokens, untrained_tokens, drafts="untrained")
        self._count(tokens, stats.trained_round_tokens, drafts="trained")
        self._count(metrics.DRAFTED_TOKENS, stats.accepted_tokens, fate="accepted")
        self._count(metrics.DRAFTED_TOKENS, rejected, fate="rejected")

    def record_rounds(self, split: pb.RoundSplit) -> RoundSplit:
        """The rounds since the last poll."""
        stages = {
            f"{stage}_s": self._count(metrics.ROUND_TIME, getattr(split, f"{stage}_s"), stage=stage)
            for stage in STAGES
        }
        rounds = int(self._count(metrics.ROUNDS, split.rounds))
        return RoundSplit(rounds, int(self._count(metrics.VERIFIED_TOKENS, split.nodes)), **stages)

    def record_arms(self, stats: Sequence[pb.ArmStats]) -> None:
        """All arms of a drafter report the same deaths."""
        for one in stats:
            arm: Labels = {"arm": one.arm, "batch_group": one.batch_group}
            self._count(metrics.ARM_ROUNDS, one.pulls, **arm)
            self._count(metrics.ARM_EXPLORATIONS, one.explorations, **arm)
            if one.mean_tokens_per_s > 0:
                speed, length = one.mean_tokens_per_s, one.mean_accept_length
                metrics.ARM_TOKENS_PER_SECOND.record(speed, **arm, **self._own)
                metrics.ARM_ACCEPT_LENGTH.record(length, **arm, **self._own)
            where: Labels = {
                "worker": self._own["worker"],
                "speculator": speculator_of(one.arm),
                "batch_group": one.batch_group,
            }
            if new := self._count(metrics.DEAD_DRAFTERS, one.drafter_deaths, **where):
                message = "a drafter's tokens are not accepted; its arms rest"
                log.warning(message, deaths=new, **where)
        if stats:
            metrics.REGRET.record(regret(stats), **self._own)

    def record_prefixes(self, stats: pb.PrefixStats) -> None:
        """Reuse of the KV of earlier prompts."""
        self._count(metrics.PROMPT_TOKENS, stats.prompt_tokens)
        self._count(metrics.KV_HIT_TOKENS, stats.reused_tokens)
        self._count(metrics.KV_LOOKUPS, stats.lookups)
        self._count(metrics.KV_ACCESS_TIME, stats.lookup_s, part="lookup")
        self._count(metrics.KV_ACCESS_TIME, stats.copy_s, part="copy")
        metrics.KV_HIT_RATE.record(stats.reused_tokens / stats.prompt_tokens, **self._own)


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
