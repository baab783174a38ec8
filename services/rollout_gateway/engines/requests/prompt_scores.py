"""Computes log-probs of a prompt's own tokens from the states of its prefill.

They are log_softmax(logits / temperature), as for every drawn token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.models.sampling import behavior_logprobs, top_alternatives
from paceline.services.rollout_gateway.engines.nouns import PromptScore
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence

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
        scores += _scores(
            logits, wanted.to(logits.device), asked.temperature, asked.prompt_logprobs
        )


def _scores(logits: Tensor, tokens: Tensor, temperature: float, count: int) -> list[PromptScore]:
    """Scores of tokens int64 [n] under logits [n, V], with `count` alternatives each."""
    temperatures = torch.full((len(tokens),), temperature, device=logits.device)
    logprobs = behavior_logprobs(logits, temperatures)
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > chosen).sum(dim=1) + 1
    tops = top_alternatives(logits, temperature, count) if count else [()] * len(tokens)
    columns = (chosen[:, 0].tolist(), ranks.tolist(), tops)
    return [PromptScore(*one) for one in zip(*columns, strict=True)]
