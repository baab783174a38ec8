"""Sessions are found by each of their names; their number is bounded, and silent sessions end
first.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from session_turns import SAMPLING, said, turn

from paceline.errors import FailedPrecondition, NotFound, ResourceExhausted
from paceline.services.rollout_gateway.chat.messages import ChatRequest, Message
from paceline.services.rollout_gateway.config import SessionsConfig
from paceline.services.rollout_gateway.sessions import (
    Assignment,
    FailReason,
    SessionState,
    registry,
)
from paceline.services.rollout_gateway.sessions.registry import Ended, Sessions
from paceline.services.rollout_gateway.sessions.session import Grant, Session
from paceline.streams import api_key_hash

ABOUT = Assignment("run")
IMPLICIT = Assignment("run", implicit=True)


class Clock:
    """Moves only when a test sets it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def registered(clock: Callable[[], float], **config: float) -> Sessions:
    implicit_timeout_s = config.pop("implicit_timeout_s", 4.0)
    settings = SessionsConfig.model_validate({"timeout_s": 10.0, **config})
    vars(settings)["implicit_timeout_s"] = implicit_timeout_s  # a constant of the class
    return Sessions(settings, clock)


def ended(sessions: Sessions, session: Session, **how: FailReason) -> None:
    session.close(**how)  # type: ignore[arg-type]
    sessions.remove(session)


def conversation(*texts: str) -> ChatRequest:
    return ChatRequest(
        tuple(
            Message("assistant" if index % 2 else "user", text) for index, text in enumerate(texts)
        )
    )


def spoken(sessions: Sessions, session: Session, *texts: str) -> None:
    """Record a turn with the last text as the model's output."""
    new = said(session, None)
    new.digest = conversation(*texts).digests()[-1]
    sessions.record_turn(session, new)


def test_a_session_is_found_by_its_id_and_its_key(clock: Clock) -> None:
    sessions = registered(clock)
    one, other = sessions.open(ABOUT), sessions.open(ABOUT)
    assert one.api_key.startswith("sk-pl-")
    assert one.api_key != other.api_key
    assert sessions.get(one.session_id) is one
    assert sessions.by_key(one.api_key) is one
    assert sessions.owner(one.api_key) == one.session_id
    assert sessions.by_key("sk-pl-unknown") is None
    assert sessions.owner("sk-pl-\ud800") is None
    with pytest.raises(NotFound, match="no such session; seen: nobody"):
        sessions.get("nobody")


def test_an_ended_session_is_remembered_by_its_state(clock: Clock) -> None:
    sessions = registered(clock)
    one = sessions.open(ABOUT)
    ended(sessions, one, fail=FailReason.DATA)
    assert len(sessions) == 0
    assert sessions.owner(one.api_key) == one.session_id
    known = sessions.find(one.session_id)
    assert isinstance(known, Ended)
    assert (known.state, known.reason, known.shown["reward"]) == (
        SessionState.FAILED,
        FailReason.DATA,
        None,
    )
    for call in (lambda: sessions.get(one.session_id), lambda: sessions.by_key(one.api_key)):
        with pytest.raises(FailedPrecondition, match="has ended; seen: failed: data") as refused:
            call()
        assert refused.value.reason == "SESSION_ENDED"


def test_ended_sessions_are_remembered_up_to_a_limit(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "ENDED_REMEMBERED", 2)
    sessions = registered(clock)
    opened = [sessions.open(ABOUT) for _ in range(3)]
    for one in opened:
        ended(sessions, one)
    with pytest.raises(NotFound):
        sessions.find(opened[0].session_id)
    assert all(isinstance(sessions.find(one.session_id), Ended) for one in opened[1:])
    assert [sessions.owner(one.api_key) is None for one in opened] == [True, False, False]


