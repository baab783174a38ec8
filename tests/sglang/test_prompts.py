"""What SGLang reads of prompts, over one drafter.

Rounds with the arm "off" leave the drafter behind; its later drafts equal the drafts after reading
every token at once. Log-probs of prompts, in chunks of the prefill and beside drafts, equal
transformers' forward.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from itertools import chain

import pytest
import torch
from prompt_oracle import assert_scores_are
from sglang_served import DEMO, Served, greedy, load_oracle, said
from transformers import AutoTokenizer, PreTrainedModel

from paceline.local.patience import patient
from paceline.services.rollout_gateway.engines.nouns import Chunk, Finish, Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

pytestmark = pytest.mark.sglang
CHAIN, TREE = "eagle:3_1_4", "eagle:4_3_12"
PROMPT = [random.Random(3).randrange(8, 320) for _ in range(200)]
QUESTIONS = ["486:36=", "912:354=", "17:5=", "840:60="]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The drafter catches up in short forwards: 16 tokens of all rows together."""
    one = Served(
        tmp_path_factory.mktemp("unread"),
        model_dir=str(DEMO / "policy_trained"),
        drafter=str(DEMO / "drafter_trained"),
        arms=("off", CHAIN, TREE),
        max_sequence_tokens=256,
        prefill_tokens=16,
    )
    yield one
    one.client.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "policy_trained")
    return [tokenizer.encode(question) for question in QUESTIONS]


def accepted(chunks: Sequence[Chunk]) -> list[bool]:
    """Which response tokens were drafts."""
    return list(chain.from_iterable(chunk.accepted_drafts for chunk in chunks))


def read_at_once(served: Served, known: list[int], tokens: int, arm: str) -> list[bool]:
    """Whether each response token behind `known` is a draft after a full prefill: a scored prompt
    takes nothing from the cache.
    """
    numbers = served.send([known], max_tokens=tokens, arm=arm, prompt_logprobs=1)
    return accepted(served.wait(numbers)[0])


@pytest.mark.parametrize("arm", [CHAIN, TREE])
def test_a_request_drafts_on_as_if_it_had_read_the_rounds_that_were_off(
    served: Served, prompts: list[list[int]], arm: str
) -> None:
    """The request runs beside a request with the arm off, because a batch has one arm."""
    prompt, other = prompts[0], prompts[1]
    tokens = served.tokens([prompt], max_tokens=60, arm=arm)[0]
    [number] = served.send([prompt], max_tokens=60, arm=arm, seeds=[1])
    beside = served.send([other], max_tokens=30, arm="off")
    chunks = served.wait([number])[0]
    served.wait(beside)
    assert said(chunks) == tokens
    flags, rounds = accepted(chunks), chunks[-1].speculation
    # some token ends the last round with the arm off; later drafts equal a full read
    ends = [
        cut
        for cut in range(1, 59)
        if flags[cut:] == read_at_once(served, prompt + tokens[: cut - 1], 61 - cut, arm)[1:]
        and not any(flags[cut - 9 : cut])
    ]
    assert ends, (flags, rounds)
    assert any(flags[ends[0] :])
    assert rounds.target_steps > rounds.drafted_rounds


@pytest.mark.parametrize("arm", [CHAIN, TREE])
def test_a_prompt_out_of_the_cache_is_read_where_those_before_it_were_off(
    served: Served, prompts: list[list[int]], arm: str
) -> None:
    prompt = prompts[2] * (3 if arm == CHAIN else 5)
    response = served.tokens([prompt], max_tokens=40, arm="off")[0]
    turn = [*prompt, *response, *prompts[3]]
    numbers = served.send([turn], max_tokens=40, arm=arm)
    chunks = served.wait(numbers)[0]
    assert chunks[-1].cached_prompt_tokens > len(prompt)
    flags = accepted(chunks)
    assert flags == read_at_once(served, turn, 40, arm)
    assert any(flags)


def test_rounds_that_are_off_are_not_counted_as_drafted(
    served: Served, prompts: list[list[int]]
) -> None:
    for chunks in served.wait(served.send(prompts, max_tokens=20, arm="off")):
        assert chunks[-1].speculation.target_steps == 19
        assert chunks[-1].speculation.drafted_rounds == 0
        assert not any(accepted(chunks))


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
