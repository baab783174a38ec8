"""A session's tokens are its turns' tokens, and every generated token is trained exactly once.
Rewards reach the right samples.
"""

from __future__ import annotations

from collections import Counter

import pytest
from drawn_cases import case_count
from hypothesis import given, settings
from hypothesis import strategies as st
from session_turns import said, session, turn

from paceline.services.rollout_gateway.engines.sampling import OVERRIDABLE, Sampling, untrainable
from paceline.services.rollout_gateway.sessions import Assignment
from paceline.services.rollout_gateway.sessions.session import Grant, Session
from paceline.services.rollout_gateway.sessions.tree import Turn, overridden
from paceline.trajectory import SpeculationStats, VersionSpan

DISCOUNT = 0.9


def line(where: Session, count: int) -> list[Turn]:
    """Turns one behind the other."""
    turns: list[Turn] = []
    for index in range(count):
        turns.append(said(where, turns[-1] if turns else None, [index], [10 + index]))
    return turns


@settings(max_examples=case_count(80), deadline=None)
@given(data=st.data(), discount=st.sampled_from([None, DISCOUNT]))
def test_every_generated_token_is_trained_exactly_once(
    data: st.DataObject, discount: float | None
) -> None:
    where = session(about=Assignment("run", turn_discount=discount))
    turns: list[Turn] = []
    marks = iter(range(1000, 9000))
    for _ in range(data.draw(st.integers(1, 8))):
        parent = data.draw(st.sampled_from([None, *turns]))
        prompt = data.draw(st.lists(st.integers(0, 9), max_size=3))
        turns.append(
            said(where, parent, prompt, [next(marks) for _ in range(data.draw(st.integers(1, 3)))])
        )
    trained: Counter[int] = Counter()
    for sample in where.trajectories():
        rows = list(zip(sample.token_ids, sample.loss_mask, sample.behavior_logprobs, strict=True))
        assert all(logprob == (-0.5 - token if bit else 0.0) for token, bit, logprob in rows)
        covered = [index for span in sample.version_spans for index in range(span.start, span.end)]
        assert covered == [index for index, bit in enumerate(sample.loss_mask) if bit]
        trained.update(token for token, bit, _ in rows if bit)
    assert trained == Counter(token for one in turns for token in one.response_ids)


@settings(max_examples=case_count(60), deadline=None)
@given(data=st.data(), discount=st.sampled_from([None, DISCOUNT]))
def test_every_sample_is_a_path_of_the_tree(data: st.DataObject, discount: float | None) -> None:
    where = session(about=Assignment("run", turn_discount=discount))
    turns: list[Turn] = []
    for index in range(data.draw(st.integers(1, 6))):
        turns.append(
            said(where, data.draw(st.sampled_from([None, *turns])), [index], [100 + index])
        )
    paths = {tuple(one.token_ids) for one in turns}
    found = where.trajectories()
    assert {sample.token_ids for sample in found} <= paths
    assert len({sample.key for sample in found}) == len(found)
    leaves = sum(not one.children for one in turns)
    assert len(found) == (leaves if discount is None else len(turns))


def test_spans_count_prompt_and_response_together() -> None:
    where = session()
    first = turn(None, [1, 2], [3, 4], version=0)
    where.tree.add(first)
    where.tree.add(turn(first, [5], [6], version=2))
    (sample,) = where.trajectories()
    assert sample.version_spans == (VersionSpan(2, 4, 0), VersionSpan(5, 6, 2))


def test_counters_of_speculation_are_those_of_the_trained_turns() -> None:
    where = session()
    root = said(where, None)
    for one in (root, said(where, root), said(where, root)):
        one.speculation = SpeculationStats(target_steps=1)
    assert [sample.speculation.target_steps for sample in where.trajectories()] == [2, 1]


def test_a_branch_earns_the_sessions_reward_and_those_of_its_turns() -> None:
    where = session()
    root, *_ = line(where, 2)
    fork = said(where, root)
    where.score(Grant(1.0))
    where.score(Grant(0.25, root.completion_id))
    where.score(Grant(-2.0, fork.completion_id))
    assert [sample.reward for sample in where.trajectories()] == [1.25, -0.75]


def test_a_turns_reward_counts_without_one_of_the_session() -> None:
    where = session()
    first, second = said(where, None), said(where, None)
    where.score(Grant(0.5, second.completion_id))
    samples = where.trajectories()
    assert [sample.reward for sample in samples] == [None, 0.5]
    assert [sample.branch_count for sample in samples] == [1, 1]
    assert first.reward is None


@pytest.mark.parametrize("discount", [None, DISCOUNT, 0.0, 1.0])
def test_without_any_reward_there_is_none_and_never_0(discount: float | None) -> None:
    where = session(about=Assignment("run", turn_discount=discount))
    line(where, 3)
    assert {sample.reward for sample in where.trajectories()} == {None}
    assert {sample.branch_count for sample in where.trajectories()} == {1}


def test_a_reward_of_0_is_one() -> None:
    where = session(about=Assignment("run", turn_discount=DISCOUNT))
    line(where, 2)
    where.score(Grant(0.0))
    assert [sample.reward for sample in where.trajectories()] == [0.0, 0.0]


