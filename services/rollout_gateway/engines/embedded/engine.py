"""The embedded PyTorch engine: requests, control, and the loop admit, prefill, decode, emit.

It implements engines/base.py and fixes the order of the steps; decode.py holds the decode round.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch

from paceline.local.processes import usable_cores
from paceline.messages import stats_to_proto
from paceline.models import in_place, loading, profiles
from paceline.models.config import ModelConfig, read_config
from paceline.services.rollout_gateway.engines import nouns
from paceline.services.rollout_gateway.engines.embedded import (
    decode,
    drafters,
    kv_cache,
    prefill,
    prefix_cache,
    speculative,
)
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec, row_layout
from paceline.services.rollout_gateway.engines.embedded.weights import EngineWeights
from paceline.services.rollout_gateway.engines.requests import control, grammars, timing
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.services.rollout_gateway.engines.worker.ring import RowRing
from paceline.speculators.base import CaptureSpec, SpeculatorSetup
from paceline.trajectory import SpeculationStats, Target, VersionSet
from paceline.v1.engine_pb2 import ArmStats, Quarantine, WorkerHealth


class EmbeddedEngine:
    """The Engine of engines/base.py in PyTorch."""

    def __init__(self, spec: EmbeddedSpec, sink: RowRing | None = None) -> None:
        """An engine that is ready for requests.

        Raises InvalidInput, WeightsError, DataLoss or ConfigError for an unusable checkpoint,
        drafter or arm.
        """
        torch.set_num_threads(spec.threads or usable_cores())
        model_dir = Path(spec.model_dir)
        self._config = config = read_config(model_dir)
        self._admission = control.Admission.of_model(config, model_dir, spec.max_sequence_tokens)
        self._grammars = grammars.GrammarMasks(config, model_dir)
        self._build_model(spec, config, sink)
        self._scheduler = prefill.Scheduler(spec.max_batch, spec.prefill_tokens)
        most = spec.prefix_bytes // self._store.token_bytes
        sizes = spec.max_batch, spec.prefix_slots, self._store.kv.capacity
        self._prefixes = prefix_cache.PrefixCache(*sizes, self._store, spec.prefix_tokens, most)
        self._prefill = prefill.Prefill(self._scheduler, self._prefixes, self._store, self._weights)
        self._stopwatch, self._busy = timing.Stopwatch(timing.compute_clock()), timing.Stopwatch()
        parts = self._weights, self._speculation, self._store, self._grammars
        self._decoder = decode.Decoder(*parts, self._stopwatch)
        self._released, self._memory_saver = False, spec.memory_saver
        self._ended = SpeculationStats()
        self._paused = False

    def _build_model(self, spec: EmbeddedSpec, config: ModelConfig, sink: RowRing | None) -> None:
        """Load the policy and the drafters, and allocate the slots."""
        model_dir = Path(spec.model_dir)
        inner = row_layout(model_dir, (spec.drafter, *spec.more_drafters), spec.capture_inner).inner
        kinds = drafters.engine_kinds(spec)
        arms = drafters.engine_arms(spec, kinds)
        capacity = self._admission.max_sequence_tokens + drafters.slack(arms.values())
        profile, dtype = profiles.chosen_profile(spec.profile), loading.DTYPES[spec.dtype]
        model = in_place.ServedModel(config, dtype, capacity, profile, start=model_dir)
        policy = model.load(model_dir)
        with torch.inference_mode():
            setup = SpeculatorSetup(
                policy,
                spec.max_batch,
                capacity,
                policy.head.dtype,
                spec.seed,
                layers=CaptureSpec(inner).layers,
                answer_versions=spec.answer_versions,
            )
            drafting = drafters.Drafters(kinds, arms.values(), setup)
            self._speculation = speculative.Speculation(spec, arms, drafting)
            self._store = kv_cache.SlotStore(
                policy,
                spec.max_batch + spec.prefix_slots,
                capacity,
                keep_hidden=self._speculation.drafters.needs_hidden or sink is not None,
                inner=inner,
                sink=sink,
                row_dtype=loading.DTYPES[spec.features_dtype],
            )
        self._weights = EngineWeights(policy, self._speculation, model, model_dir)
        self._device_tflops = timing.square_product_tflops(policy.head.device, policy.head.dtype)

    # ---- the round

    @torch.inference_mode()
    def step(self) -> list[nouns.Chunk]:
        """One round; see Engine.step."""
        self._busy.start()
        for slot in self._scheduler.admit():
            self._scheduler.running[slot].stages.admitted()
            self._store.start(slot, self._scheduler.running[slot].request.known)
        self._stopwatch.start()
        self._prefill.run()
        self._stopwatch.lap("prefill")
        ready = self._scheduler.ready()
        rows = [self._scheduler.running[slot] for slot in ready]
        for sequence in rows:
            sequence.stages.cached()
            if sequence.request.sampling.structured and not self._grammars.follow(sequence):
                sequence.finish = nouns.Finish.ERROR
            sequence.end_scored()
        slots = [slot for slot in ready if self._scheduler.running[slot].finish is None]
        if slots:
            self._decoder.round(slots, [self._scheduler.running[slot] for slot in slots])

        self._write_rows()
        news = [s.chunk() for s in rows if s.request.stream or s.finish is not None]
        self._release()
        self._busy.lap("step")
        return news

    def _write_rows(self, least: int = kv_cache.WAITING) -> None:
        running = self._scheduler.running
        self._store.write_rows(range(len(running)), running, self.versions.policy, least)

    def _release(self) -> None:
        """Remove the running sequences that have ended."""
        running = self._scheduler.running
        slots = [slot for slot, one in enumerate(running) if one.finish is not None]
        if not slots:
            return
        rows = [running[slot] for slot in slots]
        self._store.write_rows(slots, rows, self.versions.policy, least=1)
        batch = speculative.draft_batch(slots, rows, self._store, self.versions.policy)
        self._speculation.drafters.ended(batch)
        self._decoder.changed(rows)
        self._ended = sum((sequence.speculation for sequence in rows), self._ended)
        for slot, sequence in zip(slots, rows, strict=True):
            self._prefixes.retain(slot, sequence)
            self._store.clear(slot, sequence.length)
        moves, freed = self._scheduler.remove(rows)
        for source, destination, sequence in moves:
            self._store.move(source, destination, sequence.length)
            self._speculation.drafters.move(source, destination, sequence.length)
            self._prefixes.move(source, destination)

        self._speculation.drafters.free(freed)

    # ---- requests

    def enqueue(self, request: nouns.Request) -> None:
        """See Engine.enqueue."""
        control.check_held(self._released)
        self._speculation.check_arm(request.forced_arm)
        control.check_capabilities("embedded", self.info.capabilities, request)
        self._grammars.check(request.sampling)
        self._scheduler.waiting.append(self._admission.sequence(request))

    def abort(self, request_ids: frozenset[int] | None) -> list[nouns.Chunk]:
        """See Engine.abort."""

        def asked(sequence: RunningSequence) -> bool:
            return request_ids is None or sequence.request.request_id in request_ids

        running = [sequence for sequence in self._scheduler.running if asked(sequence)]
        waiting = [sequence for sequence in self._scheduler.waiting if asked(sequence)]
        self._scheduler.drop_waiting(waiting)
        for sequence in (*running, *waiting):
            sequence.finish = nouns.Finish.ABORT
        with torch.inference_mode():
            self._release()
        return [sequence.chunk() for sequence in (*running, *waiting)]

    @property
    def has_work(self) -> bool:
        """See Engine.has_work."""
        return not self._paused and bool(self._scheduler.running or self._scheduler.waiting)

    @property
    def _unfinished(self) -> int:
        return len(self._scheduler.running) + len(self._scheduler.waiting)

    # ---- control

    def pause(self, mode: nouns.PauseMode) -> list[nouns.Chunk]:
        """See Engine.pause."""
        self._paused = True
        return self._apply(mode)

    def resume(self) -> None:
        """See Engine.resume."""
        self._paused = False

    def _apply(self, mode: nouns.PauseMode) -> list[nouns.Chunk]:
        if mode is nouns.PauseMode.ABORT:
            return self.abort(None)
        if mode is nouns.PauseMode.RETRACT:
            for slot, sequence in enumerate(self._scheduler.running):
                sequence.retract()
                self._prefixes.withdraw(slot)
                self._speculation.drafters.free([slot])
        return []

    def prepare_weights(self, target: Target, version: int, path: Path, profile: str = "") -> None:
        """See Engine.prepare_weights; beside a serving policy of another profile, the version takes
        extra memory.
        """
        self._weights.prepare(target, version, path, profile)

    @torch.inference_mode()
    def commit_weights(self, versions: VersionSet, mode: nouns.PauseMode) -> list[nouns.Chunk]:
        """See Engine.commit_weights; `mode` applies only to a change of the policy."""
        if versions.policy != self.versions.policy:  # waiting rows belong to the former policy
            self._write_rows(least=1)
        if not self._weights.commit(versions):
            return []
        self._prefixes.forget()
        for sequence in self._scheduler.running:
            sequence.stale = sequence.cached > 0
        return self._apply(mode)

    def abort_weights(self, target: Target, version: int) -> None:
        """See Engine.abort_weights."""
        self._weights.prepared.forget(target, version)

    def force_arm(self, arm: str) -> None:
        """See Engine.force_arm."""
        self._speculation.check_arm(arm)
        self._speculation.forced = arm

    def learn_arms(self, reports: Sequence[ArmStats]) -> None:
        """See Engine.learn_arms."""
        self._speculation.bandit.learn(reports)

    def quarantine(self, withheld: Quarantine) -> None:
        """See Engine.quarantine."""
        self._speculation.bar(frozenset(withheld.arms))
        if withheld.reuse and not self._prefixes.closed:
            self._prefixes.close()

    @torch.inference_mode()
    def release_memory(self) -> int:
        """See Engine.release_memory; 0 bytes without engine.embedded.memory_saver."""
        control.check_idle(self._unfinished)
        released, self._released = self._released, True
        if released or not self._memory_saver:
            return 0
        self._prefixes.forget()
        return self._store.release() + self._weights.release()

    @torch.inference_mode()
    def resume_memory(self) -> None:
        """See Engine.resume_memory."""
        if self._released and self._memory_saver:
            self._store.allocate()
            self._weights.resume()
        self._released = False

    def flush_cache(self) -> None:
        """See Engine.flush_cache; drafters that learn from text drop their learned text too."""
        control.check_idle(self._unfinished)
        self._prefixes.forget()
        self._speculation.drafters.flush()

    def close(self) -> None:
        """See Engine.close."""
        self.abort(None)
        self._grammars.close()

    # ---- facts

    @cached_property
    def info(self) -> nouns.EngineInfo:
        """See Engine.info."""
        kinds, structured = nouns.Capability, self._grammars.possible
        always = {kinds.PENALTIES, kinds.PROMPT_LOGPROBS, kinds.RELEASE_MEMORY, kinds.PROFILES}
        optional = {
            kinds.CAPTURE: self._store.sink is not None,
            kinds.DRAFTER_UPDATE: self._speculation.drafters.trainable,
            kinds.JSON_SCHEMA: structured,
            kinds.GRAMMARS: structured,
        }
        capabilities = frozenset(always | {one for one, there in optional.items() if there})
        config, arms = self._config, tuple(self._speculation.arms)
        sizes = config.vocab_size, config.hidden_size, self._admission.max_sequence_tokens
        rows = nouns.RowLayout.entering(config.hidden_size, self._store.inner)
        return nouns.EngineInfo(*sizes, arms, capabilities, rows, self._device_tflops)

    @property
    def versions(self) -> VersionSet:
        """See Engine.versions."""
        return self._weights.prepared.serving

    @property
    def lm_head_hash(self) -> str:
        """See Engine.lm_head_hash."""
        return self._weights.policy.head_hash

    @property
    def load(self) -> WorkerHealth:
        """See Engine.load."""
        running = [sequence.speculation for sequence in self._scheduler.running]
        return WorkerHealth(
            running=len(running),
            waiting=len(self._scheduler.waiting),
            tokens_emitted=self._decoder.tokens_emitted,
            busy_s=self._busy.totals["step"],
            speculation=stats_to_proto(sum(running, self._ended)),
            arms=self._speculation.bandit.reports(),
            rows_dropped=self._store.rows_dropped,
            split=self._decoder.split,
            prefixes=self._prefixes.stats,
        )
