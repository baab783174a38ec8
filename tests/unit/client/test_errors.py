"""The gateway's error bodies become the classes of paceline.errors, with their reasons."""

from __future__ import annotations

from typing import Any

import pytest
from unit.client.conftest import Connect
from unit.client.scripted_gateway import ScriptedGateway, refuse, reply

from paceline import errors
from paceline.errors import PacelineError


@pytest.mark.parametrize(
    ("status", "code", "cls", "reason"),
    [
        (400, "invalid_input", errors.InvalidInput, "INVALID_INPUT"),
        (400, "not_trainable", errors.TrainabilityError, "NOT_TRAINABLE"),
        (401, "unauthenticated", errors.InvalidInput, "UNAUTHENTICATED"),
        (401, "invalid_api_key", errors.InvalidInput, "UNAUTHENTICATED"),
        (403, "forbidden", errors.InvalidInput, "FORBIDDEN"),
        (404, "not_found", errors.NotFound, "NOT_FOUND"),
        (409, "session_ended", errors.FailedPrecondition, "SESSION_ENDED"),
        (409, "missing_capability", errors.MissingCapability, "MISSING_CAPABILITY"),
        (400, "missing_capability", errors.MissingCapability, "MISSING_CAPABILITY"),
        (429, "session_quota", errors.ResourceExhausted, "SESSION_QUOTA"),
        (413, "too_large", errors.InvalidInput, "TOO_LARGE"),
        (429, "resource_exhausted", errors.ResourceExhausted, "RESOURCE_EXHAUSTED"),
        (500, "internal", errors.InternalError, "INTERNAL"),
        (501, None, errors.InternalError, "INTERNAL"),
        (503, "unavailable", errors.Unavailable, "UNAVAILABLE"),
        (504, "deadline_exceeded", errors.DeadlineExceeded, "DEADLINE_EXCEEDED"),
    ],
)
async def test_status_and_code_choose_class_and_reason(
    gateway: ScriptedGateway,
    connect: Connect,
    status: int,
    code: str | None,
    cls: type[PacelineError],
    reason: str,
) -> None:
    said = {
        "error": {
            "message": "what was wrong; seen: 1; allowed: 2",
            "type": "any",
            "param": None,
            "code": code,
        }
    }
    gateway.then(reply(status, said))
    with pytest.raises(PacelineError) as caught:
        await connect(gateway.base_url, max_retries=0).session_info("s1")
    error = caught.value
    assert (type(error), error.reason, str(error)) == (
        cls,
        reason,
        "what was wrong; seen: 1; allowed: 2",
    )


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"null", b'{"error": "text"}', b'{"error": {"message": 7}}', b"\xff"]
)
async def test_a_body_that_is_not_the_gateways_is_quoted_under_the_class_of_its_status(
    gateway: ScriptedGateway, client: Any, body: bytes
) -> None:
    gateway.then(reply(404, body), reply(401, body))
    with pytest.raises(errors.NotFound, match="HTTP 404"):
        await client.session_info("s1")
    with pytest.raises(errors.InvalidInput) as caught:
        await client.session_info("s1")
    assert caught.value.reason == "UNAUTHENTICATED"


async def test_a_long_body_is_cut(gateway: ScriptedGateway, client: Any) -> None:
    gateway.then(reply(400, b"x" * 100_000))
    with pytest.raises(errors.InvalidInput) as caught:
        await client.session_info("s1")
    assert len(str(caught.value)) < 1000


async def test_a_refusal_is_raised_at_once_with_the_call_it_belongs_to(
    gateway: ScriptedGateway, client: Any
) -> None:
    ended = refuse(
        409,
        "session s1 has ended; seen: final; allowed: open",
        "session_ended",
        "invalid_request_error",
        x_should_retry="false",
    )
    for step, cls in (
        (ended, errors.FailedPrecondition),
        (refuse(401, "no such key", "unauthenticated"), errors.InvalidInput),
        (refuse(404, "no such session", "not_found"), errors.NotFound),
        (
            refuse(500, "the engine failed", "internal", x_should_retry="false"),
            errors.InternalError,
        ),
        (reply(400, b"bad"), errors.InvalidInput),
    ):
        asked = len(gateway.seen)
        gateway.then(step)
        with pytest.raises(cls) as caught:
            await client.session_info("s/1")
        assert len(gateway.seen) == asked + 1
        assert caught.value.__notes__ == ["call of /sessions/s%2F1"]
        assert "gateway-token" not in "".join([str(caught.value), *caught.value.__notes__])
