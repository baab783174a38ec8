"""Sessions over HTTP: request bodies and access rules. The gateway does the work."""

from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.errors import FailedPrecondition, InvalidInput, NotFound
from paceline.rpc.http_requests import FieldError, api_key
from paceline.services.rollout_gateway import environments, sessions
from paceline.services.rollout_gateway.api.http import requests, shapes, streaming
from paceline.services.rollout_gateway.config import SessionsConfig
from paceline.services.rollout_gateway.sessions import registry
from paceline.services.rollout_gateway.sessions.session import Grant, Session

CURRENT = "current"
"""Path segment for the key's own session."""
MAX_WAIT_S = 60.0
Name = Annotated[str, Field(max_length=200, pattern=r"^[^/\x00-\x1f]*$")]
Value = Annotated[float, Field(allow_inf_nan=False)]


class OpenBody(shapes.Shape):
    """POST /v1/sessions."""

    task_id: Name = ""
    group_id: Name = ""
    group_size: int = Field(1, ge=1, le=65_536)
    sample_index: int = Field(0, ge=0, lt=2**31)
    trainable: bool = True
    turn_discount: float | None = Field(None, ge=0, le=1)
    timeout_s: float = Field(0, ge=0, allow_inf_nan=False)
    claim: bool = False
    wait_s: float = Field(0, ge=0, le=MAX_WAIT_S)
    override_sampling: bool | None = None

    def assignment(self, run_id: str, config: SessionsConfig) -> sessions.Assignment:
        """The assignment of the session."""
        own = self.model_dump(exclude={"claim", "wait_s", "override_sampling"})
        override = self.override_sampling
        if override is None:
            override = config.untrainable == "override"
        own |= {"temperature": config.temperature, "open_group": True}
        return sessions.Assignment(run_id, **own, override=override)


class RewardBody(shapes.Shape):
    """POST /v1/sessions/{id}/reward."""

    value: Value
    completion_id: Name = ""
    accumulate: bool = False
    idempotency_key: Name = ""
    parts: dict[Name, Value] = Field(default={}, max_length=256)

    def grant(self) -> Grant:
        """The session's Grant."""
        return Grant(**self.model_dump())


class CompletionRewardBody(RewardBody):
    """POST /v1/rewards."""

    completion_id: Name = Field(min_length=1)


class CompleteBody(shapes.Shape):
    """POST /v1/sessions/{id}/complete."""

    reward: Value | None = None


class FailBody(shapes.Shape):
    """POST /v1/sessions/{id}/fail."""

    reason: Literal["infra", "data"]
    message: str = Field("", max_length=2000)


async def open_session(request: Request) -> Response:
    """Open a session of the agent's own, or a session with a task of the run."""
    await requests.require_token(request)
    body = await requests.read(request, OpenBody)
    gateway = requests.gateway_of(request)
    gateway.admit()
    if body.claim:
        claim = gateway.agents.claim(body.wait_s, body.timeout_s, body.override_sampling)
        claimed = await streaming.unless_gone(request, claim)
        return Response(status_code=204) if claimed is None else _opened(*claimed)
    about = body.assignment(gateway.config.run.id, gateway.config.sessions)
    return _opened(await gateway.agents.open(about))


async def show(request: Request) -> Response:
    """The state of a session, open or ended."""
    return _shown(await _find_session(request))


async def export(request: Request) -> Response:
    """The message tree, or the training samples; also of a recently ended session."""
    form = request.query_params.get("form", "tree")
    forms = {"tree": registry.tree_json, "samples": registry.samples_json}
    if form not in forms:
        raise FieldError("form", "is unknown", seen=form, allowed="tree, samples")
    found = await _find_session(request)
    session = found if isinstance(found, Session) else found.session
    if session is None:
        message = "the turns of this session are kept no longer"
        seen = f"{found.session_id} ended ({found.state})"
        allowed = "an export sooner after the end, or more gateway.sessions.ended_tokens"
        raise FailedPrecondition(message, seen=seen, allowed=allowed, reason="SESSION_ENDED")
    return JSONResponse(forms[form](session))


async def reward(request: Request) -> Response:
    """Reward a session or one of its turns."""
    session = await _find_session(request)
    if isinstance(session, registry.Ended):
        raise session.error()
    session.score((await requests.read(request, RewardBody)).grant())
    return _shown(session)


async def complete(request: Request) -> Response:
    """Complete a session; a repeated call returns its final state."""
    found = await _find_session(request, "final", "unscored")
    if isinstance(found, Session):
        body = await requests.read(request, CompleteBody)
        if body.reward is not None:
            found.score(Grant(body.reward))
        await requests.gateway_of(request).agents.complete(found)
    return _shown(found)


async def abort(request: Request) -> Response:
    """Abort a session."""
    found = await _find_session(request)
    if isinstance(found, Session):
        requests.gateway_of(request).agents.finish(found, abort=True)
    return _shown(found)


async def fail(request: Request) -> Response:
    """End a session that could not be completed; a repeated call returns its final state."""
    found = await _find_session(request, "failed")
    if isinstance(found, Session):
        body = await requests.read(request, FailBody)
        reason = sessions.FailReason(body.reason)
        requests.gateway_of(request).agents.finish(found, fail=reason, message=body.message)
    return _shown(found)


async def completion_reward(request: Request) -> Response:
    """Reward a completion by its id, for clients that opened no session. Raises NotFound if the
    caller's session lacks it.
    """
    caller = await requests.caller_of(request)
    grant = (await requests.read(request, CompletionRewardBody)).grant()
    session = requests.gateway_of(request).agents.sessions.by_completion(grant.completion_id)
    if caller.session is not None and caller.session is not session:
        raise NotFound("the session has no such completion", seen=grant.completion_id)
    session.score(grant)
    return _shown(session)


async def _find_session(request: Request, *states: str) -> Session | registry.Ended:
    """The session in the path, open or ended, if the key may use it. Raises InvalidInput, NotFound,
    and FailedPrecondition if it has ended in another state than `states`; none: any state.
    """
    known = requests.gateway_of(request).agents.sessions
    named = str(request.path_params["id"])
    owner = known.owner(api_key(request))
    if owner is None:
        await requests.caller_of(request)
        if named == CURRENT:
            message = "current is the session of a session's key"
            raise InvalidInput(message, seen="another key", allowed="an id")
    elif named not in (CURRENT, owner):
        message = "the key is that of another session"
        raise InvalidInput(message, reason="NOT_ALLOWED", allowed=owner)
    found = known.find(owner or named)
    if states and isinstance(found, registry.Ended) and found.state not in states:
        raise found.error()
    return found


def _shown(found: Session | registry.Ended) -> JSONResponse:
    shown = found.json() if isinstance(found, registry.Ended) else registry.session_json(found)
    return JSONResponse(shown)


def _opened(session: Session, task: environments.EpisodeTask | None = None) -> JSONResponse:
    body = {**registry.session_json(session), "api_key": session.api_key}
    if task is not None:
        body["task"] = {"id": task.task_id, "prompt": task.prompt, "metadata": dict(task.metadata)}
    return JSONResponse(body, status_code=201)
