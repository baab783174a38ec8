"""Replays given token ids under a cost table: an engine without model and torch, for tests and
benches.

It honours the whole engine contract (speculation arms chosen by the bandit, versions, pause modes,
capture, abort), so that everything above an engine can be tried in milliseconds. A response depends
on (prompt, seed) alone, never on arm, batch or time (replies.py chooses it, request.py
gives it out). Seconds come from a cost table (arm, batch size) and pass on an
injected clock: virtual by default, so that nothing sleeps; `real_time` sleeps them, for benches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from paceline.arm_names import speculator_of
from paceline.errors import FailedPrecondition, InvalidInput, WeightsError
from paceline.trajectory import SpeculationStats, Target, VersionSet
from rollout_gateway.bandits import CostSample, RoundOutcome, RowFacts, Situation, build_bandit
from rollout_gateway.bandits.evidence import Evidence
from rollout_gateway.engines.base import RowSink
from rollout_gateway.engines.nouns import (
    Capability,
    Chunk,
    EngineInfo,
    EngineLoad,
    Finish,
    MemoryTag,
    PauseMode,
    Request,
    RoundSplit,
    RowLayout,
    missing,
)
from rollout_gateway.engines.sampling import check_prompt, check_sampling
from rollout_gateway.testing.scripted.replies import Script
from rollout_gateway.testing.scripted.request import ScriptedRun
from rollout_gateway.testing.scripted.script import (
    CLOCKS,
    Clock,
    ScriptedSpec,
    scripted_rows,
)


class ScriptedEngine:
    """Engine of engines/base.py over a script."""

    def __init__(self, spec: ScriptedSpec, sink: RowSink | None, clock: Clock) -> None:
        self._spec = spec
        self._sink = sink
        self._clock = clock
        self._bandit = build_bandit(spec.bandit, spec.arms, spec.seed)
        self._bandit.prime(cost_samples(spec))
        self._tokenizer = Tokenizer.from_file(spec.tokenizer) if spec.tokenizer else None
        self._script = Script(spec, self._tokenizer)
        self._waiting: list[ScriptedRun] = []
        self._running: list[ScriptedRun] = []
        self._versions = VersionSet()
        self._prepared: set[tuple[Target, int]] = set()
        self._served = {(Target.POLICY, 0), (Target.DRAFTER, 0)}
        self._paused = False
        self._forced = ""
        self._tokens = 0
        self._busy_s = 0.0
        self._split = RoundSplit()
        self._stats = SpeculationStats()

    @property
    def info(self) -> EngineInfo:
        spec = self._spec
        return EngineInfo(
            spec.vocab_size,
            spec.hidden_size,
            spec.max_sequence_tokens,
            spec.arms,
            frozenset({Capability.CAPTURE, Capability.DRAFTER_UPDATE}),
            RowLayout.last(spec.hidden_size),
        )

    @property
    def versions(self) -> VersionSet:
        return self._versions

    @property
    def lm_head_hash(self) -> str:
        """A name of the policy version, since there are no weights."""
        return hashlib.sha256(f"scripted/{self._versions.policy}".encode()).hexdigest()[:16]

    @property
    def has_work(self) -> bool:
        return not self._paused and bool(self._running or self._waiting)

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(
            len(self._running),
            len(self._waiting),
            self._tokens,
            self._busy_s,
            self._stats,
            tuple(self._bandit.reports()),
            evidence=self._bandit.snapshot(),
            split=self._split,
        )

    def enqueue(self, request: Request) -> None:
        spec = self._spec
        check_prompt(request.prompt, spec.vocab_size, spec.max_sequence_tokens)
        check_sampling(request.sampling, spec.vocab_size)
        if request.sampling.stop and self._tokenizer is None:
            raise InvalidInput(
                "stop strings need the setting `tokenizer`", seen=request.sampling.stop
            )
        if request.sampling.adjusted:
            raise missing("scripted", Capability.PENALTIES)
        if request.sampling.json_schema:
            raise missing("scripted", Capability.JSON_SCHEMA)
        self._check_arm(request.forced_arm)
        self._waiting.append(self._run(request))

    def abort(self, request_ids: frozenset[int] | None) -> list[Chunk]:
        ended = [
            run
            for run in (*self._running, *self._waiting)
            if request_ids is None or run.request.request_id in request_ids
        ]
        self._running = [run for run in self._running if run not in ended]
        self._waiting = [run for run in self._waiting if run not in ended]
        return [run.news(Finish.ABORT) for run in ended]

    def step(self) -> list[Chunk]:
        room = self._spec.max_batch - len(self._running)
        self._running += self._waiting[:room]
        del self._waiting[:room]
        batch = list(self._running)
        if any(self._spec.fault_token in run.request.prompt for run in batch):
            raise RuntimeError("the script asks for a fault")
        situation = self._situation(batch)
        arm, explored = self._choose(batch, situation)
        cost = self._cost(arm, len(batch))
        self._clock.spend(cost)
        before = [run.emitted for run in batch]
        finishes = {run.request.request_id: self._advance(run, arm) for run in batch}
        self._busy_s += cost
        # A script knows a round's seconds as a whole.
        self._split += RoundSplit(rounds=1, nodes=len(batch) * (1 + _drafts(arm)), forward_s=cost)
        taken = [
            min(run.emitted - known, 1 + _drafts(arm))
            for run, known in zip(batch, before, strict=True)
        ]
        self._bandit.observe(RoundOutcome(arm, situation, taken, cost, explored))
        self._running = [run for run in batch if finishes[run.request.request_id] is None]
        return [
            run.news(finishes[run.request.request_id])
            for run in batch
            if run.request.stream or finishes[run.request.request_id] is not None
        ]

    def pause(self, mode: PauseMode) -> list[Chunk]:
        self._paused = True
        return self._apply(mode)

    def resume(self) -> None:
        self._paused = False

    def prepare_weights(self, target: Target, version: int, path: Path) -> None:
        if not path.is_dir():
            raise WeightsError("no such version in the spool", seen=path)
        self._prepared.add((target, version))

    def commit_weights(self, versions: VersionSet, mode: PauseMode) -> list[Chunk]:
        parts = {(Target.POLICY, versions.policy), (Target.DRAFTER, versions.drafter)}
        missing = parts - self._prepared - self._served
        if missing:
            raise WeightsError(
                "a part of the set is not prepared",
                seen=sorted(missing),
                reason="WEIGHTS_NOT_PREPARED",
            )
        changed = versions.policy != self._versions.policy
        self._forget(versions)
        self._versions = versions
        self._prepared -= parts
        self._served |= parts
        return self._apply(mode) if changed else []

    def abort_weights(self, target: Target, version: int) -> None:
        self._prepared.discard((target, version))

    def force_arm(self, arm: str) -> None:
        self._check_arm(arm)
        self._forced = arm

    def merge_evidence(self, evidence: Evidence) -> None:
        self._bandit.merge(evidence)

    def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """See Engine.release_memory."""
        raise missing("scripted", Capability.RELEASE_MEMORY)

    def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """See Engine.resume_memory."""
        raise missing("scripted", Capability.RELEASE_MEMORY)

    def flush_cache(self) -> None:
        """See Engine.flush_cache; there is none."""
        if self.has_work:
            raise FailedPrecondition("requests run; abort them or wait", seen=self.load.running)

    def close(self) -> None:
        self._running, self._waiting = [], []

    def _run(self, request: Request) -> ScriptedRun:
        spec, sampling = self._spec, request.sampling
        limit = min(sampling.max_tokens, spec.max_sequence_tokens - len(request.prompt))
        end_tokens = {*sampling.stop_token_ids} | (
            set() if sampling.ignore_eos else {spec.eos_token_id}
        )
        answer = self._script.answer(request.prompt, sampling.seed)
        return ScriptedRun(request, answer, limit, frozenset(end_tokens), self._clock.now())

    def _check_arm(self, arm: str) -> None:
        if arm and arm not in self._spec.arms:
            raise InvalidInput("unknown arm", seen=arm, allowed=", ".join(self._spec.arms))

    def _apply(self, mode: PauseMode) -> list[Chunk]:
        if mode is PauseMode.ABORT:
            return self.abort(None)
        if mode is PauseMode.RETRACT:
            for run in self._running:
                run.rows_written = 0  # the rebuilt cache gives new rows
        return []

    def _forget(self, versions: VersionSet) -> None:
        """Tell the bandit which weights change; the trainable drafter is the EAGLE one."""
        if versions.policy != self._versions.policy:
            self._bandit.forget({arm for arm in self._spec.arms if arm != "off"}, Target.POLICY)
        if versions.drafter != self._versions.drafter:
            self._bandit.forget(
                {arm for arm in self._spec.arms if arm.startswith("eagle")}, Target.DRAFTER
            )

    def _situation(self, batch: list[ScriptedRun]) -> Situation:
        rows = [RowFacts(run.request.request_id, run.emitted, run.limit) for run in batch]
        context = max(len(run.request.prompt) + run.emitted for run in batch)
        return Situation(rows, context, draining=not self._waiting)

    def _choose(self, batch: list[ScriptedRun], situation: Situation) -> tuple[str, bool]:
        forced = self._forced or next(
            (run.request.forced_arm for run in batch if run.request.forced_arm), ""
        )
        if forced:
            return forced, False
        choice = self._bandit.choose(situation)
        return choice.arm, choice.explored

    def _cost(self, arm: str, batch: int) -> float:
        table = self._spec.costs_s.get(arm, {})
        sizes = [size for size in table if size <= batch]
        return table[max(sizes)] if sizes else self._spec.default_cost_s

    def _advance(self, run: ScriptedRun, arm: str) -> Finish | None:
        """Emit one round's tokens of a request; its finish if it ended."""
        drafted = arm != "off"
        before = run.emitted
        finish = run.emit(self._wanted(run, arm), self._versions.policy, self._tokenizer)
        emitted = run.emitted - before
        taken = min(
            emitted, 1 + _drafts(arm)
        )  # a reply's own pace may exceed what the arm could accept
        proposed, trained = _drafts(arm), drafted and speculator_of(arm) != "ngram"
        levels = range(proposed if drafted else 0)
        stats = SpeculationStats(
            1,
            proposed,
            taken - 1 if drafted else 0,
            taken * drafted,
            int(drafted),
            tuple(1 for _ in levels),
            tuple(int(level < taken - 1) for level in levels),
            int(trained),
            taken * trained,
        )
        run.stats += stats
        self._stats += stats
        self._tokens += emitted
        run.first_token_s = run.first_token_s or self._clock.now() - run.enqueued_s
        self._write_rows(run)
        return finish

    def _wanted(self, run: ScriptedRun, arm: str) -> int:
        """Tokens of this round: the reply's own pace, else what the arm accepts."""
        if run.answer.tokens_per_round is not None:
            return run.answer.tokens_per_round
        run.credit += self._spec.accept_lengths.get(arm, 1.0) if arm != "off" else 1.0
        wanted = max(int(run.credit), 1)
        run.credit = max(run.credit - wanted, 0.0)
        return wanted

    def _write_rows(self, run: ScriptedRun) -> None:
        if self._sink is None or not run.request.capture:
            return
        tokens, positions = run.unwritten()
        rows = scripted_rows(tokens, positions, self._spec.hidden_size, self._spec.features_dtype)
        ids = np.full(len(tokens), run.request.request_id, dtype=np.uint64)
        self._sink.write(ids, positions, tokens, self._versions.policy, rows)


def _drafts(arm: str) -> int:
    """Drafts per row of `<speculator>:<steps>_<topk>_<draft tokens>`, whose first node is the last
    known token.
    """
    return 0 if arm == "off" else int(arm.rpartition("_")[2]) - 1


def cost_samples(spec: ScriptedSpec) -> list[CostSample]:
    """The script's cost table as what an engine measures at its start; it knows no context."""
    return [
        CostSample(arm, batch, 1, seconds)
        for arm, sizes in spec.costs_s.items()
        if arm in spec.arms
        for batch, seconds in sizes.items()
    ]


def build_scripted(
    spec: ScriptedSpec, sink: RowSink | None = None, clock: Clock | None = None
) -> ScriptedEngine:
    """The engine of a script; `clock` replaces the one `real_time` names."""
    return ScriptedEngine(spec, sink, clock or CLOCKS[spec.real_time]())
