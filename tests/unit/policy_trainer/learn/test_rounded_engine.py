"""The effect of an eight-bit engine on a policy gradient, over all possible draws, so that no
sampling noise hides it.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.services.policy_trainer.algorithm_settings import CorrectionConfig
from paceline.services.policy_trainer.algorithms.losses import correction_weights
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.sampling import Sampling

DEMO = Path(__file__).parents[4] / "examples/demo"
POLICY = DEMO / "policy_start"
BEGUN, QUESTIONS = 9, 6


@pytest.fixture(scope="module")
def begun() -> list[tuple[int, ...]]:
    """Questions of the demo with the beginning of the answer that is rewarded, and its next
    token.
    """
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    with (DEMO / "tasks_train.jsonl").open(encoding="utf-8") as lines:
        tasks = [json.loads(line) for line in islice(lines, QUESTIONS)]
    return [
        tuple(tokenizer.encode(one["prompt"] + one["format"])[: BEGUN + place])
        for place, one in enumerate(tasks)
    ]


def drawn_from(profile: str, begun: list[tuple[int, ...]], vocabulary: int) -> Tensor:
    """Log-probs [Q, V] that an engine of this profile draws the last token with: it scores each."""
    spec = {"model_dir": str(POLICY), "drafter": "off", "profile": profile, "dtype": "float32"}
    engine = EmbeddedEngine(EmbeddedSpec.model_validate(spec))
    sampling = Sampling(seed=0, max_tokens=0, temperature=1.0, prompt_logprobs=0)
    for number, prompt in enumerate(begun):
        for token in range(vocabulary):
            engine.enqueue(Request(number * vocabulary + token, (*prompt[:-1], token), sampling))
    logprobs = torch.zeros(len(begun), vocabulary, dtype=torch.float64)
    while engine.has_work:
        for chunk in engine.step():
            question, token = divmod(chunk.request_id, vocabulary)
            logprobs[question, token] = chunk.prompt_scores[-1].logprob
    return logprobs


def gradient(policy: Any, begun: list[tuple[int, ...]], drawn: Tensor, weight: str) -> Tensor:
    """Expected gradient of REINFORCE over next tokens that are drawn so: 1 for the rewarded answer's,
    less how often the policy draws it.
    """
    settings = CorrectionConfig(weight=weight)
    policy.zero_grad()
    for prompt, sampled in zip(begun, drawn, strict=True):
        logits = policy(torch.tensor([prompt[:-1]])).logits[0, -1]
        logprobs = logits.log_softmax(-1)
        advantages = -logprobs.exp().detach()[prompt[-1]].expand(len(logits)).clone()
        advantages[prompt[-1]] += 1
        alone = torch.arange(len(logits))
        weights, _ = correction_weights(settings, logprobs, sampled, alone)
        (-(sampled.exp() * weights * advantages) @ logprobs).backward()
    return torch.cat([one.grad.flatten() for one in policy.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["int8", "int8_w8a8"])
def test_without_truncated_importance_sampling_the_expected_gradient_is_off(
    profile: str, begun: list[tuple[int, ...]]
) -> None:
    pytest.importorskip("torchao", reason="torchao rounds to INT8: the extra `int8`")
    policy = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float64)
    exact = torch.stack(
        [policy(torch.tensor([one[:-1]])).logits[0, -1].log_softmax(-1).detach() for one in begun]
    )
    rounded = drawn_from(profile, begun, exact.shape[1])
    assert torch.allclose(rounded.exp().sum(-1), torch.ones(len(begun), dtype=torch.float64))

    wanted = gradient(policy, begun, exact, "none")
    plain, corrected = (
        float((gradient(policy, begun, rounded, one) - wanted).norm() / wanted.norm())
        for one in ("none", "token")
    )
    print(f"{profile}: off by {plain:.2e} without a correction, {corrected:.2e} with TIS")
    assert plain > 5e-4
    assert corrected < plain / 100
