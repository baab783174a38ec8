"""Facts over real sockets: in order, with their trace, and every gap found."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zmq.auth
from ipv6 import LOOPBACK_HOSTS

from paceline.errors import ConfigError, DeadlineExceeded
from paceline.events import FactPublisher, FactSubscriber
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.v1.coordinator_pb2 import Fact, RunFinished, StepBegan

MESSAGES_OF_A_SECOND = 10_000
"""More than a coordinator sends: each takes a durable write and a tenth of a millisecond."""


class Gaps(list[tuple[int, int]]):
    async def note(self, first: int, last: int) -> None:
        self.append((first, last))


@pytest.fixture
def address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def publisher(address: str) -> Iterator[FactPublisher]:
    with FactPublisher(address, "run-a") as made:
        yield made


async def _connected(publisher: FactPublisher, subscriber: FactSubscriber) -> Fact:
    """Publish until the subscription has reached the publisher; return the first received fact."""
    for _ in range(100):
        await publisher.publish(Fact(step_began=StepBegan(samples=1)))
        try:
            return await subscriber.next(0.05)
        except DeadlineExceeded:
            continue
    raise AssertionError("the subscriber never heard the publisher")


@pytest.mark.parametrize("host", LOOPBACK_HOSTS)
async def test_facts_pass_over_ipv4_and_ipv6(host: str) -> None:
    with (
        FactPublisher(f"tcp://{host}:*", "run-a") as publisher,
        FactSubscriber(publisher.address, "run-a", Gaps().note) as subscriber,
    ):
        assert await _connected(publisher, subscriber)
        port = publisher.address.rpartition(":")[2]
        with FactSubscriber(f"tcp://{host}:{port}", "run-a", Gaps().note) as by_name:
            assert await _connected(publisher, by_name)


async def test_facts_arrive_numbered_and_in_order(publisher: FactPublisher, address: str) -> None:
    gaps = Gaps()
    with FactSubscriber(address, "run-a", gaps.note) as subscriber:
        first = await _connected(publisher, subscriber)
        gaps.clear()
        for n in range(5):
            await publisher.publish(Fact(step_began=StepBegan(samples=n)))
        heard = [await subscriber.next(5.0) for _ in range(5)]
    assert [fact.step_began.samples for fact in heard] == [0, 1, 2, 3, 4]
    assert [fact.sequence for fact in heard] == [first.sequence + n for n in range(1, 6)]
    assert gaps == []


async def test_facts_published_together_arrive_one_by_one_under_numbers_of_their_own(
    publisher: FactPublisher, address: str
) -> None:
    gaps = Gaps()
    with FactSubscriber(address, "run-a", gaps.note) as subscriber:
        first = await _connected(publisher, subscriber)
        gaps.clear()
        facts = [Fact(step_began=StepBegan(samples=n)) for n in range(3)]
        assert await publisher.publish(*facts) == first.sequence + 3
        assert await publisher.publish(*facts[:2]) == first.sequence + 5
        heard = [await subscriber.next(patient(5)) for _ in range(5)]
    assert [fact.step_began.samples for fact in heard] == [0, 1, 2, 0, 1]
    assert [fact.sequence for fact in heard] == [first.sequence + n for n in range(1, 6)]
    assert (gaps, [fact.sequence for fact in facts]) == ([], [0, 0, 0])


async def test_who_joins_hears_of_all_that_was_published_together_before(address: str) -> None:
    gaps = Gaps()
    with FactPublisher(address, "run-a") as publisher:
        await publisher.publish(Fact(), Fact(), Fact())
        with FactSubscriber(address, "run-a", gaps.note) as subscriber:
            first = await _connected(publisher, subscriber)
    assert (first.sequence > 3, gaps) == (True, [(1, first.sequence - 1)])


@pytest.mark.slow
async def test_who_reads_once_a_second_misses_nothing_of_a_second(
    publisher: FactPublisher, address: str
) -> None:
    gaps = Gaps()
    with FactSubscriber(address, "run-a", gaps.note) as subscriber:
        first = await _connected(publisher, subscriber)
        gaps.clear()
        for n in range(MESSAGES_OF_A_SECOND - 1):
            last = await publisher.publish(*(Fact(at_s=n) for _ in range(1 + n % 3)))
        while (heard := (await subscriber.next(patient(5))).sequence) < last:
            pass
    assert (heard, gaps) == (last, [])
    assert last - first.sequence == 2 * (MESSAGES_OF_A_SECOND - 1)


async def test_who_reads_too_seldom_sees_each_gap_and_hears_all_the_rest(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.events.FACTS_QUEUED", 20)
    gaps, large = Gaps(), Fact(run_finished=RunFinished(failure="x" * 200_000))
    with (
        FactPublisher(address, "run-a") as publisher,
        FactSubscriber(address, "run-a", gaps.note) as subscriber,
    ):
        heard = [(await _connected(publisher, subscriber)).sequence]
        gaps.clear()
        for _ in range(200):
            dropped = await publisher.publish(large, Fact())
        while heard[-1] <= dropped:  # until a fact published after the drops arrives
            with suppress(DeadlineExceeded):
                heard.append((await subscriber.next(0.05)).sequence)
                continue
            await publisher.publish(Fact())
    missed = [number for first, last in gaps for number in range(first, last + 1)]
    assert len(missed) >= 100
    assert sorted(heard + missed) == list(range(heard[0], heard[-1] + 1))
    assert heard == sorted(heard)


async def test_a_late_subscriber_is_told_what_it_missed(
    publisher: FactPublisher, address: str
) -> None:
    for _ in range(3):
        await publisher.publish(Fact())
    gaps = Gaps()
    with FactSubscriber(address, "run-a", gaps.note) as subscriber:
        first = await _connected(publisher, subscriber)
    assert first.sequence > 3
    assert gaps == [(1, first.sequence - 1)]


async def test_a_skipped_number_is_a_gap_with_its_range(
    publisher: FactPublisher, address: str
) -> None:
    gaps = Gaps()
    with FactSubscriber(address, "run-a", gaps.note) as subscriber:
        heard = (await _connected(publisher, subscriber)).sequence
        gaps.clear()
        publisher._next += 2
        await publisher.publish(Fact())
        assert (await subscriber.next(5.0)).sequence == heard + 3
    assert gaps == [(heard + 1, heard + 2)]


async def test_a_publisher_that_begins_again_is_a_gap(address: str) -> None:
    gaps = Gaps()
    with FactSubscriber(address, "run-a", gaps.note) as subscriber:
        with FactPublisher(address, "run-a", first_sequence=40) as first:
            await _connected(first, subscriber)
        gaps.clear()
        with FactPublisher(address, "run-a") as second:
            fact = await _connected(second, subscriber)
    assert fact.sequence < 40
    assert gaps == [(1, fact.sequence - 1)]


async def test_another_run_with_the_same_prefix_is_not_heard(address: str) -> None:
    gaps = Gaps()
    with (
        FactPublisher(address, "run-ab") as other,
        FactSubscriber(address, "run-a", gaps.note) as subscriber,
    ):
        with FactSubscriber(address, "run-ab", gaps.note) as witness:
            await _connected(other, witness)
        with pytest.raises(DeadlineExceeded):
            await subscriber.next(0.1)


async def test_the_trace_context_rides_in_its_own_frame(
    publisher: FactPublisher, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    traceparent = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    monkeypatch.setattr("paceline.events.inject", lambda: {"traceparent": traceparent.decode()})
    with FactSubscriber(address, "run-a", Gaps().note) as subscriber:
        await _connected(publisher, subscriber)
        assert subscriber.traceparent == traceparent


async def test_publishing_never_waits_for_a_slow_subscriber(
    publisher: FactPublisher, address: str
) -> None:
    with FactSubscriber(address, "run-a", Gaps().note) as subscriber:
        await _connected(publisher, subscriber)
        async with asyncio.timeout(patient(20)):
            for _ in range(5000):
                await publisher.publish(Fact(step_began=StepBegan(samples=1)))


def test_a_taken_address_names_the_setting(publisher: FactPublisher) -> None:
    with pytest.raises(ConfigError, match=r"addresses\.events"):
        FactPublisher(publisher.address, "run-a")


def make_key(directory: Path, name: str) -> str:
    _, secret = zmq.auth.create_certificates(directory, name)
    return str(secret)


async def test_facts_under_a_key_reach_its_holders_and_nobody_else(
    address: str, tmp_path: Path
) -> None:
    ours, foreign = make_key(tmp_path, "run"), make_key(tmp_path, "stranger")
    public = str(Path(ours).with_suffix(".key"))
    with ExitStack() as open_sockets:
        publisher = open_sockets.enter_context(FactPublisher(address, "run-a", curve_key=ours))
        holder, stranger, plain = [
            open_sockets.enter_context(FactSubscriber(address, "run-a", Gaps().note, curve_key=key))
            for key in (ours, foreign, "")
        ]
        # This socket has the publisher's key, but the publisher does not admit it.
        knowing = zmq.auth.load_certificate(public)[0]
        stranger._socket.disconnect(address)
        stranger._socket.curve_serverkey = knowing
        stranger._socket.connect(address)

        await _connected(publisher, holder)
        await publisher.publish(Fact(step_began=StepBegan(samples=7)))
        assert (await holder.next(patient(5))).step_began.samples == 7
        for shut_out in (stranger, plain):
            with pytest.raises(DeadlineExceeded):
                await shut_out.next(0.2)


async def test_a_file_that_holds_no_key_pair_names_the_setting(
    address: str, tmp_path: Path
) -> None:
    public = str(Path(make_key(tmp_path, "run")).with_suffix(".key"))
    for path in (public, str(tmp_path / "absent"), __file__):
        with pytest.raises(ConfigError, match=r"security\.curve_key"):
            FactPublisher(address, "run-a", curve_key=path)
