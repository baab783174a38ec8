"""Rounds with the arm "off" leave SGLang's drafter behind. Its later drafts equal the drafts after
reading every token at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import pytest
from sglang_served import DEMO, Served, said
from transformers import AutoTokenizer

from paceline.services.rollout_gateway.engines.nouns import Chunk

pytestmark = pytest.mark.sglang
CHAIN, TREE = "eagle:3_1_4", "eagle:4_3_12"
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
