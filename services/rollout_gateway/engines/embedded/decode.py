"""One decode round: draft, forward, verify, accept, keep what was learned. Owns the order of these
steps.

A slot with n known tokens has n - 1 of them cached. A round forwards token n - 1 and the drafts
under it, which gives the draws for positions n, n + 1, ...; the first draw of a request is an
ordinary round after its prompt is cached.
"""

from __future__ import annotations

import time
from collections.abc import Sequence, Set

import torch
from torch import Tensor

from paceline.models.cache import cache_rows
from paceline.models.decoder import Block, forward_hidden, head_logits, make_block
from paceline.models.sampling import DrawParams, top_alternatives
from paceline.trajectory import SpeculationStats
from rollout_gateway.engines.embedded.capture import Capture, DraftRows
from rollout_gateway.engines.embedded.grammars import Grammars
from rollout_gateway.engines.embedded.kv_cache import SlotStore
from rollout_gateway.engines.embedded.nodes import Nodes
from rollout_gateway.engines.embedded.rejected import rejected_drafts
from rollout_gateway.engines.embedded.sampled import verify_drawn
from rollout_gateway.engines.embedded.speculative import DraftPart, Speculation
from rollout_gateway.engines.embedded.verify import Verdict, verify
from rollout_gateway.engines.embedded.weights import EngineWeights
from rollout_gateway.engines.nouns import RoundSplit
from rollout_gateway.engines.requests.penalties import Penalties
from rollout_gateway.engines.requests.sequence import RunningSequence


