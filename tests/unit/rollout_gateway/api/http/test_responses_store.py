"""Past responses are kept within bounds and shown only to the clients that requested them."""

from __future__ import annotations

import pytest

from paceline.services.rollout_gateway.api.http import responses
from paceline.services.rollout_gateway.api.http.responses import PastResponses, UnknownResponse
from paceline.services.rollout_gateway.chat.messages import Message
from paceline.services.rollout_gateway.config import SessionsConfig
from paceline.services.rollout_gateway.sessions import Assignment
from paceline.services.rollout_gateway.sessions.names import GatewayNames
from paceline.services.rollout_gateway.sessions.session import Caller, Session

ANYBODY = Caller()
SAID = (Message("user", "Hi"), Message("assistant", "x" * 1000))


def caller(name: str) -> Caller:
    return Caller(Session(name, Assignment(""), SessionsConfig()))


@pytest.mark.parametrize(("limit", "value"), [("MAX_RESPONSES", 3), ("MAX_BYTES", 4000)])
def test_the_oldest_make_room_by_number_and_by_bytes(
    limit: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, limit, value)
    past = PastResponses(GatewayNames())
    for index in range(10):
        past.put({"id": f"r{index}"}, SAID, ANYBODY)
    assert [past.get(f"r{index}", ANYBODY).messages for index in (7, 8, 9)] == [SAID] * 3
    with pytest.raises(UnknownResponse):
        past.get("r6", ANYBODY)


def test_one_larger_than_all_there_is_room_for_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_BYTES", 500)
    past = PastResponses(GatewayNames())
    past.put({"id": "r"}, SAID, ANYBODY)
    with pytest.raises(UnknownResponse):
        past.get("r", ANYBODY)
    past.put({"id": "small"}, SAID[:1], ANYBODY)
    assert past.get("small", ANYBODY).body == {"id": "small"}


def test_a_session_sees_its_own_and_the_token_sees_all() -> None:
    past = PastResponses(GatewayNames())
    past.put({"id": "r"}, SAID, caller("one"))
    assert past.get("r", caller("one")).owner == "one"
    assert past.get("r", ANYBODY).owner == "one"
    for act in (past.get, past.drop):
        with pytest.raises(UnknownResponse):
            act("r", caller("two"))
    past.drop("r", caller("one"))
    with pytest.raises(UnknownResponse):
        past.drop("r", ANYBODY)