@pytest.mark.parametrize("discount", [0.0, 0.5, DISCOUNT, 1.0])
@given(
    rewards=st.lists(st.none() | st.floats(-4, 4), min_size=1, max_size=6),
    last=st.none() | st.floats(-4, 4),
)
@settings(max_examples=case_count(40), deadline=None)
def test_returns_are_the_discounted_sums_of_what_follows(
    discount: float, rewards: list[float | None], last: float | None
) -> None:
    where = session(about=Assignment("run", turn_discount=discount))
    turns = line(where, len(rewards))
    for one, value in zip(turns, rewards, strict=True):
        if value is not None:
            where.score(Grant(value, one.completion_id))
    if last is not None:
        where.score(Grant(last))
    earned = list(rewards)
    if last is not None:
        earned[-1] = last + (rewards[-1] or 0.0)
    expected: list[float | None] = []
    for begin in range(len(earned)):
        later = [(k, value) for k, value in enumerate(earned[begin:]) if value is not None]
        expected.append(sum(discount**k * value for k, value in later) if later else None)
    found = [sample.reward for sample in where.trajectories()]
    assert [value is None for value in found] == [value is None for value in expected]
    assert [value or 0.0 for value in found] == pytest.approx(
        [value or 0.0 for value in expected], abs=1e-12
    )
    scored = sum(value is not None for value in expected)
    assert {sample.branch_count for sample in where.trajectories()} == {max(scored, 1)}


def test_with_a_discount_a_turn_of_two_branches_is_one_sample_with_the_return_of_the_first() -> (
    None
):
    where = session(about=Assignment("run", turn_discount=0.5))
    root = said(where, None, [1], [2])
    left, right = said(where, root, [3], [4]), said(where, root, [5], [6])
    where.score(Grant(4.0, left.completion_id))
    where.score(Grant(8.0, right.completion_id))
    where.score(Grant(1.0))
    samples = where.trajectories()
    assert [sample.token_ids for sample in samples] == [(1, 2), (1, 2, 3, 4), (1, 2, 5, 6)]
    assert [sample.loss_mask for sample in samples] == [(0, 1), (0, 0, 0, 1), (0, 0, 0, 1)]
    assert [sample.reward for sample in samples] == [2.5, 5.0, 9.0]
    assert [sample.branch_count for sample in samples] == [3, 3, 3]


def test_accepted_drafts_of_trained_turns_are_marked_at_their_tokens() -> None:
    where = session(about=Assignment("run", turn_discount=0.5))
    root = said(where, None, [1], [2, 3, 4])
    child = said(where, root, [5, 6], [7, 8])
    root.accepted_drafts = (True, True, False)
    child.accepted_drafts = (True, False)
    where.score(Grant(1.0))
    assert [sample.accepted_drafts for sample in where.trajectories()] == [
        (0, 1, 1, 0),
        (0, 0, 0, 0, 0, 0, 1, 0),  # the first turn's output belongs to the first sample
    ]
    root.accepted_drafts = child.accepted_drafts = ()
    assert {sample.accepted_drafts for sample in where.trajectories()} == {()}


def test_samples_say_what_they_answer() -> None:
    about = Assignment(
        "run", step=3, task_id="t", group_id="g", group_size=4, task_index=5, sample_index=2
    )
    where = session("name", about)
    one = said(where, None)
    (sample,) = where.trajectories()
    assert (str(sample.key), sample.step, sample.task_id, sample.group_id) == (
        "name/0",
        3,
        "t",
        "g",
    )
    assert (sample.group_size, sample.task_index, sample.sample_index) == (4, 5, 2)
    assert (sample.seed, sample.temperature, sample.finish_reason) == (one.seed, 1.0, "stop")


def test_a_session_without_a_group_is_its_own() -> None:
    where = session("name")
    said(where, None)
    assert [sample.group_id for sample in where.trajectories()] == ["name"]


def test_a_session_that_said_nothing_has_no_samples() -> None:
    where = session()
    where.score(Grant(1.0))
    assert where.trajectories() == []


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, ()),
        ({"temperature": 0.0}, ("temperature=0.7",)),
        ({"temperature": 0.699999988079071}, ()),  # the wire's 0.7
        ({"temperature": 0.7, "top_p": 0.5, "top_k": 3}, ("top_p=1", "top_k=0")),
        (
            {"temperature": 0.7, "min_p": 0.5, "logit_bias": ((5, 1.0),)},
            ("min_p=0", "logit_bias=none"),
        ),
        ({"temperature": 0.7, "repetition_penalty": 1.5}, ("repetition_penalty=1",)),
    ],
)
def test_overridden_sampling_is_the_runs_and_says_what_it_changed(
    asked: dict[str, object], told: tuple[str, ...]
) -> None:
    sampling = Sampling(7, 20, stop=("#",), top_logprobs=2, **({"temperature": 0.7} | asked))  # type: ignore[arg-type]
    drawn, changed = overridden(sampling, 0.7)
    assert changed == told
    assert drawn == Sampling(7, 20, 0.7, stop=("#",), top_logprobs=2)
    assert untrainable(drawn) == {}


@pytest.mark.parametrize(
    "contract", [{"json_schema": "{}"}, {"allowed_token_ids": (5,)}, {"min_tokens": 2}]
)
def test_what_an_answer_has_to_be_is_not_overridden(contract: dict[str, object]) -> None:
    sampling = Sampling(7, 20, 0.2, top_p=0.5, **contract)  # type: ignore[arg-type]
    assert overridden(sampling, 1.0) == (sampling, ())
    assert not set(contract) & set(OVERRIDABLE)