class Decoder:
    """Runs rounds over the slots it is given."""

    def __init__(
        self,
        weights: EngineWeights,
        speculation: Speculation,
        store: SlotStore,
        capture: Capture,
        grammars: Grammars,
    ) -> None:
        self._weights = weights
        self._speculation = speculation
        self._store = store
        self._capture = capture
        self._penalties = Penalties()
        self._grammars = grammars
        self._params: tuple[tuple[int, ...], DrawParams] | None = None
        # One thread's CPU time is what a round costs even while other processes take the core away;
        # with more threads only the wall clock sees how well they ran together.
        self.clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self.tokens_emitted = 0
        self.stats = SpeculationStats()
        self.split = RoundSplit()

    def round(
        self, slots: Sequence[int], rows: Sequence[RunningSequence], *, draining: bool
    ) -> None:
        """Every row takes the tokens of one round; rows that end have their finish set.

        draining: nobody waits, so that the batch only shrinks.
        """
        plan = self._speculation.choose(rows, draining=draining)
        parts = self._speculation.parts(plan, slots, rows, self._store)
        lengths = [sequence.length for sequence in rows]
        began = self.clock()
        places = torch.tensor((slots, lengths), device=self._store.token_ids.device)
        cache_slots, roots = places[0], places[1] - 1
        last = self._store.token_ids[cache_slots, roots][:, None]
        params = self._row_params(rows)
        nodes, parts = self._speculation.draft(parts, last, params)
        drafted = self.clock()
        block, hidden = self._forward(slots, roots, max(lengths), nodes)
        logits = head_logits(self._weights.policy, hidden)
        forwarded = self.clock()
        self._grammars.mask_(rows, nodes, logits)
        adjusted = self._adjusted(rows, nodes, logits)
        verdict = self._verify(logits, nodes, parts, nodes.positions(roots) + 1, params, adjusted)
        trained = {row for part in parts if part.speculator.trainable for row in part.members}
        taken = self._accept(rows, verdict, nodes, logits, block, trained)
        verified = self.clock()
        self._keep(slots, rows, roots, cache_slots, nodes, block, hidden, verdict, taken)
        self._speculation.learn_drafts(parts, verdict)
        ended = self.clock()
        self._speculation.observe(plan, taken, ended - began)
        self._speculation.learn_costs(
            plan, len(hidden), verified - drafted, ended - verified + drafted - began
        )
        self.split.rounds += 1
        self.split.nodes += len(hidden)
        self.split.draft_s += drafted - began
        self.split.forward_s += forwarded - drafted
        self.split.sample_s += verified - forwarded
        self.split.keep_s += ended - verified

    def changed(self, ended: Sequence[RunningSequence]) -> None:
        """Other rows run than in the round before: these have ended."""
        self._params = None
        self._penalties.drop(ended)
        self._grammars.drop(ended)

    def _forward(
        self, slots: Sequence[int], roots: Tensor, longest: int, nodes: Nodes
    ) -> tuple[Block, Tensor]:
        """The round's block and the hidden states [N, W] of its nodes."""
        policy, length = self._weights.policy, longest - 1 + nodes.width
        block = make_block(
            policy.config,
            policy.rotation,
            self._store.kv,
            cache_rows(slots),
            nodes.positions(roots),
            length,
            nodes.layout(roots, length),
        )
        token_ids = nodes.compute(nodes.tokens).clamp(min=0)
        return block, forward_hidden(policy, self._store.kv, token_ids, block, self._store.inner)

    def _adjusted(
        self, rows: Sequence[RunningSequence], nodes: Nodes, logits: Tensor
    ) -> Tensor | None:
        """Logits [N, V] after penalties and bias; None when no row asks for any."""
        if not any(sequence.request.sampling.adjusted for sequence in rows):
            return None
        whole = self._penalties.adjust(rows, nodes.spread(logits), nodes.tokens, nodes.parents)
        return None if whole is None else nodes.compute(whole)

    def _row_params(self, rows: Sequence[RunningSequence]) -> DrawParams:
        key = tuple(id(sequence) for sequence in rows)
        if self._params is None or self._params[0] != key:
            sampling = [sequence.request.sampling for sequence in rows]
            params = DrawParams.of(
                [one.seed for one in sampling],
                [one.temperature for one in sampling],
                top_k=[one.top_k for one in sampling],
                top_p=[one.top_p for one in sampling],
                min_p=[one.min_p for one in sampling],
                device=self._store.token_ids.device,
            )
            self._params = (key, params)
        return self._params[1]

    def _verify(
        self,
        logits: Tensor,
        nodes: Nodes,
        parts: Sequence[DraftPart],
        positions: Tensor,
        params: DrawParams,
        adjusted: Tensor | None,
    ) -> Verdict:
        """By the rule the engine was built with; params: B rows."""
        if nodes.width > 1:
            owners = torch.arange(len(positions), device=positions.device)[:, None].expand(
                -1, nodes.width
            )
            params = params.rows(nodes.compute(owners))
        if self._speculation.rejection and parts:
            probs = self._speculation.draft_probs(parts, nodes, logits.shape[-1])
            return verify_drawn(logits, nodes, positions, params, probs, adjusted)
        return verify(logits, nodes, positions, params, adjusted)

    def _accept(
        self,
        rows: Sequence[RunningSequence],
        verdict: Verdict,
        nodes: Nodes,
        logits: Tensor,
        block: Block,
        trained: Set[int],
    ) -> list[int]:
        """Appends what each row emits; returns tokens taken per row (fewer than verified at a stop
        or limit).
        """
        tokens, logprobs, gaps = (
            verdict.tokens.tolist(),
            verdict.logprobs.tolist(),
            verdict.gaps.tolist(),
        )
        drafted, levels = nodes.drafted.tolist(), nodes.levels.tolist()
        version, taken = self._weights.versions.policy, []
        for row, accepted in enumerate(verdict.accepted.tolist()):
            sequence, end = rows[row], accepted + 1
            count = sequence.take(tokens[row][:end], logprobs[row][:end], gaps[row][:end], version)
            sequence.count(drafted[row], count, levels[row], trained=row in trained)
            if wanted := sequence.request.sampling.top_logprobs:
                path = logits[_along(nodes, block, verdict)[row, :count]]
                sequence.alternatives += top_alternatives(
                    path, sequence.request.sampling.temperature, wanted
                )
            taken.append(count)
        self._count(drafted, taken)
        return taken

    def _count(self, drafted: Sequence[int], taken: Sequence[int]) -> None:
        pairs = [
            (proposed, count) for proposed, count in zip(drafted, taken, strict=True) if proposed
        ]
        tokens = sum(count for _, count in pairs)
        self.tokens_emitted += sum(taken)
        self.stats += SpeculationStats(
            len(taken),
            sum(proposed for proposed, _ in pairs),
            tokens - len(pairs),
            tokens,
            len(pairs),
        )

    def _keep(
        self,
        slots: Sequence[int],
        rows: Sequence[RunningSequence],
        roots: Tensor,
        cache_slots: Tensor,
        nodes: Nodes,
        block: Block,
        hidden: Tensor,
        verdict: Verdict,
        taken: Sequence[int],
    ) -> None:
        """Tokens, states and cache of the accepted path, as if they had come one by one; rows to
        the capture.
        """
        store, length = self._store, verdict.tokens.shape[1]
        cells = store.cells(cache_slots, roots, length)
        along = _along(nodes, block, verdict)
        states = hidden if verdict.path is None and nodes.kept is None else hidden[along.flatten()]
        store.keep_hidden(cells, states)
        store.keep_tokens(cells, verdict.tokens)
        if verdict.path is not None:
            store.keep_path(cache_slots, roots, verdict.path)
        if self._capture.wanted(rows):
            steps = torch.arange(length, device=roots.device)
            inputs = nodes.tokens if verdict.path is None else nodes.tokens.gather(1, verdict.path)
            self._capture.write(
                rows,
                taken,
                roots[:, None] + steps,
                inputs,
                states.view(*along.shape, -1),
                self._weights.versions.policy,
                self._draft_rows(rows, roots, nodes, block, hidden, verdict, taken),
            )

    def _draft_rows(
        self,
        rows: Sequence[RunningSequence],
        roots: Tensor,
        nodes: Nodes,
        block: Block,
        hidden: Tensor,
        verdict: Verdict,
        taken: Sequence[int],
    ) -> DraftRows | None:
        """Rows of rejected drafts of captured requests; None when they are not asked for or nothing
        was drafted.
        """
        if not self._capture.takes_rejected or nodes.width == 1:
            return None
        asked = [
            count if one.request.capture else 0 for one, count in zip(rows, taken, strict=True)
        ]
        drafts = rejected_drafts(nodes, verdict, torch.tensor(asked, device=roots.device))
        self._capture.rejected_left_out += drafts.left_out
        at = (drafts.rows, drafts.nodes)
        flat = drafts.rows * nodes.width + drafts.nodes
        states = hidden[flat if block.padding is None else block.padding[flat]]
        return DraftRows(
            drafts.rows, drafts.parents, nodes.positions(roots)[at], nodes.tokens[at], states
        )


def _along(nodes: Nodes, block: Block, verdict: Verdict) -> Tensor:
    """int64 [B, P]: for each node of the path its row among the forwarded ones."""
    rows, width = nodes.tokens.shape
    steps = (
        torch.arange(width, device=nodes.tokens.device) if verdict.path is None else verdict.path
    )
    flat = torch.arange(rows, device=nodes.tokens.device)[:, None] * width + steps
    return flat if block.padding is None else block.padding[flat]
