"""Reference log-probs of a prompt, computed with a full forward."""

from __future__ import annotations

import pytest
import torch

from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.v1.engine_pb2 import PromptScore


def assert_scores_are(scores: tuple[PromptScore, ...], logits: torch.Tensor, one: Request) -> None:
    """logits [T, V] float32 of the whole prompt by transformers."""
    temperature = one.sampling.temperature or 1.0
    wanted = torch.log_softmax(logits.double() / temperature, dim=-1)
    assert len(scores) == len(one.prompt) - 1
    for place, (score, token) in enumerate(zip(scores, one.prompt[1:], strict=True)):
        row = wanted[place]
        assert score.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert score.rank == int((row > row[token]).sum()) + 1
        best = row.topk(one.sampling.prompt_logprobs) if one.sampling.prompt_logprobs else None
        assert list(score.top.token_ids) == ([] if best is None else best.indices.tolist())
