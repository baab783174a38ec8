"""A worker process behind the Engine contract, so that the contract suite drives engines of another
process too.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from paceline import errors
from paceline.local.patience import patient
from paceline.local.processes import child_environment
from paceline.messages import stats_from_proto, versions_from_proto
from paceline.services.rollout_gateway.engines import find_engine
from paceline.services.rollout_gateway.engines.nouns import (
    Capability,
    Chunk,
    EngineInfo,
    Finish,
    PauseMode,
    Request,
)
from paceline.services.rollout_gateway.engines.worker import (
    SOCKET_VARIABLE,
    SPEC_VARIABLE,
    WorkerSpec,
    wire,
)
from paceline.services.rollout_gateway.engines.worker.ring import RowRing
from paceline.trajectory import DrawSpan, Target, VersionSet, VersionSpan
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

IDS = 1_000_000
"""Request ids of one RemoteEngine."""
_FINISH = {value: name for name, value in wire.FINISH.items()}
_MODES = {mode: value for value, mode in wire.PAUSE_MODES.items()}
_TARGETS = {target: value for value, target in wire.TARGETS.items()}
_KINDS = {
    kind.reason: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and hasattr(kind, "reason")
}


class WorkerClient:
    """One worker process: started, commanded, stopped."""

    def __init__(
        self, kind: str, engine: dict[str, Any], folder: Path, row_bytes: int, ready_s: float = 120
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.ring = RowRing.create(1 << 14, row_bytes)
        spec = WorkerSpec(worker_index=0, kind=kind, ring_path=str(self.ring.path), engine=engine)
        spec.write(folder / "spec.json")
        address = f"ipc://{folder / 'socket'}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.bind(address)
        self.log_path = folder / "log"
        environment = {
            **child_environment(),
            SPEC_VARIABLE: str(folder / "spec.json"),
            SOCKET_VARIABLE: address,
            "OMP_NUM_THREADS": "1",
        }
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", find_engine(kind).process],
                env=environment,
                stdout=log,
                stderr=log,
            )
        self._numbers = 0
        self.engines = 0  # RemoteEngines so far
        self.chunks: list[Chunk] = []
        self.rows: Any = None  # where rows go: a RowRing or None
        try:
            self.ready = self._ready(ready_s)
        except BaseException:
            self.close()  # an open socket would keep the interpreter from its end
            raise

    def log(self) -> str:
        """The end of the process's output."""
        return self.log_path.read_text(errors="replace")[-4000:]

    def _ready(self, deadline_s: float) -> pb.WorkerReady:
        event = self._next(deadline_s)
        if event.HasField("failed"):
            raise RuntimeError(f"{event.failed.reason}: {event.failed.message}")
        return event.ready

    def _next(self, deadline_s: float) -> pb.WorkerEvent:
        until = time.monotonic() + patient(deadline_s)
        while not self._socket.poll(200):
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"the worker ended with {self.process.returncode}:\n{self.log()}"
                )
            if time.monotonic() > until:
                raise TimeoutError(f"no event in {deadline_s} s:\n{self.log()}")
        return pb.WorkerEvent.FromString(self._socket.recv())

    def _take(self, event: pb.WorkerEvent) -> None:
        tokens = event.tokens
        rows = self.ring.read(tokens.rows_written)
        if self.rows is not None:
            for version in sorted({int(row["policy_version"]) for row in rows}):
                part = rows[rows["policy_version"] == version]
                fields = (part[name] for name in ("request_id", "position", "token_id"))
                self.rows.write(*fields, version, part["hidden"])
        self.chunks += [chunk_from(chunk) for chunk in tokens.chunks]

    def send(self, **command: Any) -> None:
        """A command without an answer."""
        self._socket.send(pb.WorkerCommand(**command).SerializeToString())

    def ask(self, deadline_s: float = 60, **command: Any) -> pb.WorkerEvent:
        """Sends a command and returns its answer; tokens that arrive meanwhile are kept.

        Raises the worker's error.
        """
        self._numbers += 1
        self._socket.send(pb.WorkerCommand(command_id=self._numbers, **command).SerializeToString())
        while True:
            event = self._next(deadline_s)
            if event.HasField("tokens"):
                self._take(event)
            elif event.command_id == self._numbers:
                if event.HasField("failed"):
                    raise wire.error_from(event.failed)
                return event

    def wait(self, deadline_s: float = 60) -> None:
        """Waits until tokens arrive."""
        event = self._next(deadline_s)
        assert event.HasField("tokens")
        self._take(event)

    def close(self) -> None:
        """Shuts the process down."""
        if self.process.poll() is None:
            self.send(shutdown=pb.Shutdown())
            try:
                self.process.wait(patient(20))
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._socket.close(linger=0)
        self._context.term()
        self.ring.seal()


