"""Agents' own groups close when full or at their deadline, wait bounded in bytes, and are taken
once.
"""

from __future__ import annotations

import asyncio

import pytest
from session_turns import said, session

from paceline.errors import ResourceExhausted
from paceline.local.patience import patient
from paceline.services.rollout_gateway.sessions import Assignment
from paceline.services.rollout_gateway.sessions import groups as open_groups
from paceline.services.rollout_gateway.sessions.groups import TOKEN_BYTES, OpenGroups
from paceline.services.rollout_gateway.sessions.session import Grant, Session

LONG_S = 3600.0


def sibling(
    name: str, group: str = "g", size: int = 2, *, reward: float | None = 1.0, tokens: int = 2
) -> Session:
    """Return an ended session."""
    one = session(name, Assignment("run", group_id=group, group_size=size, open_group=True))
    said(one, None, range(tokens - 1), [9])
    if reward is not None:
        one.score(Grant(reward))
    one.close()
    return one


async def taken(groups: OpenGroups) -> tuple[str, list[str], int]:
    async with asyncio.timeout(patient(5)):
        await groups.closed()
    group = groups.pop()
    assert group is not None
    return group.group_id, [member.session_id for member in group.members], group.scored


async def nothing_closed(groups: OpenGroups) -> bool:
    take = asyncio.create_task(groups.closed())
    for _ in range(3):
        await asyncio.sleep(0)
    closed = take.done()
    take.cancel()
    await asyncio.gather(take, return_exceptions=True)
    return not closed and groups.pop() is None


async def test_a_group_closes_with_its_last_sibling() -> None:
    groups = OpenGroups(LONG_S, 1 << 20)
    assert groups.add(sibling("a"))
    assert await nothing_closed(groups)
    assert groups.add(sibling("b"))
    assert await taken(groups) == ("g", ["a", "b"], 2)


async def test_who_waits_is_woken_by_the_close() -> None:
    groups = OpenGroups(LONG_S, 1 << 20)
    waiting = asyncio.create_task(taken(groups))
    await asyncio.sleep(0)
    groups.add(sibling("a", size=1))
    assert (await waiting)[1] == ["a"]


async def test_a_group_closes_at_the_deadline_as_it_is() -> None:
    groups = OpenGroups(0.02, 1 << 20)
    groups.add(sibling("a", size=8))
    assert await nothing_closed(groups)
    assert await taken(groups) == ("g", ["a"], 1)


async def test_the_deadline_counts_from_the_first_siblings_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    now = [loop.time()]
    monkeypatch.setattr(loop, "time", lambda: now[0])
    groups = OpenGroups(100.0, 1 << 20)
    groups.add(sibling("a", size=3))
    now[0] += 99.0
    groups.add(sibling("b", size=3))
    assert await nothing_closed(groups)
    now[0] += 1.5
    assert (await taken(groups))[1] == ["a", "b"]


async def test_groups_are_taken_in_the_order_of_their_close() -> None:
    groups = OpenGroups(LONG_S, 1 << 20)
    groups.add(sibling("a", "slow"))
    groups.add(sibling("b", "fast", 1))
    groups.add(sibling("c", "slow"))
    assert [(await taken(groups))[0] for _ in range(2)] == ["fast", "slow"]


async def test_a_session_without_a_group_is_one_by_itself() -> None:
    groups = OpenGroups(LONG_S, 1 << 20)
    groups.add(sibling("a", "", 1))
    groups.add(sibling("b", "", 1))
    assert [(await taken(groups))[0] for _ in range(2)] == ["a", "b"]


async def test_only_rewarded_siblings_are_scored() -> None:
    groups = OpenGroups(LONG_S, 1 << 20)
    groups.add(sibling("a", size=3))
    groups.add(sibling("b", size=3, reward=None))
    aborted = session("c", Assignment("run", group_id="g", group_size=3))
    said(aborted, None)
    aborted.score(Grant(1.0))
    aborted.close(abort=True)
    groups.add(aborted)
    assert (await taken(groups))[2] == 1


async def test_siblings_of_a_full_group_and_late_ones_are_refused() -> None:
    groups = OpenGroups(LONG_S, 1 << 20)
    assert [groups.add(sibling(name)) for name in "abc"] == [True, True, False]
    assert (await taken(groups))[1] == ["a", "b"]
    assert not groups.add(sibling("d"))
    assert await nothing_closed(groups)


async def test_a_group_that_closed_early_takes_siblings_until_a_step_takes_it() -> None:
    groups = OpenGroups(0.0, 1 << 20)
    groups.add(sibling("a", size=2))
    for _ in range(3):  # turns of the loop, in which the alarm goes off
        await asyncio.sleep(0)
    assert groups._closed
    assert groups.add(sibling("b", size=2))
    assert (await taken(groups))[1] == ["a", "b"]
    assert not groups.add(sibling("c", size=2))


async def test_taken_groups_are_remembered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_groups, "CLOSED_REMEMBERED", 1)
    groups = OpenGroups(LONG_S, 1 << 20)
    for name in "ab":
        groups.add(sibling(name, name, 1))
        await taken(groups)
    assert not groups.add(sibling("x", "b", 1))
    assert groups.add(sibling("y", "a", 1))


async def test_above_the_limit_of_bytes_nobody_is_admitted_until_a_step_came() -> None:
    groups = OpenGroups(LONG_S, 10 * TOKEN_BYTES)
    groups.add(sibling("a", "one", 2, tokens=10))
    groups.admit()
    groups.add(sibling("b", "one", 2, tokens=1))
    with pytest.raises(ResourceExhausted, match=f"seen: {11 * TOKEN_BYTES} bytes"):
        groups.admit()
    await taken(groups)
    groups.admit()


async def test_at_the_end_all_that_no_step_took_is_given_up() -> None:
    groups = OpenGroups(LONG_S, TOKEN_BYTES)
    groups.add(sibling("a", "open"))
    groups.add(sibling("b", "closed", 1))
    assert sorted(group.group_id for group in groups.give_up()) == ["closed", "open"]
    groups.admit()
    assert groups.give_up() == []
    assert await nothing_closed(groups)
