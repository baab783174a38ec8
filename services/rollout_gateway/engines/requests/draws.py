"""Prepares the draws of running requests: parameters, penalties, prompt scores and accepted paths.

Token counts are kept by sequence and updated as it grows. They survive slots that move and caches
that are rebuilt. paceline.models.sampling defines the formulas and the counts at draft nodes.
Prompt scores are log_softmax(logits / temperature), as for every drawn token.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from paceline.models import sampling
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.v1 import engine_pb2 as pb


def follow(drawn: Tensor, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """From the root, follow the child node that equals the draw at its parent.

    Returns the path [B, Q], with the root repeated behind its end, and the number of drafts on it
    [B]. drawn, tokens, parents int64 [B, Q]: the draw at each node, the node's own token, its
    parent. Node 0 is the root, parents precede their children, and siblings differ. A node with a
    parent below 0 is outside its tree.
    """
    above = parents.clamp(min=0)
    reached = (tokens == drawn.gather(1, above)) & (parents >= 0)
    reached[:, 0] = True
    reached = reachable(reached, above)
    # Siblings differ, so the reached nodes are one path in ascending order. A node's rank is
    # therefore its depth.
    ranks = reached.long().cumsum(dim=1) - 1
    nodes = torch.arange(tokens.shape[1], device=tokens.device)
    path = torch.zeros_like(tokens).scatter_add_(1, ranks, torch.where(reached, nodes, 0))
    return path, reached.sum(dim=1) - 1


def reachable(allowed: Tensor, parents: Tensor) -> Tensor:
    """bool [B, Q]: nodes that are allowed together with all their ancestors.

    parents int64 [B, Q]; the root is its own parent.
    """
    # Each turn doubles the number of ancestors already checked.
    for _ in range(max(parents.shape[1] - 1, 1).bit_length()):
        allowed = allowed & allowed.gather(1, parents)
        parents = parents.gather(1, parents)
    return allowed


@dataclass(slots=True)
class _TokenCounts:
    """Token counts of one sequence."""

    prompt_holds: Tensor  # bool [V]
    counts: Tensor  # int32 [V], of the first `counted` response tokens
    counted: int = 0


class Penalties:
    """Adjusts the logits of rows that need it; other rows cost nothing."""

    def __init__(self) -> None:
        self._counts: dict[RunningSequence, _TokenCounts] = {}

    def adjust(
        self,
        rows: Sequence[RunningSequence | None],
        logits: Tensor,
        token_ids: Tensor,
        parents: Tensor | None = None,
        *,
        ahead: Mapping[int, Sequence[int]] | None = None,
    ) -> Tensor | None:
        """Logits to draw from, float32 [B, Q, V]; None when no row needs adjustment. `logits` is
        unchanged.

        rows [B]: the sequence of each row, None for a row without a sequence; logits [B, Q, V].
        token_ids int64 [B, Q] and parents: the draft nodes, see node_counts. ahead: row -> response
        tokens that are drawn and not yet in its sequence.
        """
        known = {row: one for row, one in enumerate(rows) if one is not None}
        asking = {row: one for row, one in known.items() if one.request.sampling.adjusted}
        if not asking:
            return None
        adjusted = logits.to(torch.float32, copy=True)
        counting = {row: one for row, one in asking.items() if one.request.sampling.penalised}
        if counting:
            index = torch.tensor(list(counting), device=logits.device)
            counted_rows = [self._grown(sequence, logits) for sequence in counting.values()]
            base = torch.stack([one.counts for one in counted_rows])
            for place, row in enumerate(counting):
                _count_(base[place], (ahead or {}).get(row, ()))
            above = None if parents is None else parents[index]
            counts = sampling.node_counts(base, token_ids[index], above)
            holds = torch.stack([one.prompt_holds for one in counted_rows])
            read = attrgetter("repetition_penalty", "frequency_penalty", "presence_penalty")
            strengths = [read(one.request.sampling) for one in counting.values()]
            adjusted[index] = sampling.penalised(logits[index], holds, counts, strengths)

        confined = any(one.request.sampling.confined for one in asking.values())
        depths = sampling.node_depths(token_ids, parents) if confined else token_ids
        for row, sequence in asking.items():
            if bias := dict(sequence.request.sampling.logit_bias):
                ids, values = torch.tensor(list(bias)), torch.tensor(list(bias.values()))
                values = values.to(adjusted)
                sampling.add_bias_(adjusted[row], ids.to(logits.device), values)
            if sequence.request.sampling.confined:
                drawn_before = len(sequence.tokens) + len((ahead or {}).get(row, ()))
                _forbid_(adjusted[row], sequence, depths[row] + drawn_before)
        return adjusted

    def drop(self, ended: Iterable[RunningSequence]) -> None:
        """Forget sequences that will not be adjusted again; unknown sequences are ignored."""
        for sequence in ended:
            self._counts.pop(sequence, None)

    def __len__(self) -> int:
        """Number of sequences with counts."""
        return len(self._counts)

    def _grown(self, sequence: RunningSequence, logits: Tensor) -> _TokenCounts:
        """Counts of a sequence with all its tokens."""
        counts = self._counts.get(sequence)
        if counts is None:
            vocab, device = logits.shape[-1], logits.device
            holds = torch.zeros(vocab, dtype=torch.bool, device=device)
            holds[torch.tensor(sequence.request.prompt, dtype=torch.int64, device=device)] = True
            counts = _TokenCounts(holds, torch.zeros(vocab, dtype=torch.int32, device=device))
            self._counts[sequence] = counts
        _count_(counts.counts, sequence.tokens[counts.counted :])
        counts.counted = len(sequence.tokens)
        return counts


def _count_(counts: Tensor, tokens: Sequence[int]) -> None:
    """Add one for each token to counts [V], in place."""
    if tokens:
        ids = torch.tensor(tokens, dtype=torch.int64, device=counts.device)
        counts.index_put_((ids,), torch.ones_like(ids, dtype=counts.dtype), accumulate=True)


def _forbid_(logits: Tensor, sequence: RunningSequence, indices: Tensor) -> None:
    """Set forbidden tokens to -inf in logits [Q, V], in place.

    indices int64 [Q]: index in the response of the token drawn from each row.
    """
    asked, device = sequence.request.sampling, logits.device
    if asked.allowed_token_ids:
        forbidden = torch.ones(logits.shape[-1], dtype=torch.bool, device=device)
        forbidden[torch.tensor(asked.allowed_token_ids, device=device)] = False
        logits.masked_fill_(forbidden, -torch.inf)
    ends = [token for token in sequence.stop_ids if token < logits.shape[-1]]
    if asked.min_tokens and ends:
        stops = torch.zeros(logits.shape[-1], dtype=torch.bool, device=device)
        stops[torch.tensor(ends, device=device)] = True
        logits.masked_fill_((indices < asked.min_tokens)[:, None] & stops, -torch.inf)


SCORED_ROWS = 128
"""Rows of logits computed at a time. All rows of a long prompt would be larger than the model."""


def score_prompt(
    head: Callable[[Tensor], Tensor], sequence: RunningSequence, first: int, hidden: Tensor
) -> None:
    """Add the scores of the tokens after the positions from `first` on, which have states hidden
    [n, W].

    head: maps states to logits. Existing scores of the same tokens are replaced. The last token of
    a continued response is not in the prompt and gets no score.
    """
    scores, asked = sequence.prompt_scores, sequence.request.sampling
    assert scores is not None
    del scores[first:]
    tokens = torch.tensor(sequence.request.prompt[first + 1 : first + 1 + len(hidden)])
    for start in range(0, len(tokens), SCORED_ROWS):
        wanted = tokens[start : start + SCORED_ROWS]
        logits = head(hidden[start : start + len(wanted)])
        wanted = wanted.to(logits.device)
        scores += _scores(logits, wanted, asked.temperature, asked.prompt_logprobs)


def _scores(logits: Tensor, tokens: Tensor, temperature: float, count: int) -> list[pb.PromptScore]:
    """Scores of tokens int64 [n] under logits [n, V], with `count` alternatives each."""
    temperatures = torch.full((len(tokens),), temperature, device=logits.device)
    logprobs = sampling.behavior_logprobs(logits, temperatures)
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > chosen).sum(dim=1) + 1
    tops = sampling.top_alternatives(logits, temperature, count) if count else [()] * len(tokens)
    found = []
    for logprob, rank, top in zip(chosen[:, 0].tolist(), ranks.tolist(), tops, strict=True):
        found.append(pb.PromptScore(logprob=logprob, rank=rank))
        if top:
            found[-1].top.CopyFrom(wire.alternatives_to(top))
    return found


class DrawTable:
    """Parameters of the last batch."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._params: sampling.DrawParams | None = None

    def params(
        self, key: Hashable, rows: Sequence[Sampling], device: torch.device
    ) -> sampling.DrawParams:
        """Parameters with one row per element of `rows`.

        key: must change whenever `rows` changes.
        """
        if self._params is None or key != self._key:
            self._key = key
            masks = {name: [getattr(one, name) for one in rows] for name in sampling.MASKS}
            seeds, temperatures = [one.seed for one in rows], [one.temperature for one in rows]
            self._params = sampling.DrawParams.of(seeds, temperatures, device=device, **masks)
        return self._params
