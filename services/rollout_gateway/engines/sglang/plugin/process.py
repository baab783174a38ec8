"""Holds the plugin's requests, versions and parts inside one scheduler process of SGLang."""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.arm_names import OFF
from paceline.messages import stats_to_proto
from paceline.models.config import read_config
from paceline.models.loading import DTYPES
from paceline.models.sampling import Draw, draw
from paceline.services.rollout_gateway.engines import nouns
from paceline.services.rollout_gateway.engines.requests import control, draws, sequence, timing
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.services.rollout_gateway.engines.sglang.hook_points import HOOK_POINTS
from paceline.services.rollout_gateway.engines.sglang.plugin import (
    arms,
    capture,
    check_hooks,
    sampling,
    slot_rows,
    weights,
)
from paceline.services.rollout_gateway.engines.sglang.plugin.arms import Tracked, cache_key
from paceline.services.rollout_gateway.engines.sglang.spec import SGLangSpec, row_layout
from paceline.services.rollout_gateway.engines.worker import WorkerSpec, process, ring, wire
from paceline.trajectory import SpeculationStats, VersionSet
from paceline.v1 import engine_pb2 as pb

ENDED = Sampling(seed=0, max_tokens=1, temperature=0.0)
"""Sampling of a request that has ended while its round runs; its draws are dropped."""
IDLE_MS = 1000
"""A sleeping scheduler checks its parent and its other sockets at least this often, in ms."""


