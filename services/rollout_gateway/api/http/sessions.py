"""Sessions over HTTP. Owns their bodies and who may act on which; what happens is the gateway's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from paceline.errors import NotFound
from rollout_gateway.api.http import bodies
from rollout_gateway.api.http.keys import caller_of, require_token, session_of
from rollout_gateway.api.http.streaming import unless_gone
from rollout_gateway.environments.base import EpisodeTask
from rollout_gateway.gateway import Gateway
from rollout_gateway.sessions.assignment import Assignment, FailReason
from rollout_gateway.sessions.registry import Ended
from rollout_gateway.sessions.session import Grant, Session
from rollout_gateway.sessions.view import samples_json, session_json, tree_json

MAX_WAIT_S = 60.0
Name = Annotated[str, Field(max_length=200, pattern=r"^[^/\x00-\x1f]*$")]
Value = Annotated[float, Field(allow_inf_nan=False)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class OpenBody(_Body):
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


class RewardBody(_Body):
    """POST /v1/sessions/{id}/reward."""

    value: Value
    completion_id: Name = ""
    accumulate: bool = False
    idempotency_key: Name = ""

    def grant(self) -> Grant:
        """As a session takes it."""
        return Grant(self.value, self.completion_id, self.accumulate, self.idempotency_key)


class CompletionRewardBody(RewardBody):
    """POST /v1/rewards."""

    completion_id: Name = Field(min_length=1)


class CompleteBody(_Body):
    """POST /v1/sessions/{id}/complete."""

    reward: Value | None = None


class FailBody(_Body):
    """POST /v1/sessions/{id}/fail."""

    reason: Literal["infra", "data"]
    message: str = Field("", max_length=2000)


class SessionsApi:
    """The routes of sessions."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Route]:
        """Path by path."""
        one = "/v1/sessions/{id}"
        return [
            Route("/v1/sessions", self.open, methods=["POST"]),
            Route(one, self.show),
            Route(f"{one}/export", self.export),
            Route(f"{one}/reward", self.reward, methods=["POST"]),
            Route(f"{one}/complete", self.complete, methods=["POST"]),
            Route(f"{one}/abort", self.abort, methods=["POST"]),
            Route(f"{one}/fail", self.fail, methods=["POST"]),
            Route("/v1/rewards", self.completion_reward, methods=["POST"]),
        ]

    async def open(self, request: Request) -> Response:
        """A session of the agent's own, or one with a task of the run."""
        await require_token(self._gateway, request)
        body = await bodies.read(request, OpenBody)
        gateway = self._gateway
        if body.claim:
            gateway.admit()
            claimed = await unless_gone(request, gateway.agents.claim(body.wait_s, body.timeout_s))
            return Response(status_code=204) if claimed is None else _opened(claimed[0], claimed[1])
        about = Assignment(
            run_id=gateway.config.run.id,
            task_id=body.task_id,
            group_id=body.group_id,
            group_size=body.group_size,
            sample_index=body.sample_index,
            trainable=body.trainable,
            turn_discount=body.turn_discount,
            timeout_s=body.timeout_s,
            open_group=True,
        )
        gateway.admit()
        return _opened(await gateway.agents.open(about), None)

    async def show(self, request: Request) -> Response:
        found = await session_of(self._gateway, request)
        return JSONResponse(ended_json(found) if isinstance(found, Ended) else session_json(found))

    async def export(self, request: Request) -> Response:
        form = request.query_params.get("form", "tree")
        if form not in ("tree", "samples"):
            raise bodies.FieldError("form", "is unknown", seen=form, allowed="tree, samples")
        session = await self._session(request)
        return JSONResponse(tree_json(session) if form == "tree" else samples_json(session))

    async def reward(self, request: Request) -> Response:
        session = await self._session(request)
        session.score((await bodies.read(request, RewardBody)).grant())
        return JSONResponse(session_json(session))

    async def complete(self, request: Request) -> Response:
        found = await session_of(self._gateway, request)
        if isinstance(found, Ended):  # a repeated call learns how it ended
            if found.state not in ("final", "unscored"):
                raise found.error()
            return JSONResponse(ended_json(found))
        body = await bodies.read(request, CompleteBody)
        if body.reward is not None:
            found.score(Grant(body.reward))
        await self._gateway.agents.complete(found)
        return JSONResponse(session_json(found))

    async def abort(self, request: Request) -> Response:
        found = await session_of(self._gateway, request)
        if isinstance(found, Ended):
            return JSONResponse(ended_json(found))
        self._gateway.agents.finish(found, abort=True)
        return JSONResponse(session_json(found))

    async def fail(self, request: Request) -> Response:
        session = await self._session(request)
        body = await bodies.read(request, FailBody)
        self._gateway.agents.finish(session, fail=FailReason(body.reason), message=body.message)
        return JSONResponse(session_json(session))

    async def completion_reward(self, request: Request) -> Response:
        """By completion alone, for clients that opened no session."""
        caller = await caller_of(self._gateway, request)
        grant = (await bodies.read(request, CompletionRewardBody)).grant()
        session = self._gateway.agents.sessions.by_completion(grant.completion_id)
        if caller.session is not None and caller.session is not session:
            raise NotFound("the session has no such completion", seen=grant.completion_id)
        session.score(grant)
        return JSONResponse(session_json(session))

    async def _session(self, request: Request) -> Session:
        found = await session_of(self._gateway, request)
        if isinstance(found, Ended):
            raise found.error()
        return found


def ended_json(ended: Ended) -> dict[str, Any]:
    """What is known of a session that has ended."""
    return {
        "id": ended.session_id,
        "object": "session",
        "state": str(ended.state),
        "fail_reason": None if ended.reason is None else str(ended.reason),
        **ended.shown,
    }


def _opened(session: Session, task: EpisodeTask | None) -> JSONResponse:
    body = session_json(session)
    body["api_key"] = session.api_key
    if task is not None:
        body["task"] = {"id": task.task_id, "prompt": task.prompt, "metadata": dict(task.metadata)}
    return JSONResponse(body, status_code=201)
