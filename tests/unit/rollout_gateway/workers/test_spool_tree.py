"""Which host copies a version from which."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError, FailedPrecondition
from paceline.local.ports import way_to
from paceline.services.rollout_gateway.background import cancel
from paceline.services.rollout_gateway.workers.hosts import HostWorkers
from paceline.services.rollout_gateway.workers.spool_reading import source_of


def test_hosts_are_filled_level_by_level() -> None:
    there = {host: f"host{host}:1" for host in range(1, 8)}
    assert [source_of(host, there, 2) for host in there] == [
        *["", ""],
        *["host1:1", "host1:1", "host2:1", "host2:1", "host3:1"],
    ]
    assert [source_of(host, there, 1) for host in (1, 2, 7)] == ["", "host1:1", "host6:1"]


@given(there=st.dictionaries(st.integers(1, 40), st.booleans()), fan_out=st.integers(0, 5))
def test_each_host_copies_from_one_that_can_be_copied_from_and_comes_before_it(
    there: dict[int, bool], fan_out: int
) -> None:
    addresses = {host: str(host) if serves else "" for host, serves in there.items()}
    sources = {host: source_of(host, addresses, fan_out) for host in there}
    for host, source in sources.items():
        assert not source or (int(source) < host and addresses[int(source)] == source)
    of_those_that_serve = Counter(sources[host] for host in there if addresses[host])
    if fan_out:
        assert all(count <= fan_out for count in of_those_that_serve.values())
    else:
        assert not any(sources.values())


def test_a_host_that_is_not_known_copies_from_the_gateway() -> None:
    assert source_of(9, {1: "a:1", 2: "b:1"}, 1) == ""


def test_a_host_serves_its_copies_on_the_interface_that_leads_to_the_gateway() -> None:
    assert way_to("127.0.0.2:7401") == ("127.0.0.1", "127.0.0.2")
    with pytest.raises(ConfigError, match=r"no way leads to nowhere\.invalid:7401"):
        way_to("nowhere.invalid:7401")


async def test_a_second_host_of_a_number_changes_nothing_of_where_the_first_is_copied_from() -> (
    None
):
    async def silent() -> AsyncIterator[object]:
        await asyncio.Event().wait()
        yield

    host = HostWorkers(1)
    waiting = asyncio.create_task(anext(host.hold(silent(), "first:1")))
    await asyncio.sleep(0)  # until it waits for an order
    with pytest.raises(FailedPrecondition, match="holds workers already"):
        await anext(host.hold(silent(), "second:1"))
    assert host.copies_address == "first:1"
    await cancel(waiting)