def test_sessions_of_a_former_process_are_known_as_ended(clock: Clock) -> None:
    sessions = registered(clock)
    sessions.note_ended(
        Ended("old", SessionState.FAILED, FailReason.INFRA, api_key_hash("sk-pl-old"))
    )
    with pytest.raises(FailedPrecondition, match="failed: infra"):
        sessions.by_key("sk-pl-old")


def test_a_task_offered_again_has_a_new_key_and_the_old_one_says_how_it_ended(clock: Clock) -> None:
    sessions = registered(clock)
    first = sessions.open(ABOUT, "name")
    ended(sessions, first, fail=FailReason.INFRA)
    second = sessions.open(ABOUT, "name")
    assert sessions.by_key(second.api_key) is second
    with pytest.raises(FailedPrecondition, match="failed: infra"):
        sessions.by_key(first.api_key)
    assert sessions.owner(first.api_key) is None
    ended(sessions, second)
    assert sessions.owner(first.api_key) is None
    assert sessions.owner(second.api_key) == "name"


def test_what_a_former_attempt_says_late_is_not_found(clock: Clock) -> None:
    sessions = registered(clock)
    first = sessions.open(ABOUT, "name")
    ended(sessions, first)
    sessions.open(ABOUT, "name")
    sessions.record_turn(first, turn(None, [1], [2], name="late"))
    with pytest.raises(NotFound, match="completion"):
        sessions.by_completion("late")


def test_a_session_is_found_by_its_completions_while_it_is_open(clock: Clock) -> None:
    sessions = registered(clock)
    one = sessions.open(ABOUT)
    new = said(one, None, name="c")
    sessions.record_turn(one, new)
    assert sessions.by_completion("c") is one
    ended(sessions, one)
    with pytest.raises(NotFound, match="seen: c"):
        sessions.by_completion("c")


def test_a_conversation_is_found_by_what_the_model_said(clock: Clock) -> None:
    sessions = registered(clock)
    one, other = sessions.open(IMPLICIT), sessions.open(IMPLICIT)
    assert one.api_key == ""
    spoken(sessions, one, "a", "b")
    spoken(sessions, other, "a", "c")
    assert sessions.by_conversation(conversation("a", "b", "d").digests()) is one
    assert sessions.by_conversation(conversation("a", "c", "d").digests()) is other
    assert sessions.by_conversation(conversation("a", "b", "d", "e", "f").digests()) is one
    assert sessions.by_conversation(conversation("a").digests()) is None
    assert sessions.by_conversation(conversation("x", "b", "d").digests()) is None
    ended(sessions, one)
    assert sessions.by_conversation(conversation("a", "b", "d").digests()) is None


def test_a_conversation_does_not_lead_into_a_session_with_a_key(clock: Clock) -> None:
    sessions = registered(clock)
    spoken(sessions, sessions.open(ABOUT), "a", "b")
    assert sessions.by_conversation(conversation("a", "b", "d").digests()) is None


def test_of_two_equal_conversations_the_end_of_one_leaves_the_other(clock: Clock) -> None:
    sessions = registered(clock)
    one, other = sessions.open(IMPLICIT), sessions.open(IMPLICIT)
    spoken(sessions, one, "a", "b")
    spoken(sessions, other, "a", "b")
    ended(sessions, one)
    assert sessions.by_conversation(conversation("a", "b", "d").digests()) is other


def test_sessions_are_bounded_and_the_silent_end_first(clock: Clock) -> None:
    sessions = registered(clock, limit=2)
    first, second = sessions.open(ABOUT), sessions.open(ABOUT)
    with pytest.raises(ResourceExhausted, match="too many"):
        sessions.open(ABOUT)
    clock.now = 6.0
    sessions.get(first.session_id)
    clock.now = 11.0
    assert sessions.expired() == [second]
    ended(sessions, second)
    with pytest.raises(FailedPrecondition, match="has ended"):
        sessions.get(second.session_id)
    clock.now = 15.9
    assert sessions.expired() == []
    clock.now = 16.0
    assert sessions.expired() == [first]