def chunk_from(message: pb.TokenChunk) -> Chunk:
    return Chunk(
        request_id=message.request_id,
        token_ids=tuple(message.token_ids),
        behavior_logprobs=tuple(message.behavior_logprobs),
        version_spans=wire.spans_from(VersionSpan, message.version_spans),
        draw_spans=wire.spans_from(DrawSpan, message.draw_spans),
        accepted_drafts=tuple(message.accepted_drafts),
        finish=_FINISH.get(message.finish_reason),
        error=message.error,
        speculation=stats_from_proto(message.speculation),
        cached_prompt_tokens=message.cached_prompt_tokens,
        smallest_gap=message.smallest_gap,
        top_logprobs=tuple(
            tuple(zip(one.token_ids, one.logprobs, strict=True)) for one in message.top_logprobs
        ),
        time_to_first_token_s=message.time_to_first_token_s,
        matched_stop=message.matched_stop,
        stages=tuple(message.stages),
        prompt_scores=tuple(message.prompt_scores),
    )


class _Shifted:
    """A sink that receives only the request ids of its engine."""

    def __init__(self, sink: RowRing, first: int) -> None:
        self._sink, self._first = sink, first

    def write(
        self,
        request_ids: Any,
        positions: Any,
        token_ids: Any,
        policy_version: int,
        hidden: Any,
    ) -> int:
        return self._sink.write(
            request_ids - self._first, positions, token_ids, policy_version, hidden
        )


