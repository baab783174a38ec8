"""The decode round: draft, forward, verify, accept, keep the results, in this order.

A slot with n tokens has n - 1 of them cached. A round forwards token n - 1 and the drafts under it,
which gives the draws for positions n, n + 1, ... The first draw of a request is an ordinary round
after its prompt is cached.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.arm_names import OFF
from paceline.models.cache import cache_rows
from paceline.models.decoder import Block, forward_hidden, head_logits, make_block
from paceline.models.sampling import DrawParams, top_alternatives
from paceline.services.rollout_gateway.engines.embedded import kv_cache, speculative, verify
from paceline.services.rollout_gateway.engines.embedded.weights import EngineWeights
from paceline.services.rollout_gateway.engines.requests import draws, grammars, timing
from paceline.services.rollout_gateway.engines.requests.sequence import DrawnBy, RunningSequence
from paceline.v1.engine_pb2 import RoundSplit


@dataclass(frozen=True, slots=True)
class Round:
    """B forwarded rows: their last tokens and drafts, N nodes in all."""

    rows: Sequence[RunningSequence]
    slots: Tensor
    """int64 [B]"""
    roots: Tensor
    """int64 [B]: positions of the rows' last tokens."""
    nodes: verify.Nodes
    parts: Sequence[speculative.DraftPart]
    block: Block
    hidden: Tensor
    """[N, W]"""
    logits: Tensor
    """[N, V]"""

    def place(self, flat: Tensor) -> Tensor:
        """Indices, among the forwarded nodes, of nodes given by their int64 index in the flattened
        block.
        """
        return flat if self.block.padding is None else self.block.padding[flat]