@pytest.mark.parametrize("about", [ABOUT, IMPLICIT], ids=["own", "implicit"])
def test_generating_and_having_generated_are_signs_of_life(clock: Clock, about: Assignment) -> None:
    sessions = registered(clock, implicit_timeout_s=10.0)
    one = sessions.open(about)
    one.begin(SAMPLING, 1)
    clock.now = 25.0
    assert sessions.expired() == []
    clock.now = 34.0
    new = turn(None, [1], [2])
    one.end(1, new)
    sessions.record_turn(one, new)
    clock.now = 43.9
    assert sessions.expired() == []
    clock.now = 44.0
    assert sessions.expired() == [one]


def test_a_session_may_ask_for_a_shorter_time_out_and_not_for_a_longer(clock: Clock) -> None:
    sessions = registered(clock)
    long, short = (
        sessions.open(Assignment("run", timeout_s=99)),
        sessions.open(Assignment("run", timeout_s=2)),
    )
    clock.now = 2.0
    assert sessions.expired() == [short]
    ended(sessions, short)
    clock.now = 10.0
    assert sessions.expired() == [long]


def test_the_next_check_is_when_a_session_may_expire(clock: Clock) -> None:
    sessions = registered(clock)
    assert sessions.next_expiry_s() == 4.0
    one = sessions.open(Assignment("run", timeout_s=3))
    assert sessions.opened_early.is_set()
    assert sessions.next_expiry_s() == 3.0
    clock.now = 1.0
    sessions.open(IMPLICIT)
    assert sessions.next_expiry_s() == 2.0
    clock.now = 3.5
    assert sessions.next_expiry_s() == pytest.approx(registry.LEAST_WAIT_S)
    assert sessions.expired() == [one]
    ended(sessions, one)
    assert sessions.next_expiry_s() == 1.5


def test_an_attempt_after_a_failed_one_expires_once(clock: Clock) -> None:
    sessions = registered(clock)
    ended(sessions, sessions.open(ABOUT, "name"), fail=FailReason.INFRA)
    again = sessions.open(ABOUT, "name")
    clock.now = 10.0
    assert sessions.expired() == [again]


def test_room_is_made_by_the_longest_silent_conversation_without_reward(clock: Clock) -> None:
    sessions = registered(clock, limit=3)
    rewarded, silent, spoke = (sessions.open(IMPLICIT) for _ in range(3))
    spoken(sessions, rewarded, "a", "b")
    rewarded.score(Grant(1.0))
    spoken(sessions, silent, "c", "d")
    sessions.get(spoke.session_id)
    assert sessions.open(ABOUT)
    assert silent.state is SessionState.UNSCORED
    assert sessions.by_conversation(conversation("c", "d").digests()) is None
    assert (rewarded.state, spoke.state) == (SessionState.OPEN, SessionState.OPEN)
    spoke.begin(SAMPLING, 1)
    with pytest.raises(ResourceExhausted, match="too many"):
        sessions.open(ABOUT)


def test_turns_of_ended_sessions_are_kept_until_later_ones_need_the_room(clock: Clock) -> None:
    sessions = registered(clock, ended_tokens=5)
    made = [sessions.open(ABOUT) for _ in range(3)]
    for one in made:
        one.begin(SAMPLING, 1)
        one.end(1, new := turn(None, [1], [2]))
        sessions.record_turn(one, new)
        ended(sessions, one)
    found = [sessions.find(one.session_id) for one in made]
    assert [one.session for one in found if isinstance(one, registry.Ended)] == [None, *made[1:]]


def test_a_session_longer_than_what_is_kept_is_not_kept(clock: Clock) -> None:
    sessions = registered(clock, ended_tokens=1)
    one = sessions.open(ABOUT)
    one.begin(SAMPLING, 1)
    one.end(1, turn(None, [1], [2]))
    ended(sessions, one)
    found = sessions.find(one.session_id)
    assert isinstance(found, registry.Ended)
    assert found.session is None
