"""A task is led by one agent at a time until it has an outcome; faults of machines do not count as
one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from paceline.errors import FailedPrecondition, ResourceExhausted
from paceline.local.patience import patient
from paceline.services.rollout_gateway.config import SessionsConfig
from paceline.services.rollout_gateway.environments import EpisodeTask
from paceline.services.rollout_gateway.sessions import Assignment, FailReason, SessionState
from paceline.services.rollout_gateway.sessions.groups import Offer, TaskOffers
from paceline.services.rollout_gateway.sessions.registry import Sessions
from paceline.services.rollout_gateway.sessions.session import Session

WAIT_S = patient(5.0)


class Desk:
    """Offers over real sessions, ended as the gateway ends them."""

    def __init__(self, limit: int = 100) -> None:
        self.sessions = Sessions(SessionsConfig(limit=limit))
        self.offers = TaskOffers(self.sessions.open)

    def lead(self, name: str, worker: int = 0) -> asyncio.Task[Session]:
        task = EpisodeTask(name, f"prompt of {name}", "answer")
        offer = Offer(task, Assignment("run", task_id=name), f"s-{name}", worker)
        return asyncio.create_task(self.offers.offer_task(offer))

    async def claim(self, wait_s: float = WAIT_S) -> tuple[Session, EpisodeTask]:
        claimed = await self.offers.claim(wait_s)
        assert claimed is not None
        return claimed

    def end(self, session: Session, fail: FailReason | None = None, *, abort: bool = False) -> None:
        session.close(fail=fail, abort=abort)
        self.sessions.remove(session)
        self.offers.record_end(session)


@asynccontextmanager
async def led(desk: Desk, name: str = "t") -> AsyncIterator[asyncio.Task[Session]]:
    """A task on offer that is taken back at the end."""
    lead = desk.lead(name)
    await asyncio.sleep(0)
    try:
        yield lead
    finally:
        lead.cancel()
        await asyncio.gather(lead, return_exceptions=True)


async def test_without_a_task_a_claim_waits_and_then_gets_nothing() -> None:
    assert await Desk().offers.claim(0) is None
    assert await Desk().offers.claim(0.01) is None


async def test_a_claimed_task_has_the_session_and_the_worker_it_was_offered_with() -> None:
    desk = Desk()
    lead = desk.lead("t", worker=3)
    session, task = await desk.claim()
    assert (session.session_id, session.worker_index, task.prompt) == ("s-t", 3, "prompt of t")
    assert session.assignment.task_id == "t"
    assert desk.offers.has_offer(session)
    desk.offers.record_completion(session)
    assert await lead is session
    assert session.state is SessionState.OPEN


async def test_tasks_are_claimed_in_the_order_of_their_offers() -> None:
    desk = Desk()
    async with led(desk, "a"), led(desk, "b"):
        assert [(await desk.claim(0))[1].task_id for _ in range(2)] == ["a", "b"]
        assert await desk.offers.claim(0) is None


async def test_every_waiting_claim_gets_a_task_of_its_own() -> None:
    desk = Desk()
    claims = [asyncio.create_task(desk.claim()) for _ in range(2)]
    await asyncio.sleep(0)
    async with led(desk, "a"), led(desk, "b"):
        assert sorted(task.task_id for _, task in await asyncio.gather(*claims)) == ["a", "b"]


async def test_a_completed_session_stays_the_offers_until_it_is_closed() -> None:
    desk = Desk()
    lead = desk.lead("t")
    session, _ = await desk.claim()
    desk.offers.record_completion(session)
    await lead
    assert desk.offers.has_offer(session)  # an agent's second call must not close it unscored
    desk.offers.record_completion(session)
    desk.end(session)
    assert not desk.offers.has_offer(session)


@pytest.mark.parametrize(("reason", "attempts"), [(FailReason.INFRA, 4), (FailReason.DATA, 2)])
async def test_a_failed_attempt_is_offered_again_up_to_the_limit(
    reason: FailReason, attempts: int
) -> None:
    desk = Desk()
    lead = desk.lead("t")
    keys = set()
    for _ in range(attempts):
        session, _ = await desk.claim()
        keys.add(session.api_key)
        assert not lead.done()
        desk.end(session, reason)
    assert len(keys) == attempts
    assert (await lead).outcome == f"failed:{reason}"
    assert await desk.offers.claim(0) is None


async def test_faults_of_machines_do_not_use_up_the_tasks_second_attempt() -> None:
    desk = Desk()
    lead = desk.lead("t")
    for reason in (FailReason.INFRA, FailReason.INFRA, FailReason.DATA, FailReason.DATA):
        assert not lead.done()
        desk.end((await desk.claim())[0], reason)
    assert (await lead).outcome == "failed:data"


async def test_an_attempt_after_a_failure_may_succeed() -> None:
    desk = Desk()
    lead = desk.lead("t")
    desk.end((await desk.claim())[0], FailReason.INFRA)
    session, _ = await desk.claim()
    desk.offers.record_completion(session)
    assert await lead is session


async def test_an_aborted_session_is_an_outcome() -> None:
    desk = Desk()
    lead = desk.lead("t")
    session, _ = await desk.claim()
    desk.end(session, abort=True)
    assert (await lead).state is SessionState.ABORTED
    assert not desk.offers.has_offer(session)


async def test_a_cancelled_lead_is_no_longer_on_offer() -> None:
    desk = Desk()
    async with led(desk):
        pass
    assert await desk.offers.claim(0) is None


async def test_the_session_of_a_cancelled_lead_ends_without_being_offered_again() -> None:
    desk = Desk()
    async with led(desk):
        session, _ = await desk.claim()
    assert not desk.offers.has_offer(session)
    desk.offers.record_completion(session)
    desk.end(session, FailReason.INFRA)
    assert await desk.offers.claim(0) is None


async def test_a_claim_without_room_leaves_the_task_first_in_line() -> None:
    desk = Desk(limit=1)
    other = desk.sessions.open(Assignment("run"))
    async with led(desk, "a"), led(desk, "b"):
        with pytest.raises(ResourceExhausted, match="too many sessions"):
            await desk.offers.claim(0)
        desk.end(other)
        assert (await desk.claim(0))[1].task_id == "a"


async def test_sessions_nobody_offered_are_not_the_offers_business() -> None:
    desk = Desk()
    session = desk.sessions.open(Assignment("run"))
    desk.offers.record_completion(session)
    desk.end(session, FailReason.INFRA)
    assert not desk.offers.has_offer(session)
    assert await desk.offers.claim(0) is None


async def test_a_claim_is_refused_while_it_is_known_that_nothing_will_be_offered() -> None:
    offers = TaskOffers(Sessions(SessionsConfig()).open, "no run")
    with pytest.raises(FailedPrecondition, match="no run"):
        await offers.claim(WAIT_S)
    offers.record_offers()
    assert await offers.claim(0.01) is None


async def test_a_claim_that_waits_hears_that_the_run_offers_nothing() -> None:
    desk = Desk()
    waiting = asyncio.create_task(desk.offers.claim(WAIT_S))
    await asyncio.sleep(0)
    desk.offers.refuse("answered by others")
    with pytest.raises(FailedPrecondition, match="answered by others"):
        await waiting


async def test_a_run_that_has_offered_tasks_is_believed_to_offer_more() -> None:
    desk = Desk()
    desk.offers.record_offers()
    desk.offers.refuse("answered by others")
    assert await desk.offers.claim(0) is None
