"""A drafter's acceptance beside its predecessor's: read, checked, computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import DataLoss, InvalidInput
from paceline.speculators.shift import FILE, AcceptanceShift, read_shift, shift_over

BETTER = AcceptanceShift(3, (0.5, 0.2, 0.1), (0.8, 0.6, 0.3))


def test_lengths_count_the_bonus_token() -> None:
    gains = [BETTER.length_gain(drafts) for drafts in (0, 1, 3, 9)]
    assert gains == pytest.approx([1.0, 1.8 / 1.5, 2.7 / 1.8, 2.7 / 1.8])


def test_chances_are_those_of_a_draft_whose_predecessors_were_accepted() -> None:
    assert [BETTER.chance(draft) for draft in (0, 1, 2, 7)] == pytest.approx([0.8, 0.75, 0.5, 0.5])
    assert [BETTER.shifted(draft, 0.45) for draft in (0, 1, 2, 7)] == pytest.approx(
        [0.75, 0.8, 0.45, 0.45]
    )
    assert (BETTER.shifted(0, 0.9), AcceptanceShift(0, (0.5,), (0.1,)).shifted(0, 0.2)) == (1, 0)


def test_where_the_predecessor_hardly_came_what_is_measured_now_is_believed() -> None:
    dead = AcceptanceShift(0, (0.001, 0.0), (0.9, 0.45))
    assert [dead.shifted(draft, 0.3) for draft in (0, 1)] == pytest.approx([1.0, 0.5])


@given(
    over=st.integers(0, 1 << 40),
    chances=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=64),
)
def test_it_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, over: int, chances: list[tuple[float, float]]
) -> None:
    before, after = [1.0], [1.0]
    for old, new in chances:
        before.append(before[-1] * old)
        after.append(after[-1] * new)
    shift = AcceptanceShift(over, tuple(before[1:]), tuple(after[1:]))
    directory = tmp_path_factory.mktemp("version")
    (directory / FILE).write_text(shift.to_json())
    assert read_shift(directory) == shift


def test_it_counts_over_the_drafter_that_serves_alone() -> None:
    assert shift_over(BETTER, 3) is BETTER
    assert (shift_over(BETTER, 2), shift_over(None, 3)) == (None, None)


def test_a_version_without_one_has_none(tmp_path: Path) -> None:
    assert read_shift(tmp_path) is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((), ()),
        ((0.5,), (0.5, 0.2)),
        ((0.5,), (1.2,)),
        ((0.2, 0.5), (0.5, 0.2)),
        ((0.5,), (float("nan"),)),
        ((0.5,), (-0.1,)),
        ((0.5,) * 65, (0.5,) * 65),
    ],
)
def test_what_is_no_survival_is_refused(
    before: tuple[float, ...], after: tuple[float, ...]
) -> None:
    with pytest.raises(InvalidInput, match="survival of"):
        AcceptanceShift(1, before, after)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"over": 1, "before": [0.5], "after": "x"}',
        '{"over": 1.5, "before": [0.5], "after": [0.5]}',
        '{"over": 1, "before": [0.5], "after": [NaN]}',
        "[" * 100_000,
        json.dumps({"over": 1, "before": [0.5], "after": [[0.5]]}),
    ],
)
def test_a_file_that_tells_none_is_damage(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(DataLoss, match="has no acceptance"):
        read_shift(tmp_path)
