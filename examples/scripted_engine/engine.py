"""Replays given token ids under a cost table: an engine without model and torch, for examples,
tests and benches. `gateway.engine.kind = "examples/scripted_engine/engine.py:SCRIPTED"` serves it.

It fulfils the whole engine contract: speculation arms chosen by the bandit, versions, pause modes,
capture, abort. So tests of all layers above it take milliseconds. A response depends on (prompt,
seed) alone, never on arm, batch or time (script.py selects and emits it). A round's seconds are
read from a cost table (arm, batch size). Only `real_time` sleeps them, for benches.
"""

import hashlib
import time
from collections.abc import Sequence, Set
from pathlib import Path

import numpy as np

from paceline.arm_names import OFF, speculator_of
from paceline.errors import WeightsError
from paceline.messages import stats_to_proto
from paceline.models.profiles import check_profile
from paceline.services.rollout_gateway.bandits import build_bandit
from paceline.services.rollout_gateway.bandits.base import RoundOutcome, Situation
from paceline.services.rollout_gateway.engines import EngineKind, nouns
from paceline.services.rollout_gateway.engines.nouns import Capability
from paceline.services.rollout_gateway.engines.requests import control
from paceline.services.rollout_gateway.engines.requests.sequence import DrawnBy
from paceline.services.rollout_gateway.engines.worker.ring import RowRing
from paceline.speculators.shift import AcceptanceShift, read_shift, shift_over
from paceline.trajectory import SpeculationStats, Target, VersionSet
from paceline.v1 import engine_pb2 as pb

from . import script
from .script import ScriptedSpec

_CAPABILITIES = frozenset(
    {Capability.CAPTURE, Capability.DRAFTER_UPDATE, Capability.PROFILES, Capability.RELEASE_MEMORY}
)


