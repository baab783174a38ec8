"""Extending turns by messages, by text and by tokens, and the lines of turns in a tree."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_turns import turn

from paceline.services.rollout_gateway.chat.messages import ChatRequest, Message
from paceline.services.rollout_gateway.sessions.tree import MessageTree, Turn

USER = Message("user", "12+30=")
ANSWER = Message("assistant", "42")


def grown(*turns: Turn) -> MessageTree:
    tree = MessageTree()
    for one in turns:
        tree.add(one)
    return tree


def test_a_turns_tokens_are_its_parents_its_prompts_and_what_was_said() -> None:
    first = turn(None, [1, 2], [3])
    second = turn(first, [4], [5, 6])
    assert second.path == [first, second]
    assert second.token_ids == [1, 2, 3, 4, 5, 6]
    assert grown(first, second).tokens == 6 == first.tokens + second.tokens


def test_a_turn_is_found_by_its_name() -> None:
    one = turn(None, [1], [2], name="a")
    assert grown(one).by_id("a") is one
    assert grown(one).by_id("b") is None


def test_the_deepest_known_message_is_extended() -> None:
    digests = ChatRequest((USER, ANSWER, USER, ANSWER, USER)).digests()
    first = turn(None, [1], [2], digest=digests[2])
    second = turn(first, [3], [4], digest=digests[4])
    tree = grown(first, second)
    assert tree.extended_by_messages(digests) == (second, 4)
    assert tree.extended_by_messages(digests[:4]) == (first, 2)
    assert tree.extended_by_messages(digests[:2]) is None


@pytest.mark.parametrize(
    "changed",
    [
        ChatRequest((Message("user", "12+31="), ANSWER, USER)),
        ChatRequest((USER, Message("assistant", "43"), USER)),
        ChatRequest((USER, Message("assistant", "42", reasoning="easy"), USER)),
        ChatRequest((Message("system", "Add."), USER, ANSWER, USER)),
        ChatRequest(
            (USER, ANSWER, USER), tools=({"type": "function", "function": {"name": "add"}},)
        ),
    ],
    ids=["earlier message", "the answer", "its reasoning", "system prompt", "tools"],
)
def test_a_changed_history_extends_nothing(changed: ChatRequest) -> None:
    known = ChatRequest((USER, ANSWER)).digests()[-1]
    assert grown(turn(None, [1], [2], digest=known)).extended_by_messages(changed.digests()) is None


def test_a_prompt_extends_the_longest_text_it_begins_with() -> None:
    tree = MessageTree()
    short, long = turn(None, [1], [2]), turn(None, [1], [3])
    tree.add(short, "12+30=42")
    tree.add(long, "12+30=42, and")
    assert tree.extended_by_text("12+30=42, and so on") == (long, " so on")
    assert tree.extended_by_text("12+30=42;") == (short, ";")
    assert tree.extended_by_text("12+30=42") == (short, "")
    assert tree.extended_by_text("12+30=4") is None
    assert tree.extended_by_text("\ud800") is None


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_prompt_extends_the_longest_tokens_it_begins_with(data: st.DataObject) -> None:
    ids = st.lists(st.integers(0, 2), min_size=1, max_size=3)
    turns: list[Turn] = []
    for _ in range(data.draw(st.integers(1, 6))):
        parent = data.draw(st.sampled_from([None, *turns]))
        turns.append(turn(parent, data.draw(ids), data.draw(ids)))
    prompt = [
        *data.draw(st.sampled_from(turns)).token_ids,
        *data.draw(st.lists(st.integers(0, 2), max_size=4)),
    ]
    one = grown(*turns).extended_by_tokens(tuple(prompt))
    assert one is not None
    assert prompt[: len(one.token_ids)] == one.token_ids
    lengths = [
        len(other.token_ids) for other in turns if prompt[: len(other.token_ids)] == other.token_ids
    ]
    assert len(one.token_ids) == max(lengths)


def test_an_unknown_prompt_extends_no_tokens() -> None:
    assert grown(turn(None, [1], [2])).extended_by_tokens((1, 3)) is None
    assert grown(turn(None, [1], [2])).extended_by_tokens((1,)) is None


def test_every_leaf_is_a_branch_and_a_shared_turn_is_trained_in_the_first() -> None:
    root = turn(None, [1], [2])
    left, right = turn(root, [3], [4]), turn(root, [5], [6])
    apart = turn(None, [7], [8])
    branches = list(grown(root, left, right, apart).branches())
    assert [branch.path for branch in branches] == [[root, left], [root, right], [apart]]
    assert [branch.trained for branch in branches] == [[root, left], [right], [apart]]
