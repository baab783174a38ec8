"""Following draws through draft trees: equal to a walk by hand on any tree, and the results that
SGLang receives.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import InternalError
from paceline.models.sampling import Draw
from paceline.services.rollout_gateway.engines.nouns import Finish, Request
from paceline.services.rollout_gateway.engines.requests.control import Admission
from paceline.services.rollout_gateway.engines.requests.sequence import DrawnBy, RunningSequence
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.services.rollout_gateway.engines.sglang.plugin.arms import Drawn, Tracked, rid_of
from paceline.services.rollout_gateway.engines.sglang.plugin.sampling import (
    PendingDraws,
    accepted_path,
    parents_of,
)
from paceline.trajectory import VersionSpan


def random_tree(source: random.Random, nodes: int) -> tuple[list[int], list[int]]:
    """Parents and tokens of a tree in level order; siblings have different tokens."""
    parents = [-1, *sorted(source.randrange(number) for number in range(1, nodes))]
    tokens = [source.randrange(6)]
    for number in range(1, nodes):
        taken = {tokens[other] for other in range(1, number) if parents[other] == parents[number]}
        tokens.append(source.choice([token for token in range(nodes + 6) if token not in taken]))
    return parents, tokens


def links(parents: list[int]) -> tuple[list[int], list[int]]:
    """First child and next sibling of each node, -1 for none."""
    nodes = len(parents)
    first, sibling = [-1] * nodes, [-1] * nodes
    for number in range(1, nodes):
        earlier = [other for other in range(1, number) if parents[other] == parents[number]]
        if earlier:
            sibling[earlier[-1]] = number
        else:
            first[parents[number]] = number
    return first, sibling


def walk(parents: list[int], tokens: list[int], drawn: list[int], depth: int) -> list[int]:
    """The path by definition: from the root to the child that holds the draw, while there is
    one.
    """
    path = [0]
    while len(path) < depth:
        here = path[-1]
        fitting = [
            n for n in range(1, len(parents)) if parents[n] == here and tokens[n] == drawn[here]
        ]
        if not fitting:
            break
        path.append(fitting[0])
    return path


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 4), st.integers(1, 6))
def test_the_followed_path_is_the_walk_by_hand(
    seed: int, nodes: int, batch: int, depth: int
) -> None:
    source = random.Random(seed)
    trees = [random_tree(source, nodes) for _ in range(batch)]
    drawn = [[source.randrange(6) for _ in range(nodes)] for _ in range(batch)]
    firsts, siblings = zip(*(links(parents) for parents, _ in trees), strict=True)
    first, sibling = torch.tensor(firsts), torch.tensor(siblings)
    assert parents_of(first, sibling).tolist() == [parents for parents, _ in trees]
    path, lengths = accepted_path(
        torch.tensor(drawn),
        torch.tensor([tokens for _, tokens in trees]),
        parents_of(first, sibling),
        depth,
    )
    assert path.shape == (batch, depth)
    for row, (parents, tokens) in enumerate(trees):
        expected = walk(parents, tokens, drawn[row], depth)
        assert path[row, : len(expected)].tolist() == expected
        assert path[row, len(expected) :].tolist() == [-1] * (depth - len(expected))
        assert int(lengths[row]) == len(expected)


def tracked(**sampling: object) -> Tracked:
    request = Request(3, (1, 2, 3, 4), Sampling(1, 10, **sampling))  # type: ignore[arg-type]
    return Tracked(RunningSequence(request, frozenset({9}), 10, length=4), 0)


def test_draws_of_an_accepted_path_reach_their_request_by_position() -> None:
    # A chain of three nodes: draws 7, 8, 5; the drafts were 7 and 6, so two tokens are emitted.
    chain = torch.tensor([[-1, 0, 1]])
    path, lengths = accepted_path(torch.tensor([[7, 8, 5]]), torch.tensor([[4, 7, 6]]), chain, 3)
    drawn = Draw(
        torch.tensor([7, 8, 5]), torch.tensor([-0.5, -0.25, -9.0]), torch.tensor([0.1, 0.2, 0.3])
    )
    one = tracked()
    origin = DrawnBy(5, "eagle:3_1_4", "float32")
    firsts = torch.tensor([4])
    PendingDraws([one], drawn, torch.zeros(3, 11), firsts, path, lengths, origin).settle()
    assert {index: (drawn.token, drawn.origin) for index, drawn in one.draws.items()} == {
        0: (7, origin),
        1: (8, origin),
    }
    one.confirm([7, 8], strict=True)
    assert (one.sequence.tokens, one.sequence.logprobs) == ([7, 8], [-0.5, -0.25])
    assert one.sequence.origins == [(0, origin)]


def test_tokens_after_the_end_are_not_taken_and_repeated_draws_change_nothing() -> None:
    one = tracked()
    for position, token in ((4, 7), (5, 9), (6, 8)):
        one.record(position, Drawn(token, -1.0, 1.0, DrawnBy(0, "off", "float32")))
    one.confirm([7, 9, 8], strict=True)
    assert (one.sequence.tokens, one.sequence.finish) == ([7, 9], Finish.STOP)
    one.record(
        4, Drawn(5, -2.0, 1.0, DrawnBy(1, "off", "float32"))
    )  # a prefill after a retraction draws it again under other weights
    assert 0 not in one.draws


def test_a_token_that_is_not_the_draw_is_an_error_on_the_rank_that_tells() -> None:
    one = tracked()
    one.record(4, Drawn(7, -1.0, 1.0, DrawnBy(0, "off", "float32")))
    with pytest.raises(InternalError, match="token 0 of request 3"):
        one.confirm([6], strict=True)
    follower = tracked()
    follower.confirm([6], strict=False)
    assert follower.sequence.tokens == [6]


def test_a_response_that_goes_on_is_confirmed_behind_what_it_had() -> None:
    going = Request(3, (1, 2, 3, 4), Sampling(seed=5, max_tokens=10), response=(6, 7))
    sequence = Admission(99, (9,), Path(), 64).sequence(going)
    one = Tracked(sequence, 0)
    for position, token in ((6, 8), (7, 9)):  # token 8 is the third of the response
        one.record(position, Drawn(token, -1.0, 0.5, DrawnBy(4, "off", "float32")))
    assert one.ahead(7) == [8]
    one.confirm([8], strict=True)  # SGLang counts from where the request went on
    one.confirm([8, 9], strict=True)
    assert (sequence.tokens, sequence.finish) == ([6, 7, 8, 9], Finish.STOP)
    chunk = sequence.chunk()
    assert (chunk.token_ids, chunk.behavior_logprobs) == ((8, 9), (-1.0, -1.0))
    assert chunk.version_spans == (VersionSpan(2, 4, 4),)


def test_ids_of_requests_are_never_prefixes_of_each_other() -> None:
    assert len({len(rid_of(number, number % 99)) for number in (1, 12, 2**63)}) == 1
