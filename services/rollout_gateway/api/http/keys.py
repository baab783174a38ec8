"""Authenticates requests: finds the key of a request and the sessions that it may use."""

from __future__ import annotations

from starlette.requests import Request

from paceline.errors import FailedPrecondition, InvalidInput
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.services.rollout_gateway.sessions.registry import Ended
from paceline.services.rollout_gateway.sessions.session import Caller, Session

CURRENT = "current"
"""Path segment for the key's own session."""


def gateway_of(request: Request) -> Gateway:
    """The gateway that serves a request."""
    gateway: Gateway = request.app.state.gateway
    return gateway


def api_key(request: Request) -> str:
    """The key of a request: OpenAI's bearer token, or Anthropic's x-api-key.

    Raises InvalidInput (UNAUTHENTICATED) for two tokens.
    """
    if len(request.headers.getlist("authorization")) > 1:
        raise InvalidInput(
            "the request carries two tokens: a proxy has put its own beside the caller's",
            reason="UNAUTHENTICATED",
            seen="two headers authorization",
            allowed="the caller's alone (SGLang's router: started without --api-key)",
        )
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    return value.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


async def caller_of(request: Request) -> Caller:
    """The caller of a request.

    Raises InvalidInput (UNAUTHENTICATED), FailedPrecondition for the key of an ended session.
    """
    return await gateway_of(request).agents.caller(api_key(request))


async def require_token(request: Request) -> None:
    """Raises InvalidInput for the key of a session, which only gives access to that session."""
    if (await caller_of(request)).session is not None:
        raise InvalidInput(
            "a session's key cannot do this", reason="NOT_ALLOWED", allowed="the gateway's token"
        )


async def session_of(request: Request) -> Session | Ended:
    """The session in the path, open or ended, if the key may use it.

    Raises InvalidInput, NotFound.
    """
    sessions = gateway_of(request).agents.sessions
    named = str(request.path_params["id"])
    owner = sessions.owner(api_key(request))
    if owner is None:
        await caller_of(request)
        if named == CURRENT:
            raise InvalidInput(
                "current is the session of a session's key", seen="another key", allowed="an id"
            )
    elif named not in (CURRENT, owner):
        raise InvalidInput(
            "the key is that of another session", reason="NOT_ALLOWED", allowed=owner
        )

    return sessions.find(owner or named)


async def exportable_session_of(request: Request) -> Session:
    """The session in the path, open or ended. Raises FailedPrecondition when its turns are no
    longer kept.
    """
    found = await session_of(request)
    if isinstance(found, Session):
        return found
    if found.session is None:
        raise FailedPrecondition(
            "the turns of this session are kept no longer",
            seen=f"{found.session_id} ended ({found.state})",
            allowed="an export sooner after the end, or more gateway.sessions.ended_tokens",
            reason="SESSION_ENDED",
        )
    return found.session


async def open_session_of(request: Request) -> Session:
    """The session in the path, if it is open. Raises FailedPrecondition for an ended session."""
    found = await session_of(request)
    if isinstance(found, Ended):
        raise found.error()
    return found