class ScriptedEngine:
    """The Engine of engines/base.py over a script."""

    def __init__(self, spec: ScriptedSpec, sink: RowRing | None) -> None:
        self._spec = spec
        self._sink = sink
        self._beat = 0.0  # end of the last round, with `real_time`
        self._bandit = build_bandit(spec.bandit, spec.arms, spec.seed)
        self._script = script.Script(spec)
        tokenizer = Path(spec.model_dir) / "tokenizer.json"
        self._admission = control.Admission(
            spec.vocab_size, (spec.eos_token_id,), tokenizer, spec.max_sequence_tokens
        )
        self._waiting: list[script.ScriptedRun] = []
        self._running: list[script.ScriptedRun] = []
        self._prepared = control.PreparedVersions[AcceptanceShift | None]()
        # a float32 head, and a row of keys and values per token
        tokens = spec.vocab_size + 2 * spec.max_batch * spec.max_sequence_tokens
        self._memory_bytes = 4 * spec.hidden_size * tokens
        self._released = False
        self._paused = False
        self._forced = ""
        self._barred: Set[str] = frozenset()
        self._tokens = 0
        self._busy_s = 0.0
        self._rounds = self._nodes = 0
        self._ended = SpeculationStats()

    @property
    def info(self) -> nouns.EngineInfo:
        spec = self._spec
        sizes = spec.vocab_size, spec.hidden_size, spec.max_sequence_tokens
        rows = nouns.RowLayout.last(spec.hidden_size)
        return nouns.EngineInfo(*sizes, spec.arms, _CAPABILITIES, rows)

    @property
    def versions(self) -> VersionSet:
        return self._prepared.serving

    @property
    def lm_head_hash(self) -> str:
        """A hash of the policy version, since there are no weights."""
        return hashlib.sha256(f"scripted/{self.versions.policy}".encode()).hexdigest()[:16]

    @property
    def has_work(self) -> bool:
        return not self._paused and bool(self._running or self._waiting)

    @property
    def load(self) -> pb.WorkerHealth:
        running = [run.sequence.speculation for run in self._running]
        return pb.WorkerHealth(
            running=len(running),
            waiting=len(self._waiting),
            tokens_emitted=self._tokens,
            busy_s=self._busy_s,
            speculation=stats_to_proto(sum(running, self._ended)),
            arms=self._bandit.reports(),
            split=pb.RoundSplit(rounds=self._rounds, nodes=self._nodes, forward_s=self._busy_s),
        )

    def enqueue(self, request: nouns.Request) -> None:
        control.check_held(self._released)
        sequence = self._admission.sequence(request)
        control.check_capabilities("scripted", self.info.capabilities, request)
        control.check_arm(request.forced_arm, self._spec.arms)
        answer = self._script.answer(request.prompt, request.sampling.seed)
        self._waiting.append(script.ScriptedRun(sequence, answer, nan_token=self._spec.nan_token))

    def abort(self, request_ids: frozenset[int] | None) -> list[nouns.Chunk]:
        runs = (*self._running, *self._waiting)
        ids = request_ids
        ended = [run for run in runs if ids is None or run.request.request_id in ids]
        for run in ended:
            run.sequence.finish = nouns.Finish.ABORT
        self._waiting = [run for run in self._waiting if run not in ended]
        self._release()
        return [run.sequence.chunk() for run in ended]

    def _release(self) -> None:
        """Remove the ended requests from the running batch."""
        ended = [run.sequence for run in self._running if run.sequence.finish is not None]
        self._ended = sum((sequence.speculation for sequence in ended), self._ended)
        self._running = [run for run in self._running if run.sequence.finish is None]

    def step(self) -> list[nouns.Chunk]:
        room = self._spec.max_batch - len(self._running)
        self._running += self._waiting[:room]
        del self._waiting[:room]
        batch = list(self._running)
        for run in batch:
            run.sequence.stages.admitted()
            run.sequence.stages.cached()
        if any(self._spec.fault_token in run.request.prompt for run in batch):
            raise RuntimeError("the script asks for a fault")
        situation = control.situation_of([run.sequence for run in batch])
        arm, explored = self._choose(batch, situation)
        cost = script.round_cost(self._spec, arm, len(batch))
        self._spend(cost)
        if not (batch := self._going_on(batch, arm)):
            return []
        rows = [run.sequence for run in batch]
        taken = [self._advance(run, arm) for run in batch]
        self._busy_s += cost
        self._rounds += 1
        self._nodes += len(batch) * (1 + script.drafts_of(arm))
        if not any(one.request.probe for one in rows):
            self._bandit.observe(RoundOutcome(arm, situation, taken, cost, explored))
        self._release()
        return [one.chunk() for one in rows if one.request.stream or one.finish is not None]

    def _spend(self, seconds: float) -> None:
        """With `real_time`, sleep until the next multiple of the seconds, so that work between two
        rounds does not slow the pace.

        A round that starts in the middle of its interval ends early; a round that was busy for
        longer skips a beat.
        """
        if self._spec.real_time and seconds:
            self._beat = script.next_beat(time.perf_counter(), self._beat, seconds)
            time.sleep(max(self._beat - time.perf_counter(), 0))

    def _going_on(self, batch: list[script.ScriptedRun], arm: str) -> list[script.ScriptedRun]:
        """The requests that may take their tokens of this round."""
        if not self._spec.ends_with or Path(self._spec.ends_with).exists():
            return batch
        paces = [run.answer.tokens_per_round or 1 + script.drafts_of(arm) for run in batch]
        pairs = zip(batch, paces, strict=True)
        return [run for run, pace in pairs if run.request.probe or not run.ends_within(pace)]

    def pause(self, mode: nouns.PauseMode) -> list[nouns.Chunk]:
        self._paused = True
        return self._apply(mode)

    def resume(self) -> None:
        self._paused = False

    def prepare_weights(self, target: Target, version: int, path: Path, profile: str = "") -> None:
        """See Engine.prepare_weights; no weights are rounded."""
        if not path.is_dir():
            raise WeightsError("no such version in the spool", seen=path)
        self._prepared.put(target, version, read_shift(path), check_profile(profile))

    def commit_weights(self, versions: VersionSet, mode: nouns.PauseMode) -> list[nouns.Chunk]:
        changes, before = self._prepared.changes(versions), self.versions
        self._prepared.serve(versions)
        for target, shift in changes.items():
            profile = before.profile if target is Target.POLICY else ""
            # the version may serve again
            self._prepared.put(target, getattr(before, target), None, profile)
            # The trainable drafter is EAGLE.
            drafter = "eagle" if target is Target.DRAFTER else ""
            arms = {arm for arm in self._spec.arms if arm != OFF and arm.startswith(drafter)}
            self._bandit.renew(arms, target, shift_over(shift, before.drafter))
        return self._apply(mode) if Target.POLICY in changes else []

    def abort_weights(self, target: Target, version: int) -> None:
        self._prepared.forget(target, version)

    def force_arm(self, arm: str) -> None:
        control.check_arm(arm, self._spec.arms)
        self._forced = arm

    def learn_arms(self, reports: Sequence[pb.ArmStats]) -> None:
        self._bandit.learn(reports)

    def quarantine(self, withheld: pb.Quarantine) -> None:
        """See Engine.quarantine; a script reuses no prefix."""
        self._barred = frozenset(withheld.arms)

    def release_memory(self) -> int:
        control.check_idle(len(self._running) + len(self._waiting))
        freed = 0 if self._released else self._memory_bytes
        self._released = True
        return freed

    def resume_memory(self) -> None:
        self._released = False

    def flush_cache(self) -> None:
        """See Engine.flush_cache; there is no cache."""
        control.check_idle(len(self._running) + len(self._waiting))

    def close(self) -> None:
        self.abort(None)

    def _apply(self, mode: nouns.PauseMode) -> list[nouns.Chunk]:
        if mode is nouns.PauseMode.ABORT:
            return self.abort(None)
        if mode is nouns.PauseMode.RETRACT:
            for run in self._running:
                run.rows_written = 0  # the rebuilt cache gives new rows
        return []

    def _choose(self, batch: list[script.ScriptedRun], situation: Situation) -> tuple[str, bool]:
        asked = (run.request.forced_arm for run in batch if run.request.forced_arm)
        forced = self._forced or next(asked, "")
        if forced:
            return OFF if forced in self._barred else forced, False
        served = tuple(arm for arm in self._spec.arms if arm not in self._barred)
        choice = self._bandit.choose(situation, served or (OFF,))
        return choice.arm, choice.explored

    def _advance(self, run: script.ScriptedRun, arm: str) -> int:
        """Emit one round's tokens of a request; returns the tokens that count for the arm."""
        sequence = run.sequence
        nan = self.versions.policy in self._spec.nan_policies
        origin = DrawnBy(self.versions.policy, arm, "scripted")
        emitted = run.emit(self._wanted(run, arm), origin, nan=nan)
        # A reply's own pace may exceed the arm's longest accepted length.
        taken = min(emitted, 1 + script.drafts_of(arm))
        trained = speculator_of(arm) not in ("", "ngram")
        sequence.count(arm, script.drafts_of(arm), taken, trained=trained)
        self._tokens += 0 if sequence.request.probe else emitted
        self._write_rows(run)
        return taken

    def _wanted(self, run: script.ScriptedRun, arm: str) -> int:
        """Tokens of this round: the reply's own pace, else the arm's accept length."""
        if run.answer.tokens_per_round is not None:
            return run.answer.tokens_per_round
        length = self._spec.accept_lengths.get(arm, 1.0)
        length = self._spec.drafter_accept_lengths.get(self.versions.drafter, length)
        run.credit += length if arm != OFF else 1.0
        wanted = max(int(run.credit), 1)
        run.credit = max(run.credit - wanted, 0.0)
        return wanted

    def _write_rows(self, run: script.ScriptedRun) -> None:
        if self._sink is None or not run.request.capture:
            return
        tokens, positions = run.unwritten()
        size, dtype = self._spec.hidden_size, self._spec.features_dtype
        rows = script.scripted_rows(tokens, positions, size, dtype)
        ids = np.full(len(tokens), run.request.request_id, dtype=np.uint64)
        self._sink.write(ids, positions, tokens, self.versions.policy, rows)


def build_scripted(spec: ScriptedSpec, sink: RowRing | None = None) -> ScriptedEngine:
    """Build the engine of a script."""
    return ScriptedEngine(spec, sink)


SCRIPTED = EngineKind(f"{__file__}:ScriptedSpec", f"{__file__}:build_scripted", compares_text=False)
SCRIPTED_PATH = f"{__file__}:SCRIPTED"
"""Value of `gateway.engine.kind`."""