class RemoteEngine:
    """Engine over a WorkerClient that outlives it: a new RemoteEngine starts from the first weights
    and an empty engine.
    """

    def __init__(self, client: WorkerClient, weights: Path, sink: RowRing | None) -> None:
        self._client = client
        self._paused = False
        self._live: set[int] = set()
        self._tokens = 0
        health = client.ask(get_health=pb.GetHealth()).health
        client.send(abort=pb.AbortRequests())
        client.engines += 1
        self._first = client.engines * IDS  # request ids are never used twice in one worker
        self._base = health.versions.seq
        client.ask(**{"continue": pb.ContinueGeneration()})
        client.ask(set_speculation=pb.SetSpeculation())
        if health.versions.policy:
            client.ask(
                prepare_weights=pb.PrepareWeights(
                    target=pb.WEIGHT_TARGET_POLICY, version=0, path=str(weights)
                )
            )
            self._base += 1
            restored = tpb.VersionSet(seq=self._base, policy=0, drafter=health.versions.drafter)
            client.ask(
                commit_weights=pb.CommitWeights(versions=restored, mode=pb.PAUSE_MODE_RETRACT)
            )
        self._refresh()
        self._settled = self._health
        client.chunks.clear()
        client.rows = _Shifted(sink, self._first) if sink is not None else None

    def _refresh(self) -> None:
        self._health = self._client.ask(get_health=pb.GetHealth()).health

    @property
    def info(self) -> EngineInfo:
        ready = self._client.ready
        return EngineInfo(
            ready.vocab_size,
            ready.hidden_size,
            ready.max_sequence_tokens,
            tuple(ready.arms),
            frozenset(Capability(name) for name in ready.capabilities),
            wire.rows_from(ready),
            ready.device_tflops,
        )

    @property
    def versions(self) -> VersionSet:
        self._refresh()
        served = versions_from_proto(self._health.versions)
        return VersionSet(served.seq - self._base, served.policy, served.drafter)

    def enqueue(self, request: Request) -> None:
        number = self._first + request.request_id
        self._client.send(
            enqueue=pb.EnqueueRequests(
                requests=[wire.request_to(replace(request, request_id=number))]
            )
        )
        self._refresh()
        self._refresh()  # chunks leave with the round after the command
        for chunk in self._client.chunks:
            if chunk.request_id == number and chunk.finish is Finish.ERROR:
                self._client.chunks.remove(chunk)
                reason, _, message = chunk.error.partition(": ")
                raise _KINDS[reason](message)
        self._live.add(request.request_id)

    def _news(self) -> list[Chunk]:
        chunks, self._client.chunks = self._client.chunks, []
        news = [replace(chunk, request_id=chunk.request_id - self._first) for chunk in chunks]
        news = [chunk for chunk in news if chunk.request_id >= 0]
        self._live -= {chunk.request_id for chunk in news if chunk.finish is not None}
        return news

    def step(self) -> list[Chunk]:
        """Waits until a round has given tokens; several rounds may pass."""
        before = self._tokens
        until = time.monotonic() + patient(60)
        while not self._client.chunks and self._tokens == before:
            self._refresh()
            self._tokens = self._health.tokens_emitted
            assert time.monotonic() < until, self._client.log()
        return self._news()

    @property
    def has_work(self) -> bool:
        return not self._paused and bool(self._live)

    def abort(self, request_ids: frozenset[int] | None) -> list[Chunk]:
        self._client.send(
            abort=pb.AbortRequests(
                request_ids=[self._first + one for one in sorted(request_ids or ())]
            )
        )
        self._refresh()
        return self._ended()

    def _ended(self) -> list[Chunk]:
        self._refresh()  # chunks leave with the round after the command
        self._refresh()
        return self._news()

    def pause(self, mode: PauseMode) -> list[Chunk]:
        self._client.ask(pause=pb.PauseGeneration(mode=_MODES[mode]))
        self._paused = True
        return self._ended()

    def resume(self) -> None:
        self._client.ask(**{"continue": pb.ContinueGeneration()})
        self._paused = False

    def prepare_weights(self, target: Target, version: int, path: Path, profile: str = "") -> None:
        self._client.ask(
            prepare_weights=pb.PrepareWeights(
                target=_TARGETS[target], version=version, path=str(path), profile=profile
            )
        )

    def commit_weights(self, versions: VersionSet, mode: PauseMode) -> list[Chunk]:
        shifted = tpb.VersionSet(
            seq=self._base + versions.seq,
            policy=versions.policy,
            drafter=versions.drafter,
            profile=versions.profile,
        )
        self._client.ask(commit_weights=pb.CommitWeights(versions=shifted, mode=_MODES[mode]))
        return self._ended() if mode is PauseMode.ABORT else []

    def abort_weights(self, target: Target, version: int) -> None:
        self._client.ask(abort_weights=pb.AbortWeights(target=_TARGETS[target], version=version))

    def force_arm(self, arm: str) -> None:
        self._client.ask(set_speculation=pb.SetSpeculation(forced_arm=arm))

    def learn_arms(self, reports: Sequence[pb.ArmStats]) -> None:
        self._client.ask(learn_arms=pb.LearnArms(arms=reports))

    def quarantine(self, withheld: pb.Quarantine) -> None:
        self._client.ask(quarantine=withheld)

    def release_memory(self) -> int:
        return self._client.ask(release_memory=pb.ReleaseMemory()).done.released_bytes

    def resume_memory(self) -> None:
        self._client.ask(resume_memory=pb.ResumeMemory())

    def flush_cache(self) -> None:
        self._client.ask(flush_cache=pb.FlushCache())

    @property
    def load(self) -> pb.WorkerHealth:
        self._refresh()
        health, before = pb.WorkerHealth(), self._settled
        health.CopyFrom(self._health)
        health.tokens_emitted -= before.tokens_emitted
        health.busy_s -= before.busy_s
        health.ClearField("speculation")
        for part in ("split", "prefixes"):
            now, earlier = getattr(health, part), getattr(before, part)
            for one in now.DESCRIPTOR.fields:
                setattr(now, one.name, getattr(now, one.name) - getattr(earlier, one.name))
        if health.prefixes == pb.PrefixStats():
            health.ClearField("prefixes")
        return health

    def close(self) -> None:
        """Leaves the process running."""
