"""Applies penalties, logit bias and token restrictions to the logits of running requests.

Token counts are kept by sequence and updated as it grows. They survive slots that move and caches
that are rebuilt. paceline.models.penalties defines the formulas and the counts at draft nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.models.penalties import (
    PenaltyParams,
    add_bias_,
    node_counts,
    node_depths,
    penalised,
)
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence


@dataclass(slots=True)
class _Said:
    """Token counts of one sequence."""

    prompt_holds: Tensor  # bool [V]
    counts: Tensor  # int32 [V], of the first `counted` response tokens
    counted: int = 0

    @classmethod
    def nothing(cls, prompt: Sequence[int], vocab: int, device: torch.device) -> _Said:
        holds = torch.zeros(vocab, dtype=torch.bool, device=device)
        holds[torch.tensor(prompt, dtype=torch.int64, device=device)] = True
        return cls(holds, torch.zeros(vocab, dtype=torch.int32, device=device))

    def grow(self, tokens: Sequence[int]) -> None:
        """Count the new tokens of the response."""
        _count_(self.counts, tokens[self.counted :])
        self.counted = len(tokens)


class Penalties:
    """Adjusts the logits of rows that need it; other rows cost nothing."""

    def __init__(self) -> None:
        self._said: dict[RunningSequence, _Said] = {}

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
        asking = {
            row: one
            for row, one in enumerate(rows)
            if one is not None and one.request.sampling.adjusted
        }
        if not asking:
            return None
        adjusted = logits.to(torch.float32, copy=True)
        counting = {row: one for row, one in asking.items() if one.request.sampling.penalised}
        if counting:
            index = torch.tensor(list(counting), device=logits.device)
            said = [self._grown(sequence, logits) for sequence in counting.values()]
            base = torch.stack([one.counts for one in said])
            for place, row in enumerate(counting):
                _count_(base[place], (ahead or {}).get(row, ()))
            counts = node_counts(
                base, token_ids[index], None if parents is None else parents[index]
            )
            holds = torch.stack([one.prompt_holds for one in said])
            adjusted[index] = penalised(
                logits[index], holds, counts, _params(counting.values(), logits.device)
            )

        confined = any(one.request.sampling.confined for one in asking.values())
        depths = node_depths(token_ids, parents) if confined else token_ids
        for row, sequence in asking.items():
            _add_bias_(adjusted[row], sequence.request.sampling.logit_bias)
            if sequence.request.sampling.confined:
                told = len(sequence.tokens) + len((ahead or {}).get(row, ()))
                _forbid_(adjusted[row], sequence, depths[row] + told)
        return adjusted

    def drop(self, ended: Iterable[RunningSequence]) -> None:
        """Forget sequences that will not be adjusted again; unknown sequences are ignored."""
        for sequence in ended:
            self._said.pop(sequence, None)

    def __len__(self) -> int:
        """Number of sequences with counts."""
        return len(self._said)

    def _grown(self, sequence: RunningSequence, logits: Tensor) -> _Said:
        said = self._said.get(sequence)
        if said is None:
            said = _Said.nothing(sequence.request.prompt, logits.shape[-1], logits.device)
            self._said[sequence] = said
        said.grow(sequence.tokens)
        return said


def _count_(counts: Tensor, tokens: Sequence[int]) -> None:
    """Add one for each token to counts [V], in place."""
    if tokens:
        ids = torch.tensor(tokens, dtype=torch.int64, device=counts.device)
        counts.index_put_((ids,), torch.ones_like(ids, dtype=counts.dtype), accumulate=True)


def _params(sequences: Iterable[RunningSequence], device: torch.device) -> PenaltyParams:
    sampling = [sequence.request.sampling for sequence in sequences]
    return PenaltyParams.of(
        [one.repetition_penalty for one in sampling],
        [one.frequency_penalty for one in sampling],
        [one.presence_penalty for one in sampling],
        device,
    )


def _add_bias_(logits: Tensor, bias: Sequence[tuple[int, float]]) -> None:
    """Add the bias of one request to its logits [Q, V], in place."""
    if bias:
        token_ids = torch.tensor([token for token, _ in bias], device=logits.device)
        values = torch.tensor(
            [value for _, value in bias], dtype=logits.dtype, device=logits.device
        )
        add_bias_(logits, token_ids, values)


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
