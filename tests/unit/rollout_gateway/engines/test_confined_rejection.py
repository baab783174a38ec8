"""Confined draws with sampled drafts: forbidden tokens never appear for any drafts, and the first
token has the remaining distribution.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from random_models import save_random

from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.sampling import Sampling

ALLOWED = (4, 7, 9, 11, 20)
PROMPT = (3, 8, 5)
COUNT = 400


@pytest.mark.parametrize("arm", ["eagle:3_1_4", "ngram:4_1_5", "self:3_1_4"])
def test_forbidden_tokens_are_never_said_and_the_rest_as_often_as_the_model_says(
    tmp_path: Path, arm: str
) -> None:
    model = save_random(tmp_path, "llama", sharpness=2.0)
    spec = EmbeddedSpec(
        model_dir=str(tmp_path),
        drafter="eagle",
        verification="rejection",
        max_batch=32,
        max_sequence_tokens=64,
        arms=("off", arm),
    )
    engine = EmbeddedEngine(spec)
    engine.force_arm(arm)
    asked = {"allowed_token_ids": ALLOWED, "stop_token_ids": (4,), "ignore_eos": True}
    for seed in range(COUNT):
        sampling = Sampling(seed, 6, min_tokens=1 + seed % 5, **asked)  # type: ignore[arg-type]
        engine.enqueue(Request(seed, PROMPT, sampling))
    said: dict[int, tuple[int, ...]] = {}
    while engine.has_work:
        said |= {chunk.request_id: chunk.token_ids for chunk in engine.step()}
    for seed, tokens in said.items():
        least = 1 + seed % 5
        assert len(tokens) >= least
        assert set(tokens) <= set(ALLOWED)
        assert 4 not in tokens[:least]
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT])).logits[0, -1].double()
    left = torch.softmax(logits[list(ALLOWED[1:])], dim=-1).tolist()
    counts = Counter(tokens[0] for tokens in said.values())
    for token, share in zip(ALLOWED[1:], left, strict=True):
        slack = 4 * (share * (1 - share) / COUNT) ** 0.5 + 1e-9
        assert counts[token] / COUNT == pytest.approx(share, abs=slack)
