"""Trajectories with a value in every field of the present type."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hypothesis import strategies as st

from paceline.trajectory import BranchKey, DrawSpan, SpeculationStats, Trajectory, VersionSpan

# No field has its default, so that a field lost on the way is detected.
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=12)
COUNTS = st.integers(1, 2**31 - 1)
LEVELS = st.lists(COUNTS, min_size=1, max_size=3).map(tuple)
BY_ARM = st.dictionaries(WORDS, COUNTS, min_size=1, max_size=3)
LOGPROBS = st.floats(width=32, allow_nan=False)


def stats() -> st.SearchStrategy[SpeculationStats]:
    """Statistics with all counters above 0."""
    kinds = {"int": COUNTS, "tuple[int, ...]": LEVELS, "Mapping[str, int]": BY_ARM}
    names = {one.name: kinds[str(one.type)] for one in fields(SpeculationStats)}
    return st.builds(SpeculationStats, **names)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Raises KeyError for a field of the type that has no strategy here."""
    length = draw(st.integers(0, 12))

    def row(values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
        return st.lists(values, min_size=length, max_size=length).map(tuple)

    values: dict[str, st.SearchStrategy[Any]] = {
        "key": st.builds(BranchKey, WORDS, WORDS, WORDS),
        "step": COUNTS,
        "task_id": WORDS,
        "group_id": WORDS,
        "group_size": COUNTS,
        "task_index": COUNTS,
        "sample_index": COUNTS,
        "token_ids": row(COUNTS),
        "loss_mask": row(st.integers(0, 1)),
        "behavior_logprobs": row(LOGPROBS),
        "version_spans": st.lists(st.builds(VersionSpan, COUNTS, COUNTS, COUNTS)).map(tuple),
        "draw_spans": st.lists(
            st.builds(DrawSpan, COUNTS, COUNTS, WORDS, WORDS, st.booleans(), st.booleans())
        ).map(tuple),
        "reward": st.none() | st.floats(allow_nan=False),
        "seed": st.integers(1, 2**63 - 1),
        "temperature": st.floats(0.125, 10),
        "finish_reason": st.just("length"),
        "speculation": stats(),
        "branch_count": COUNTS,
        "accepted_drafts": row(st.integers(0, 1)).map(lambda bits: bits if any(bits) else ()),
        "reward_parts": st.dictionaries(WORDS, st.floats(allow_nan=False), min_size=1),
    }
    return Trajectory(**{one.name: draw(values[one.name]) for one in fields(Trajectory)})
