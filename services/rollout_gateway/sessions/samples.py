"""Cuts a session into training samples, and refuses sampling that cannot be trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from paceline.errors import TrainabilityError
from paceline.services.rollout_gateway.engines.sampling import (
    OVERRIDABLE,
    UNSEEDED,
    Sampling,
    untrainable,
)
from paceline.services.rollout_gateway.sessions.assignment import Assignment
from paceline.services.rollout_gateway.sessions.tree import Branch, MessageTree, Turn
from paceline.trajectory import BranchKey, SpeculationStats, Trajectory

SHOWN_CHARACTERS = 40
_OFF = Sampling(UNSEEDED, 1)


def samples(
    session_id: str, about: Assignment, tree: MessageTree, reward: float | None
) -> list[Trajectory]:
    """Samples with every generated token once. Samples without a reward have reward None;
    branch_count counts the rest.

    Without turn_discount a branch is one sample, and its reward is the session's plus its turns'.
    With turn_discount every turn is one sample: R_t = r_t + turn_discount * R_(t+1), where the
    session's reward is added to the last turn.
    """
    lines = list(tree.branches())
    if about.turn_discount is None:
        found = [(line, _sum(line.path, reward)) for line in lines]
    else:
        found = [one for line in lines for one in _turns(line, reward, about.turn_discount)]

    scored = sum(value is not None for _, value in found)
    return [
        _trajectory(BranchKey(about.run_id, session_id, str(index)), about, line, value, scored)
        for index, (line, value) in enumerate(found)
    ]


def check_trainable(sampling: Sampling) -> None:
    """Raises TrainabilityError for sampling under which the trainer, which uses the temperature
    alone, would find other log-probs.
    """
    if found := untrainable(sampling):
        raise TrainabilityError(
            "these samples cannot be trained; open the session with trainable=false or leave the "
            "setting out",
            seen=", ".join(f"{name}={_short(value)}" for name, value in found.items()),
            allowed="temperature > 0, top_p=1, top_k=0, min_p=0, no penalty, no logit_bias, no "
            "json_schema",
        )


def overridden(sampling: Sampling, temperature: float) -> tuple[Sampling, tuple[str, ...]]:
    """The sampling with the run's values for parameters that change the drawn token, and the
    changes as "name=value used".

    Sampling that stays untrainable is returned unchanged: requirements on an answer are never
    overridden.
    """
    own = {name: getattr(_OFF, name) for name in OVERRIDABLE} | {"temperature": temperature}
    drawn = replace(sampling, **own)
    if untrainable(drawn):
        return sampling, ()
    told = (
        f"{name}={_told(used)}"
        for name, used in own.items()
        if not _same(getattr(sampling, name), used)
    )
    return drawn, tuple(told)


def _told(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else "none"


def _same(asked: object, used: object) -> bool:
    """Whether two values are equal within a wire's precision."""
    if isinstance(asked, int | float) and isinstance(used, int | float):
        return math.isclose(asked, used, rel_tol=1e-6)
    return asked == used


def _sum(path: Sequence[Turn], reward: float | None) -> float | None:
    given = [value for value in (reward, *(turn.reward for turn in path)) if value is not None]
    return sum(given) if given else None


def _turns(
    line: Branch, reward: float | None, discount: float
) -> list[tuple[Branch, float | None]]:
    """A sample for each turn that this branch trains, with its return."""
    following = reward
    returns: dict[int, float | None] = {}
    for index, turn in reversed(list(enumerate(line.path))):
        factor = 1.0 if index == len(line.path) - 1 else discount
        if turn.reward is not None or following is not None:
            following = (turn.reward or 0.0) + factor * (following or 0.0)
        returns[index] = following
    return [
        (Branch(line.path[: index + 1], (turn,)), returns[index])
        for index, turn in enumerate(line.path)
        if turn in line.trained
    ]


def _trajectory(
    key: BranchKey, about: Assignment, line: Branch, reward: float | None, scored: int
) -> Trajectory:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    accepted: list[int] = []
    for turn in line.path:
        bit = int(turn in line.trained)
        ids += [*turn.prompt_ids, *turn.response_ids]
        mask += [0] * len(turn.prompt_ids) + [bit] * len(turn.response_ids)
        logprobs += [0.0] * len(turn.prompt_ids)
        logprobs += turn.behavior_logprobs if bit else [0.0] * len(turn.response_ids)
        told = turn.accepted_drafts if bit else ()
        accepted += [0] * len(turn.prompt_ids) + [*map(int, told or [0] * len(turn.response_ids))]

    last = line.path[-1]
    return Trajectory(
        key=key,
        step=about.step,
        task_id=about.task_id,
        group_id=about.group_id or key.session_id,
        group_size=about.group_size,
        task_index=about.task_index,
        sample_index=about.sample_index,
        token_ids=tuple(ids),
        loss_mask=tuple(mask),
        behavior_logprobs=tuple(logprobs),
        version_spans=tuple(span for turn in line.trained for span in turn.version_spans),
        draw_spans=tuple(span for turn in line.trained for span in turn.draw_spans),
        reward=reward,
        seed=last.seed,
        temperature=last.temperature,
        finish_reason=last.finish,
        speculation=sum((turn.speculation for turn in line.trained), SpeculationStats()),
        branch_count=max(scored, 1),
        accepted_drafts=tuple(accepted) if any(accepted) else (),
    )


def restamped(trajectory: Trajectory, step: int) -> Trajectory:
    """The same sample as part of another step."""
    return replace(trajectory, step=step)


def _short(value: object) -> str:
    text = f"{value:g}" if isinstance(value, int | float) else str(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
