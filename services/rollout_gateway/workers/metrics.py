"""Reports engine activity as metrics and span attributes, under the same names for every engine.

docs/metrics.md lists the names. A request counts when it ends. Workers are polled at the end of
every RunTasks, for GetStatus, and at a Prometheus scrape.
"""

from collections.abc import Iterable, Iterator
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
        # by worker: its process id, and its counters at the last poll
        self._seen: dict[int, tuple[int, dict[tuple[object, ...], float]]] = {}
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
        pairs = zip(stats.proposed_at, stats.accepted_at, strict=True)
        for position, (proposed, taken) in enumerate(pairs, 1):
            metrics.DRAFTS_PROPOSED.record(proposed, engine=engine, position=position)
            metrics.DRAFTS_ACCEPTED.record(taken, engine=engine, position=position)

    def record_health(self, ready: pb.WorkerReady, health: pb.WorkerHealth) -> None:
        """Record a worker's health: only growth since the last poll counts.

        A process begins with counters of 0. Answers that arrive out of order count once.
        """
        index = ready.worker_index
        own: Labels = {"engine": self._engine, "worker": index}
        pid, seen = self._seen.get(index, (0, {}))
        if pid != ready.pid:
            seen = {}
        self._seen[index] = ready.pid, seen
        new: dict[tuple[Counter, str | float], float] = {}
        for metric, value, labels in _counters(index, health):
            key = (metric.name, *labels.items())
            growth = max(value - seen.get(key, 0), 0)
            if growth:
                seen[key] = value
                metric.record(growth, engine=self._engine, **labels)
            new[metric, labels.get("stage", "")] = growth
            if growth and metric is metrics.DEAD_DRAFTERS:
                message = "a drafter's tokens are not accepted; its arms rest"
                log.warning(message, deaths=growth, **labels)

        tokens, seconds = new[metrics.ENGINE_TOKENS, ""], new[metrics.BUSY_TIME, ""]
        _record_gauges(own, health, tokens / seconds if seconds else None, ready.device_tflops)
        stages = {f"{stage}_s": new[metrics.ROUND_TIME, stage] for stage in STAGES}
        rounds, nodes = new[metrics.ROUNDS, ""], new[metrics.VERIFIED_TOKENS, ""]
        self.split += RoundSplit(int(rounds), int(nodes), **stages)


def _counters(worker: int, health: pb.WorkerHealth) -> Iterator[tuple[Counter, float, Labels]]:
    """Every counter of a worker since its process began, with its labels besides the engine."""
    stats, split, prefixes = health.speculation, health.split, health.prefixes
    drafted, trained = stats.drafted_rounds, stats.trained_rounds
    rounds, tokens = metrics.SEQUENCE_ROUNDS, metrics.SEQUENCE_ROUND_TOKENS
    untrained_tokens = stats.drafted_round_tokens - stats.trained_round_tokens
    rejected = stats.drafted_tokens - stats.accepted_tokens
    yield metrics.ENGINE_TOKENS, health.tokens_emitted, {"worker": worker}
    yield metrics.BUSY_TIME, health.busy_s, {"worker": worker}
    yield metrics.ROWS_LEFT_OUT, health.rows_dropped, {"reason": "no_room"}
    yield metrics.ROWS_LEFT_OUT, health.rows_invalid, {"reason": "invalid"}
    yield metrics.ROUNDS, split.rounds, {}
    yield metrics.VERIFIED_TOKENS, split.nodes, {}
    for stage in STAGES:
        yield metrics.ROUND_TIME, getattr(split, f"{stage}_s"), {"stage": stage}
    # of all sequences, running sequences included
    yield rounds, stats.target_steps - drafted, {"drafts": "none"}
    yield rounds, drafted - trained, {"drafts": "untrained"}
    yield rounds, trained, {"drafts": "trained"}
    yield tokens, untrained_tokens, {"drafts": "untrained"}
    yield tokens, stats.trained_round_tokens, {"drafts": "trained"}
    yield metrics.DRAFTED_TOKENS, stats.accepted_tokens, {"fate": "accepted"}
    yield metrics.DRAFTED_TOKENS, rejected, {"fate": "rejected"}
    for one in health.arms:
        group = one.batch_group
        arm: Labels = {"arm": one.arm, "batch_group": group}
        yield metrics.ARM_ROUNDS, one.pulls, arm
        yield metrics.ARM_EXPLORATIONS, one.explorations, arm
        # all arms of a drafter report the same deaths
        speculator = speculator_of(one.arm)
        drafter: Labels = {"worker": worker, "speculator": speculator, "batch_group": group}
        yield metrics.DEAD_DRAFTERS, one.drafter_deaths, drafter
    yield metrics.PROMPT_TOKENS, prefixes.prompt_tokens, {}
    yield metrics.KV_HIT_TOKENS, prefixes.reused_tokens, {}
    yield metrics.KV_LOOKUPS, prefixes.lookups, {}
    yield metrics.KV_ACCESS_TIME, prefixes.lookup_s, {"part": "lookup"}
    yield metrics.KV_ACCESS_TIME, prefixes.copy_s, {"part": "copy"}


def _record_gauges(
    own: Labels, health: pb.WorkerHealth, speed: float | None, tflops: float
) -> None:
    """`speed`: tokens per busy second since the last poll; None: no work. `tflops`: measured
    speed of the worker's device; 0: not measured.
    """
    metrics.ENGINE_REQUESTS.record(health.running, **own, state="running")
    metrics.ENGINE_REQUESTS.record(health.waiting, **own, state="waiting")
    if speed is not None:
        metrics.TOKENS_PER_SECOND.record(speed, **own)
    if tflops:
        metrics.DEVICE_TFLOPS.record(tflops, **own)
    if speed is not None and tflops:
        metrics.TOKENS_PER_SECOND_PER_TFLOPS.record(speed / tflops, **own)
    for one in health.arms:
        if one.mean_tokens_per_s > 0:
            arm: Labels = {**own, "arm": one.arm, "batch_group": one.batch_group}
            metrics.ARM_TOKENS_PER_SECOND.record(one.mean_tokens_per_s, **arm)
            metrics.ARM_ACCEPT_LENGTH.record(one.mean_accept_length, **arm)
    if health.arms:
        metrics.REGRET.record(regret(health.arms), **own)
    if prompt_tokens := health.prefixes.prompt_tokens:
        metrics.KV_HIT_RATE.record(health.prefixes.reused_tokens / prompt_tokens, **own)


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
        times = {names.round_time_s(one): getattr(split, f"{one}_s") for one in STAGES}
        counts = {names.ROUNDS: split.rounds, names.VERIFIED_TOKENS: split.nodes}
        span.set_attributes(counts | times)
