"""The index of waiting trajectories gives the results of a full search."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.policy_trainer.batches.test_batcher import trajectory

from paceline.services.policy_trainer.batches.groups import HeldDraw, HeldGroups, HeldTrajectory

GROUPS = ("a", "b")
Made = list[tuple[str, int, int, int, int, int]]
"""(group, step that drew it, sample, branch, branches of its session, policy version)."""


def held(number: int, made: tuple[str, int, int, int, int, int]) -> HeldTrajectory:
    group, step, sample, branch, of, version = made
    one = trajectory(group, sample, step=step, branch=branch, of=of, version=version)
    return HeldTrajectory(f"{number}", one, "")


def searched(here: list[HeldTrajectory]) -> dict[tuple[str, int], dict[str, list[HeldTrajectory]]]:
    """Sessions by group and draw, found anew."""
    found: dict[tuple[str, int], dict[str, list[HeldTrajectory]]] = defaultdict(dict)
    for one in here:
        sessions = found[one.trajectory.group_id, one.trajectory.step]
        sessions.setdefault(one.trajectory.key.session_id, []).append(one)
    return found


def ids(draw: HeldDraw) -> dict[str, list[str]]:
    return {name: [b.entry_id for b in one.branches] for name, one in draw.sessions.items()}


@settings(deadline=None)
@given(
    made=st.lists(
        st.tuples(
            st.sampled_from(GROUPS),
            st.integers(0, 2),
            st.integers(0, 2),
            st.integers(0, 2),
            st.integers(1, 3),
            st.integers(0, 9),
        ),
        max_size=24,
    ),
    gone=st.sets(st.integers(0, 23)),
    again=st.sets(st.integers(0, 23)),
    version=st.integers(0, 10),
    asked=st.sets(st.sampled_from(GROUPS)),
)
def test_groups_are_what_a_search_through_everything_finds(
    made: Made, gone: set[int], again: set[int], version: int, asked: set[str]
) -> None:
    index = HeldGroups()
    every = [held(number, one) for number, one in enumerate(made)]
    for number, one in enumerate(every):
        index.add(one)
        if number in again:
            index.add(one)
    for number in gone:
        index.remove(str(number))
    left = [one for number, one in enumerate(every) if number not in gone]
    assert len(index) == len(left)
    assert all((str(number) in index) == (number not in gone) for number in range(len(every)))
    found = searched(left)
    for group in GROUPS:
        steps = [step for name, step in found if name == group]
        sessions = found[group, max(steps)] if steps else {}
        draw = index.newest(group)
        assert ids(draw) == {name: [b.entry_id for b in one] for name, one in sessions.items()}
        assert draw.complete == sum(
            len({b.trajectory.key.branch_id for b in one})
            >= max(b.trajectory.branch_count for b in one)
            for one in sessions.values()
        )
    old = [
        {name: [b.entry_id for b in one] for name, one in sessions.items()}
        for (group, _), sessions in found.items()
        if group not in asked
        and any((b.oldest_version or 0) < version for one in sessions.values() for b in one)
    ]
    aged = [ids(draw) for draw in index.aged(version, asked)]
    assert sorted(aged, key=str) == sorted(old, key=str)
    spared = [ids(draw) for draw in index.aged(version, GROUPS)]
    assert spared == [], "what is asked for is not given up"


def test_what_waits_for_other_steps_is_not_looked_at() -> None:
    """A search would meet each of the 3,000 at every look."""
    index = HeldGroups()
    touched = 0

    class Watched(HeldTrajectory):
        """Counts reads of its trajectory."""

        def __getattribute__(self, name: str) -> object:
            nonlocal touched
            touched += name == "trajectory"
            return super().__getattribute__(name)

    for number in range(3000):
        one = trajectory(f"other{number // 2}", number % 2, version=9)
        index.add(Watched(f"other-{number}", one, ""))
    assert touched >= 3000, "it notes who reads"
    touched = 0
    for sample in range(2):
        index.add(HeldTrajectory(f"{sample}", trajectory("a", sample, version=9), ""))
        assert index.newest("a").complete == sample + 1
    assert list(index.aged(9, {"a"})) == []
    index.remove("0")
    assert touched == 0


def test_a_branch_is_read_once_however_many_its_group_has(monkeypatch: pytest.MonkeyPatch) -> None:
    index, reads = HeldGroups(), 0
    oldest = HeldTrajectory.oldest_version.fget
    assert oldest is not None

    def counted(one: HeldTrajectory) -> int | None:
        nonlocal reads
        reads += 1
        found: int | None = oldest(one)
        return found

    monkeypatch.setattr(HeldTrajectory, "oldest_version", property(counted))
    for number in range(64):
        index.add(held(number, ("a", 0, number, 0, 1, number % 3)))
    for number in range(64):
        index.remove(str(number))
    assert reads == 2 * 64  # once when it is added, and once when it is removed


def test_a_group_whose_old_trajectory_was_removed_is_not_old() -> None:
    index = HeldGroups()
    for number, version in enumerate((0, 1)):
        index.add(held(number, ("a", 0, number, 0, 1, version)))
    index.remove("0")
    assert list(index.aged(1, ())) == []
    assert [ids(draw) for draw in index.aged(2, ())] == [{"a-1-0": ["1"]}]