@dataclass(eq=False)
class Decoder:
    """Runs rounds over given slots."""

    _weights: EngineWeights
    _speculation: speculative.Speculation
    _store: kv_cache.SlotStore
    _grammars: grammars.GrammarMasks
    _stopwatch: timing.Stopwatch
    _rounds = _nodes = tokens_emitted = 0

    def __post_init__(self) -> None:
        self._penalties, self._draws = draws.Penalties(), draws.DrawTable()

    def round(self, slots: Sequence[int], rows: Sequence[RunningSequence]) -> None:
        """Run one decode round: append tokens to every row, and set `finish` on rows that end."""
        stopwatch, speculation = self._stopwatch, self._speculation
        plan = speculation.choose(rows)
        version = self._weights.prepared.serving.policy
        parts = speculation.parts(plan, slots, rows, self._store, version)
        teaches = not any(sequence.request.probe for sequence in rows)
        stopwatch.start()
        roots = [sequence.length - 1 for sequence in rows]
        places = torch.tensor((slots, roots), device=self._store.token_ids.device)
        sampling = [sequence.request.sampling for sequence in rows]
        params = self._draws.params(tuple(map(id, rows)), sampling, places.device)
        nodes, parts = speculation.draft(parts, self._store.token_ids[*places][:, None], params)
        stopwatch.lap("draft")
        one = self._forward(rows, slots, places, nodes, parts)
        stopwatch.lap("forward")
        structured = {row: one for row, one in enumerate(rows) if one.request.sampling.structured}
        if structured:
            parents = nodes.every_parent
            self._grammars.mask_(structured, nodes.tokens, parents, one.logits, nodes.kept)
        verdict = self._verify(one, params)
        taken = self._accept(one, verdict)
        stopwatch.lap("sample")
        self._keep(one, verdict)
        if teaches:
            speculation.learn_drafts(parts, verdict)
        stopwatch.lap("keep")
        if teaches:
            speculation.learn_costs(plan, parts, taken, len(one.hidden), stopwatch)
        self._rounds += 1
        self._nodes += len(one.hidden)

    @property
    def split(self) -> RoundSplit:
        """Seconds of rounds by phase, with all other laps of the stopwatch."""
        seconds = {f"{name}_s": total for name, total in self._stopwatch.totals.items()}
        return RoundSplit(rounds=self._rounds, nodes=self._nodes, **seconds)

    def changed(self, ended: Sequence[RunningSequence]) -> None:
        """Drop the state of ended rows after a change of the batch."""
        self._draws = draws.DrawTable()
        self._penalties.drop(ended)
        self._grammars.drop(ended)

    def _forward(
        self,
        rows: Sequence[RunningSequence],
        slots: Sequence[int],
        places: Tensor,
        nodes: verify.Nodes,
        parts: Sequence[speculative.DraftPart],
    ) -> Round:
        """Forward the nodes under the last tokens; places int64 [2, B]: slots and positions."""
        policy, store, roots = self._weights.policy, self._store, places[1]
        length = max(sequence.length for sequence in rows) - 1 + nodes.width
        shape = policy.config, policy.rotation, store.kv, cache_rows(slots)
        positions, layout = nodes.positions(roots), nodes.layout(roots, length)
        block = make_block(*shape, positions, length, layout)
        token_ids = nodes.compute(nodes.tokens).clamp(min=0)
        hidden = forward_hidden(policy, store.kv, token_ids, block, store.inner)
        logits = head_logits(policy, hidden)
        return Round(rows, places[0], roots, nodes, parts, block, hidden, logits)

    def _verify(self, one: Round, params: DrawParams) -> verify.Verdict:
        """Verify by the engine's rule; params: B rows."""
        nodes, logits, positions = one.nodes, one.logits, one.nodes.positions(one.roots) + 1
        adjusted = None
        if any(sequence.request.sampling.adjusted for sequence in one.rows):
            spread = nodes.spread(logits)
            whole = self._penalties.adjust(one.rows, spread, nodes.tokens, nodes.parents)
            adjusted = None if whole is None else nodes.compute(whole)
        if nodes.width > 1:
            owners = torch.arange(len(positions), device=positions.device)[:, None]
            params = params.rows(nodes.compute(owners.expand(-1, nodes.width)))
        return verify.verify(logits, nodes, positions, params, adjusted)

    def _accept(self, one: Round, verdict: verify.Verdict) -> list[int]:
        """Appends the emitted tokens of each row; returns the number of appended tokens per row,
        fewer than verified at a stop or limit.
        """
        trained = {row for part in one.parts if part.speculator.trainable for row in part.members}
        origins = self._origins(one)
        drafted, levels = one.nodes.drafted.tolist(), one.nodes.levels.tolist()
        columns = (verdict.accepted, verdict.tokens, verdict.logprobs, verdict.gaps)
        taken = []
        for row, (accepted, tokens, logprobs, gaps) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            sequence, end = one.rows[row], accepted + 1
            count = sequence.append_tokens(
                tokens[:end], logprobs[:end], gaps[:end], origins[row], accepted
            )
            arm = origins[row].arm
            sequence.count(arm, drafted[row], count, levels[row], trained=row in trained)
            if wanted := sequence.request.sampling.top_logprobs:
                path = one.logits[_along(one, verdict)[row, :count]]
                temperature = sequence.request.sampling.temperature
                sequence.alternatives += top_alternatives(path, temperature, wanted)
            taken.append(count)
            self.tokens_emitted += 0 if sequence.request.probe else count

        return taken

    def _origins(self, one: Round) -> list[DrawnBy]:
        """Origin of each row's tokens."""
        version, numbers = self._weights.prepared.serving.policy, self._weights.model.number_format
        origins = [DrawnBy(version, OFF, numbers)] * len(one.rows)
        for part in one.parts:
            for row in part.members:
                origins[row] = DrawnBy(version, part.arm.name, numbers)
        return origins

    def _keep(self, one: Round, verdict: verify.Verdict) -> None:
        """Store tokens, states and cache of the accepted path, as if its tokens were decoded one by
        one.
        """
        store, nodes, path, length = self._store, one.nodes, verdict.path, verdict.tokens.shape[1]
        cells = store.cells(one.slots, one.roots, length)
        along = _along(one, verdict)
        whole = path is None and nodes.kept is None
        states = one.hidden if whole else one.hidden[along.flatten()]
        store.keep_hidden(cells, states)
        # Each draw goes to the cell after its node's cell; draws not emitted are never read.
        store.token_ids.view(-1).index_copy_(0, cells + 1, verdict.tokens.reshape(-1))
        if path is not None:
            store.keep_path(one.slots, one.roots, path)


def _along(one: Round, verdict: verify.Verdict) -> Tensor:
    """int64 [B, P]: index of each path node among the forwarded nodes."""
    rows, width = one.nodes.tokens.shape
    device = one.nodes.tokens.device
    steps = torch.arange(width, device=device) if verdict.path is None else verdict.path
    return one.place(torch.arange(rows, device=device)[:, None] * width + steps)
