"""Builds turns of sessions for tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from paceline.services.rollout_gateway.config import SessionsConfig
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.services.rollout_gateway.sessions import Assignment
from paceline.services.rollout_gateway.sessions.session import Session
from paceline.services.rollout_gateway.sessions.tree import Turn
from paceline.trajectory import DrawSpan, VersionSpan

SAMPLING = Sampling(seed=1, max_tokens=8)
_NAMES = itertools.count()


def turn(
    parent: Turn | None,
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    name: str = "",
    version: int = 0,
    digest: bytes = b"",
    temperature: float = 1.0,
) -> Turn:
    """A generation behind `parent`; `prompt` holds its new tokens only."""
    start = len(prompt) + (0 if parent is None else len(parent.token_ids))
    return Turn(
        completion_id=name or f"c{next(_NAMES)}",
        parent=parent,
        prompt_ids=tuple(prompt),
        response_ids=tuple(response),
        behavior_logprobs=tuple(-0.5 - token for token in response),
        version_spans=(VersionSpan(start, start + len(response), version),),
        draw_spans=(DrawSpan(start, start + len(response), "off", "float32"),),
        finish="stop",
        seed=start,
        temperature=temperature,
        digest=digest,
    )


def session(name: str = "s", about: Assignment | None = None, **limits: float) -> Session:
    """A session without registration."""
    return Session(name, about or Assignment("run"), SessionsConfig.model_validate(limits))


def said(
    where: Session,
    parent: Turn | None,
    prompt: Sequence[int] = (1,),
    response: Sequence[int] = (2,),
    name: str = "",
) -> Turn:
    """Runs a generation of a session from its beginning to its end."""
    where.begin(SAMPLING, len(prompt))
    new = turn(parent, prompt, response, name=name)
    where.end(len(prompt), new)
    return new
