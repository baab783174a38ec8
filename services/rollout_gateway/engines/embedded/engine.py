"""The embedded PyTorch engine: the round loop over scheduler, speculators, forward, verification and capture.

Owns the order of things and the contract of engines/base.py; each part's rule is in its own file.

A slot with n known tokens has n - 1 of them cached. A round forwards token n - 1 and the drafts after it, which gives
the draws for positions n, n + 1, ...; the first draw of a request is an ordinary round after its prompt is cached.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import FailedPrecondition
from paceline.models.cache import cache_rows
from paceline.models.decoder import Block, forward_hidden, head_logits, make_block
from paceline.models.sampling import DrawParams, behavior_logprobs
from paceline.trajectory import SpeculationStats, VersionSet
from rollout_gateway.engines.admission import Admission
from rollout_gateway.engines.base import (
    Capability,
    Chunk,
    EngineInfo,
    Finish,
    Load,
    MemoryTag,
    PauseMode,
    Request,
    RowLayout,
    Target,
    missing,
)
from rollout_gateway.engines.embedded.capture import Capture
from rollout_gateway.engines.embedded.kv_cache import SlotStore
from rollout_gateway.engines.embedded.prefill import Prefill
from rollout_gateway.engines.embedded.prefix_cache import PrefixCache
from rollout_gateway.engines.embedded.scheduler import Scheduler
from rollout_gateway.engines.embedded.speculative import Speculation
from rollout_gateway.engines.embedded.verify import Verdict, verify
from rollout_gateway.engines.embedded.weights import EngineWeights
from rollout_gateway.engines.sequence import RunningSequence

_SOMETIMES = {Capability.CAPTURE, Capability.DRAFTER_UPDATE, Capability.SPECULATION}
_ALWAYS = frozenset(Capability) - _SOMETIMES - {Capability.RELEASE_MEMORY}


class EmbeddedEngine:
    """Engine of engines/base.py on torch."""

    def __init__(
        self,
        weights: EngineWeights,
        speculation: Speculation,
        scheduler: Scheduler,
        store: SlotStore,
        prefixes: PrefixCache,
        capture: Capture,
        admission: Admission,
    ) -> None:
        self._weights = weights
        self._speculation = speculation
        self._scheduler = scheduler
        self._store = store
        self._prefixes = prefixes
        self._capture = capture
        self._prefill = Prefill(scheduler, prefixes, store, weights, capture)
        self._admission = admission
        self._params: tuple[tuple[int, ...], int, DrawParams] | None = None
        # One thread's CPU time is what a round costs even while other processes take the core away; with more
        # threads only the wall clock sees how well they ran together.
        self._clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self._paused = False
        self._tokens_emitted = 0
        self._busy_s = 0.0
        self._stats = SpeculationStats()

    # ---- the round

    @torch.inference_mode()
    def step(self) -> list[Chunk]:
        """One round; see Engine.step."""
        started = time.perf_counter()
        self._admit()
        self._prefill.run()
        slots = self._scheduler.ready()
        rows = [self._scheduler.running[slot] for slot in slots]
        news: list[Chunk] = []
        if rows:
            plan = self._speculation.choose(rows)
            parts = self._speculation.parts(plan, slots, rows, self._store)
            decoding = self._clock()
            drafts = self._speculation.draft(parts, len(rows))
            block, positions, hidden, tokens_in = self._forward(slots, rows, drafts)
            logits = head_logits(self._weights.policy, hidden)
            verdict = verify(logits, drafts, positions + 1, self._draw_params(rows, positions.shape[1]))
            self._store.keep_hidden(block, hidden)
            self._store.keep_tokens(block, verdict.tokens)
            taken = self._accept(rows, verdict, drafts, logits)
            self._speculation.observe(plan, len(rows), sum(taken), self._clock() - decoding)
            self._capture.write(rows, taken, positions, tokens_in, hidden, self._weights.versions.policy)
            news = self._emit(rows)
        self._busy_s += time.perf_counter() - started
        return news

    def _admit(self) -> None:
        for slot in self._scheduler.admit():
            self._store.start(slot, self._scheduler.running[slot].request.prompt)

    def _forward(
        self, slots: Sequence[int], rows: Sequence[RunningSequence], drafts: Tensor
    ) -> tuple[Block, Tensor, Tensor, Tensor]:
        """Block, positions [B, Q], hidden [B, Q, H] and token ids [B, Q] of the last token and the drafts."""
        lengths = [sequence.length for sequence in rows]
        nodes, device = drafts.shape[1] + 1, self._store.token_ids.device
        positions = torch.tensor(lengths, device=device)[:, None] + torch.arange(-1, nodes - 1, device=device)
        block = self._block(slots, positions, max(lengths) + nodes - 1)
        last = self._store.token_ids.view(-1).index_select(0, block.index[::nodes])[:, None]
        token_ids = torch.cat((last, drafts.clamp(min=0)), dim=1) if nodes > 1 else last
        return block, positions, forward_hidden(self._weights.policy, self._store.kv, token_ids, block), token_ids

    def _block(self, slots: Sequence[int], positions: Tensor, length: int) -> Block:
        policy = self._weights.policy
        return make_block(policy.config, policy.rotation, self._store.kv, cache_rows(slots), positions, length)

    def _draw_params(self, rows: Sequence[RunningSequence], nodes: int) -> DrawParams:
        key = tuple(id(sequence) for sequence in rows)
        if self._params is None or self._params[:2] != (key, nodes):
            sampling = [sequence.request.sampling for sequence in rows for _ in range(nodes)]
            params = DrawParams.of(
                [one.seed for one in sampling],
                [one.temperature for one in sampling],
                top_k=[one.top_k for one in sampling],
                top_p=[one.top_p for one in sampling],
                min_p=[one.min_p for one in sampling],
            )
            self._params = (key, nodes, params)
        return self._params[2]

    def _accept(self, rows: Sequence[RunningSequence], verdict: Verdict, drafts: Tensor, logits: Tensor) -> list[int]:
        """Appends what each row emits; returns tokens taken per row (fewer than verified at a stop or limit)."""
        tokens, logprobs, gaps = verdict.tokens.tolist(), verdict.logprobs.tolist(), verdict.gaps.tolist()
        drafted = (drafts >= 0).sum(dim=1).tolist()
        version, taken = self._weights.versions.policy, []
        for row, accepted in enumerate(verdict.accepted.tolist()):
            sequence, end = rows[row], accepted + 1
            count = sequence.take(tokens[row][:end], logprobs[row][:end], gaps[row][:end], version)
            sequence.count(drafted[row], count)
            if sequence.request.sampling.top_logprobs:
                self._add_alternatives(sequence, logits[row, :count])
            taken.append(count)
        self._count(drafted, taken)
        return taken

    def _add_alternatives(self, sequence: RunningSequence, logits: Tensor) -> None:
        sampling = sequence.request.sampling
        logprobs = behavior_logprobs(logits, torch.full((len(logits),), sampling.temperature, device=logits.device))
        top = logprobs.topk(min(sampling.top_logprobs, logits.shape[-1]), dim=-1)
        for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True):
            sequence.alternatives.append(tuple(zip(ids, values, strict=True)))

    def _count(self, drafted: Sequence[int], taken: Sequence[int]) -> None:
        pairs = [(proposed, count) for proposed, count in zip(drafted, taken, strict=True) if proposed]
        tokens = sum(count for _, count in pairs)
        self._tokens_emitted += sum(taken)
        self._stats += SpeculationStats(
            len(taken), sum(proposed for proposed, _ in pairs), tokens - len(pairs), tokens, len(pairs)
        )

    def _emit(self, rows: Sequence[RunningSequence]) -> list[Chunk]:
        ended = [sequence for sequence in rows if sequence.finish is not None]
        news = [s.chunk() for s in rows if s.request.stream or s.finish is not None]
        self._release(ended)
        return news

    def _release(self, ended: Sequence[RunningSequence]) -> None:
        if not ended:
            return
        self._params = None
        for sequence in ended:
            self._prefixes.retain(self._scheduler.running.index(sequence), sequence)
        moves, freed = self._scheduler.remove(ended)
        for move in moves:
            self._store.move(move.source, move.destination, move.sequence.length)
            self._speculation.move(move.source, move.destination, move.sequence.length)
            self._prefixes.move(move.source, move.destination)
        for slot in freed:
            self._speculation.free(slot)

    # ---- requests

    def enqueue(self, request: Request) -> None:
        """See Engine.enqueue."""
        self._speculation.check_arm(request.forced_arm)
        if request.capture:
            self._check_capture()
        self._scheduler.waiting.append(self._admission.sequence(request))

    def _check_capture(self) -> None:
        if not self._capture.possible:
            raise missing("embedded", Capability.CAPTURE)

    def abort(self, request_ids: frozenset[int] | None) -> list[Chunk]:
        """See Engine.abort."""

        def asked(sequence: RunningSequence) -> bool:
            return request_ids is None or sequence.request.request_id in request_ids

        running = [sequence for sequence in self._scheduler.running if asked(sequence)]
        waiting = [sequence for sequence in self._scheduler.waiting if asked(sequence)]
        self._scheduler.drop_waiting(waiting)
        for sequence in (*running, *waiting):
            sequence.finish = Finish.ABORT
        with torch.inference_mode():
            self._release(running)
        return [sequence.chunk() for sequence in (*running, *waiting)]

    @property
    def has_work(self) -> bool:
        """See Engine.has_work."""
        return not self._paused and bool(self._scheduler.running or self._scheduler.waiting)

    # ---- control

    def pause(self, mode: PauseMode) -> list[Chunk]:
        """See Engine.pause."""
        self._paused = True
        return self._apply(mode)

    def resume(self) -> None:
        """See Engine.resume."""
        self._paused = False

    def _apply(self, mode: PauseMode) -> list[Chunk]:
        if mode is PauseMode.ABORT:
            return self.abort(None)
        if mode is PauseMode.RETRACT:
            for slot, sequence in enumerate(self._scheduler.running):
                sequence.retract()
                self._prefixes.withdraw(slot)
                self._speculation.free(slot)
        return []

    def prepare_weights(self, target: Target, version: int, path: Path) -> None:
        """See Engine.prepare_weights."""
        self._weights.prepare(target, version, path)

    @torch.inference_mode()
    def commit_weights(self, versions: VersionSet, mode: PauseMode) -> list[Chunk]:
        """See Engine.commit_weights; the mode concerns a change of the policy only."""
        if not self._weights.commit(versions):
            return []
        self._prefixes.forget()
        for sequence in self._scheduler.running:
            sequence.stale = sequence.cached > 0
        return self._apply(mode)

    def abort_weights(self, target: Target, version: int) -> None:
        """See Engine.abort_weights."""
        self._weights.forget(target, version)

    def force_arm(self, arm: str) -> None:
        """See Engine.force_arm."""
        self._speculation.check_arm(arm)
        self._speculation.forced = arm

    def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """See Engine.release_memory."""
        raise missing("embedded", Capability.RELEASE_MEMORY)

    def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """See Engine.resume_memory."""
        raise missing("embedded", Capability.RELEASE_MEMORY)

    def flush_cache(self) -> None:
        """See Engine.flush_cache."""
        if self.has_work:
            raise FailedPrecondition("requests run; abort them or wait", seen=self.load.running)
        self._prefixes.forget()

    def set_capture(self, enabled: bool) -> None:
        """See Engine.set_capture."""
        if enabled:
            self._check_capture()
        self._capture.enabled = enabled

    def close(self) -> None:
        """See Engine.close."""
        self.abort(None)

    # ---- facts

    @property
    def info(self) -> EngineInfo:
        """See Engine.info."""
        config = self._weights.policy.config
        extra = {
            Capability.CAPTURE: self._capture.possible,
            Capability.DRAFTER_UPDATE: self._speculation.trainable,
            Capability.SPECULATION: len(self._speculation.arms) > 1,
        }
        return EngineInfo(
            config.vocab_size,
            config.hidden_size,
            self._admission.max_sequence_tokens,
            tuple(self._speculation.arms),
            _ALWAYS | {capability for capability, present in extra.items() if present},
            RowLayout.last(config.hidden_size),
        )

    @property
    def versions(self) -> VersionSet:
        """See Engine.versions."""
        return self._weights.versions

    @property
    def lm_head_hash(self) -> str:
        """See Engine.lm_head_hash."""
        return self._weights.policy.head_hash

    @property
    def load(self) -> Load:
        """See Engine.load."""
        return Load(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            tokens_emitted=self._tokens_emitted,
            busy_s=self._busy_s,
            speculation=self._stats,
            arms=self._speculation.reports(),
            rows_dropped=self._capture.rows_dropped,
            prefixes=self._prefixes.stats,
        )
