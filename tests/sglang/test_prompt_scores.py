"""Log-probs of prompts from SGLang, in chunks of its prefill and beside drafts, against
transformers' forward.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
import torch
from prompt_oracle import assert_scores_are
from sglang_served import DEMO, Served, greedy, load_oracle, said
from transformers import PreTrainedModel

from paceline.local.patience import patient
from paceline.services.rollout_gateway.engines.nouns import Chunk, Finish, Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

pytestmark = pytest.mark.sglang
PROMPT = [random.Random(3).randrange(8, 320) for _ in range(200)]


@pytest.fixture(scope="module")
def oracle() -> PreTrainedModel:
    return load_oracle(DEMO / "policy_trained")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    one = Served(
        tmp_path_factory.mktemp("scores"),
        model_dir=str(DEMO / "policy_trained"),
        drafter=str(DEMO / "drafter_trained"),
        max_sequence_tokens=256,
        prefill_tokens=16,
    )
    yield one
    one.client.close()


def logits_of(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return logits


def assert_scored(
    chunks: list[Chunk], model: PreTrainedModel, prompt: list[int], temperature: float, count: int
) -> None:
    asked = Sampling(0, 1, temperature=temperature, prompt_logprobs=count)
    scores = [score for chunk in chunks for score in chunk.prompt_scores]
    assert chunks[0].prompt_scores == tuple(scores)
    assert_scores_are(tuple(scores), logits_of(model, prompt), Request(0, tuple(prompt), asked))


def test_prompts_are_scored_as_transformers_scores_them_in_pieces_and_beside_others(
    served: Served, oracle: PreTrainedModel
) -> None:
    (plain,) = served.send([PROMPT], max_tokens=12)
    served.wait([plain])  # the prompt is cached now
    asked = [(PROMPT, 0.7, 1, 12), (PROMPT, 0.0, 3, 0), (PROMPT[:33], 1.0, 0, 0), ([9], 1.0, 2, 0)]
    numbers = [
        served.send([prompt], temperature=heat, prompt_logprobs=count, max_tokens=tokens)[0]
        for prompt, heat, count, tokens in asked
    ]
    beside = served.send([PROMPT[:50]], max_tokens=30)
    for (prompt, heat, count, tokens), chunks in zip(asked, served.wait(numbers), strict=True):
        assert_scored(chunks, oracle, prompt, heat, count)
        assert (len(said(chunks)), chunks[-1].finish) == (tokens, Finish.LENGTH)
        if len(prompt) > 1:  # rows of all tokens but the last are captured
            served.kept.of(chunks[0].request_id, prompt + said(chunks))
    assert said(served.wait(beside)[0]) == greedy(oracle, PROMPT[:50], 30)
    (again,) = served.wait(served.send([PROMPT], max_tokens=12))
    assert again[-1].cached_prompt_tokens > 100
    assert said(again) == greedy(oracle, PROMPT, 12)


def begun(served: Served, **options: int) -> list[int]:
    """Sends a prompt; returns its request while only some of its chunks are computed."""
    until = time.monotonic() + patient(60)
    while time.monotonic() < until:
        numbers = served.send([PROMPT], **options)
        while (health := served.health()).running or health.waiting:
            if health.running:
                return numbers
    raise AssertionError("each time all of it was computed before anybody could look")


def test_a_prompt_that_is_computed_anew_is_scored_under_the_new_weights(served: Served) -> None:
    path, now = DEMO / "policy_start", served.health().versions
    served.client.ask(
        prepare_weights=pb.PrepareWeights(target=pb.WEIGHT_TARGET_POLICY, version=1, path=str(path))
    )
    numbers = begun(served, prompt_logprobs=2, max_tokens=1)
    versions = tpb.VersionSet(seq=now.seq + 1, policy=1, drafter=now.drafter)
    served.client.ask(
        commit_weights=pb.CommitWeights(versions=versions, mode=pb.PAUSE_MODE_RETRACT)
    )
    (chunks,) = served.wait(numbers)
    assert [span.policy_version for span in chunks[-1].version_spans] == [1]
    assert_scored(chunks, load_oracle(path), PROMPT, 0.0, 2)