class Plugin:
    """State of the plugin in one scheduler process.

    Created when SGLang loads its plugins; started when SGLang's event loop begins.
    """

    weights: weights.PluginWeights
    admission: control.Admission
    grammars: sampling.TreeGrammars
    scheduler: Any
    info: nouns.EngineInfo

    def __init__(self, worker: WorkerSpec) -> None:
        self.worker = worker
        self.spec = SGLangSpec.model_validate(worker.engine)
        self.rank = 0  # tensor-parallel rank
        self.tp_group: Any = None  # SGLang's group of ranks; None with a single rank
        self.peer: process.Peer | None = None  # rank 0 only
        self.ring: ring.RowRing | None = None
        self.rows: nouns.RowLayout | None = row_layout(self.spec) if worker.ring_path else None
        self.slot_rows: slot_rows.SlotRows | None = None
        self.unread = slot_rows.Unread()
        self.rows_invalid = 0
        self.reuses = True  # False in quarantine: no request takes another's keys and values
        self.arms = arms.ArmChooser(self.spec.arm_names, self.spec.bandit, self.spec.seed)
        self.requests: dict[str, Tracked] = {}  # by SGLang's request id
        self.numbers = itertools.count(1)  # of enqueued requests; the same on every rank
        self.batch: Any = None  # batch of the target's forward that runs now
        self.arm = OFF  # arm of the round that runs now
        self._pending: list[sampling.PendingDraws] = []
        self._table = draws.DrawTable()
        self._penalties = draws.Penalties()
        self.tokens_emitted = 0
        self._ended = SpeculationStats()
        self._prompt_tokens = self._reused_tokens = 0
        self._busy_s = 0.0
        self._busy_since: float | None = None

    @property
    def versions(self) -> VersionSet:
        """Serving set."""
        return self.weights.prepared.serving if hasattr(self, "weights") else VersionSet()

    @property
    def origin(self) -> sequence.DrawnBy:
        """Policy version, arm and number format of the draws of the present forward."""
        return sequence.DrawnBy(self.versions.policy, self.arm, self.spec.number_format)

    def start(self, scheduler: Any) -> None:
        """Start once the model is loaded; rank 0 then reports to the gateway that it serves.

        Raises InternalError when SGLang did not apply all hooks, ConfigError when capture is
        impossible.
        """
        from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
        from sglang.srt.runtime_context import get_parallel

        check_hooks([point.path for point in HOOK_POINTS])
        parallel = get_parallel()
        self.scheduler, self.rank = scheduler, parallel.tp_rank
        self.tp_group = parallel.tp_group if parallel.tp_size > 1 else None
        if self.rank == 0 and self.worker.ring_path:
            self.ring = ring.RowRing.attach(Path(self.worker.ring_path))
        group = self.tp_group.cpu_group if self.tp_group is not None else None
        ranks = weights.TensorParallel(self.rank, parallel.tp_size, group)
        self.weights = weights.PluginWeights(self.spec, ranks)
        model_dir = Path(self.spec.model_dir)
        config = read_config(model_dir, experts=True)
        room = scheduler.req_to_token_pool.req_to_token.shape[1] - get_alloc_reserve_per_decode()
        longest = min(self.spec.max_sequence_tokens, scheduler.max_req_input_len, room)
        self.admission = control.Admission.of_model(config, model_dir, longest)
        self.grammars = sampling.TreeGrammars(config, model_dir, self.rank, self.tp_group)
        capture.start(self)
        device, dtype = torch.device(scheduler.device), DTYPES[self.spec.dtype]
        tflops = parallel.tp_size * timing.square_product_tflops(device, dtype)
        rows = self.rows or nouns.RowLayout.last(config.hidden_size)
        sizes = config.vocab_size, config.hidden_size, longest
        names = tuple(self.arms.arms)
        self.info = nouns.EngineInfo(*sizes, names, self._capabilities(), rows, tflops)
        if self.rank == 0:
            self.peer = process.Peer(self.ring)
            index, head_hash = self.worker.worker_index, self.weights.head_hash
            ready = wire.ready_to(self.info, index, self.versions, head_hash)
            self.peer.send(pb.WorkerEvent(ready=ready))

    def _capabilities(self) -> frozenset[nouns.Capability]:
        capabilities = {
            nouns.Capability.PENALTIES: True,
            # with it, each rank has only a part of the states where logits are computed
            nouns.Capability.PROMPT_LOGPROBS: not self.spec.arguments.get("enable_layernorm_sp"),
            nouns.Capability.JSON_SCHEMA: self.grammars.possible,
            nouns.Capability.GRAMMARS: self.grammars.possible,
            nouns.Capability.CAPTURE: self.rows is not None,
            nouns.Capability.DRAFTER_UPDATE: self.weights.has_drafter,
            nouns.Capability.RELEASE_MEMORY: self.spec.memory_saver
            and self.scheduler.device == "cuda",
        }
        return frozenset(one for one, present in capabilities.items() if present)

    # ---- draws

    def draw(
        self,
        reqs: Sequence[Any],
        logits: Tensor,
        positions: Tensor,
        token_ids: Tensor,
        parents: Tensor | None = None,
    ) -> tuple[Draw, list[Tracked | None]]:
        """Draw the tokens AT `positions` [B * N] from logits [B * N, V]; returns also each row's
        request [B].

        token_ids int64 [B, N] and parents: the nodes of the logits, see
        models.penalties.node_counts. For requests with a grammar, logits and token_ids change in
        place, see TreeGrammars.mask_draws_. Without such a request, or one with adjusted logits,
        nothing waits for the device.
        """
        tracked = [self.requests.get(req.rid) for req in reqs]
        asked = [one.request.sampling if one is not None else ENDED for one in tracked]
        nodes = token_ids.shape[1]
        key = (*(req.rid for req in reqs), nodes)
        every = [one for one in asked for _ in range(nodes)]
        params = self._table.params(key, every, logits.device)
        adjusted = None
        if any(one.structured or one.adjusted for one in asked):
            self.settle()  # with overlap scheduling, some drawn tokens are in no request yet
            firsts = positions.view(token_ids.shape)[:, 0].tolist()
            self.grammars.mask_draws_(tracked, logits, firsts, token_ids, parents)
            rows = [one.sequence if one is not None else None for one in tracked]
            ahead = {n: one.ahead(firsts[n]) for n, one in enumerate(tracked) if one is not None}
            by_row = logits.view(*token_ids.shape, -1)
            adjusted = self._penalties.adjust(rows, by_row, token_ids, parents, ahead=ahead)
        if adjusted is not None:
            adjusted = adjusted.view(logits.shape)
        return draw(logits, positions.long(), params, adjusted), tracked

    def keep(self, pending: sampling.PendingDraws) -> None:
        """Keep a round's draws until SGLang takes the round's tokens."""
        self._pending.append(pending)

    def settle(self) -> None:
        """Record all draws made so far in their requests."""
        pending, self._pending = self._pending, []
        for one in pending:
            one.settle()

    # ---- requests

    def cache_key(self, rid: str) -> str:
        """Namespace of the prefix cache for a request.

        A request has its own namespace where reuse is barred, and while its prompt is scored.
        Scoring needs the states of all prompt tokens.
        """
        key, shares = cache_key(self.versions), not self.requests[rid].sequence.scoring
        return key if self.reuses and shares else f"{key}/{rid}"

    def end(self, rid: str, finish: nouns.Finish | None = None, error: str = "") -> None:
        """Send the last chunk of a request and forget the request.

        `finish` and `error`: given when the request ends before its own end.
        """
        tracked = self.requests.pop(rid)
        self._penalties.drop([tracked.sequence])
        self.grammars.drop([tracked.sequence])
        self.queue_chunks([tracked.end(finish, error) if finish else tracked.sequence.chunk()])
        self._ended += tracked.sequence.speculation
        self._prompt_tokens += len(tracked.request.prompt)
        self._reused_tokens += min(tracked.sequence.copied, len(tracked.request.prompt))

    def queue_chunks(self, chunks: Sequence[nouns.Chunk]) -> None:
        """Queue chunks for the gateway; they are sent between two rounds."""
        if self.peer is not None:
            self.peer.chunks.extend(chunks)

    def can_send(self, chunk: nouns.Chunk) -> bool:
        """False while hidden rows of an ended request are on their way to the ring."""
        leaving = self.slot_rows.leaving if self.slot_rows is not None else ()
        return chunk.finish is None or all(one != chunk.request_id for one, _ in leaving)

    # ---- between two rounds

    def between_rounds(self, sockets: list[Any]) -> list[bytes]:
        """On rank 0, send rows and chunks and receive commands; sleep while there is no work."""
        assert self.peer is not None
        now = time.perf_counter()
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
        capture.drain(self)
        self.peer.flush(self.can_send)
        if self._idle and not self.peer.chunks:
            self.peer.poll(IDLE_MS, sockets)
        self._busy_since = None if self._idle else time.perf_counter()
        commands: list[bytes] = []
        while self.peer.poll(0):
            commands.append(self.peer.receive())
        return commands

    @property
    def _idle(self) -> bool:
        scheduler = self.scheduler
        if scheduler._engine_paused:
            return True
        nothing_runs = scheduler.last_batch is None and scheduler.running_batch.is_empty()
        return nothing_runs and not scheduler.waiting_queue and scheduler.chunked_req is None

    @property
    def load(self) -> pb.WorkerHealth:
        """See CommandedEngine.load."""
        waiting = sum(req.rid in self.requests for req in self.scheduler.waiting_queue)
        stats = sum((one.sequence.speculation for one in self.requests.values()), self._ended)
        dropped = self.slot_rows.rows_dropped if self.slot_rows else 0
        counts = {"prompt_tokens": self._prompt_tokens, "reused_tokens": self._reused_tokens}
        return pb.WorkerHealth(
            running=len(self.requests) - waiting,
            waiting=waiting,
            tokens_emitted=self.tokens_emitted,
            busy_s=self._busy_s,
            speculation=stats_to_proto(stats),
            arms=self.arms.bandit.reports(),
            rows_dropped=dropped + (self.ring.rows_dropped if self.ring else 0),
            rows_invalid=self.rows_invalid,
            prefixes=pb.PrefixStats(**counts),
        )
