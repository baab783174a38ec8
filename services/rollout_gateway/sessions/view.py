"""Returns sessions as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from paceline.services.rollout_gateway.sessions.session import Session
from paceline.services.rollout_gateway.sessions.tree import Turn
from paceline.tagged_json import to_object
from paceline.trajectory import DrawSpan, Trajectory, VersionSpan


def session_json(session: Session) -> dict[str, Any]:
    """The answer of GET /v1/sessions/{id}."""
    about, turns = session.assignment, session.tree.turns
    return {
        "id": session.session_id,
        "object": "session",
        "state": str(session.state),
        "task_id": about.task_id,
        "group_id": session.group_id,
        "group_size": about.group_size,
        "sample_index": about.sample_index,
        "trainable": about.trainable,
        "override_sampling": about.trainable and about.override,
        "turn_discount": about.turn_discount,
        "reward": session.reward,
        "fail_reason": None if session.fail_reason is None else str(session.fail_reason),
        "turns": len(turns),
        "prompt_tokens": sum(len(turn.prompt_ids) for turn in turns),
        "completion_tokens": sum(len(turn.response_ids) for turn in turns),
        "task": None,
    }


def tree_json(session: Session) -> dict[str, Any]:
    """The message tree, turn by turn in the order of their ends; parents are given by completion
    id.
    """
    return {**session_json(session), "tree": [_turn_json(turn) for turn in session.tree.turns]}


def samples_json(session: Session) -> dict[str, Any]:
    """The samples for training."""
    return {
        **session_json(session),
        "samples": [_sample_json(one) for one in session.trajectories()],
    }


def _turn_json(turn: Turn) -> dict[str, Any]:
    return {
        "completion_id": turn.completion_id,
        "parent": None if turn.parent is None else turn.parent.completion_id,
        "prompt_ids": list(turn.prompt_ids),
        "response_ids": list(turn.response_ids),
        "behavior_logprobs": list(turn.behavior_logprobs),
        "version_spans": _listed(turn.version_spans),
        "draw_spans": _listed(turn.draw_spans),
        "finish_reason": turn.finish,
        "seed": turn.seed,
        "temperature": turn.temperature,
        "smallest_gap": turn.smallest_gap if math.isfinite(turn.smallest_gap) else None,
        "message": None if turn.message is None else turn.message.shown(),
        "reward": turn.reward,
    }


def _sample_json(sample: Trajectory) -> dict[str, Any]:
    spans = {name: _listed(getattr(sample, name)) for name in ("version_spans", "draw_spans")}
    return to_object(sample) | spans


def _listed(spans: Sequence[VersionSpan | DrawSpan]) -> list[list[Any]]:
    return [list(astuple(span)) for span in spans]
