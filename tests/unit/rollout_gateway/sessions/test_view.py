"""A session's data outside the gateway: JSON that every reader accepts, and samples on the wire."""

from __future__ import annotations

import json
from dataclasses import fields

from session_turns import said, session

from paceline.services.rollout_gateway.chat.messages import Message, ToolCall
from paceline.services.rollout_gateway.sessions import Assignment, FailReason
from paceline.services.rollout_gateway.sessions.registry import (
    samples_json,
    session_json,
    tree_json,
)
from paceline.services.rollout_gateway.sessions.session import Grant, Session
from paceline.tagged_json import from_object
from paceline.trajectory import DrawSpan, Trajectory, VersionSpan

SPANS = {
    "version_spans": [one.name for one in fields(VersionSpan)],
    "draw_spans": [one.name for one in fields(DrawSpan)],
}


def forked() -> Session:
    where = session("name", Assignment("run", task_id="t", group_size=2))
    root = said(where, None, [1, 2], [3], name="a")
    said(where, root, [4], [5, 6], name="b")
    said(where, root, [7], [8], name="c")
    root.message = Message("assistant", "hi", tool_calls=(ToolCall("1", "add", '{"a":1}'),))
    where.score(Grant(0.5))
    where.score(Grant(0.25, "b"))
    return where


def test_the_session_counts_every_turn_once() -> None:
    shown = session_json(forked())
    assert (shown["turns"], shown["prompt_tokens"], shown["completion_tokens"]) == (3, 4, 4)
    assert (shown["id"], shown["group_id"], shown["task_id"]) == ("name", "name", "t")
    assert (shown["state"], shown["reward"], shown["fail_reason"]) == ("open", 0.5, None)


def test_a_failed_session_says_whose_fault_it_was() -> None:
    where = session()
    where.close(fail=FailReason.INFRA)
    assert (session_json(where)["state"], session_json(where)["fail_reason"]) == ("failed", "infra")


def test_the_tree_names_parents_and_is_plain_json() -> None:
    shown = tree_json(forked())
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown
    assert [(turn["completion_id"], turn["parent"]) for turn in shown["tree"]] == [
        ("a", None),
        ("b", "a"),
        ("c", "a"),
    ]
    assert [turn["reward"] for turn in shown["tree"]] == [None, 0.25, None]
    assert shown["tree"][0]["message"] == {
        "role": "assistant",
        "content": "hi",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
        ],
    }
    assert Message("tool", "3", tool_call_id="1").shown() == {
        "role": "tool",
        "content": "3",
        "tool_call_id": "1",
    }


def test_the_samples_are_what_is_trained() -> None:
    shown = samples_json(forked())
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown
    assert [one["token_ids"] for one in shown["samples"]] == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8]]
    assert [one["loss_mask"] for one in shown["samples"]] == [[0, 0, 1, 0, 1, 1], [0, 0, 0, 0, 1]]
    assert [one["reward"] for one in shown["samples"]] == [0.75, 0.5]


def test_a_sample_shows_every_field_of_what_is_trained() -> None:
    where = forked()
    for shown, sample in zip(samples_json(where)["samples"], where.trajectories(), strict=True):
        assert set(shown) == {one.name for one in fields(Trajectory)}
        spans = {
            name: [dict(zip(of, span, strict=True)) for span in shown[name]]
            for name, of in SPANS.items()
        }
        assert from_object(Trajectory, shown | spans) == sample
