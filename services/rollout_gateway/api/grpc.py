"""RolloutService over gRPC. Owns the translation of calls; the gateway and its runs do the work."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from paceline.errors import InvalidInput
from paceline.messages import trajectory_to_proto, versions_to_proto
from paceline.rpc import EpochGuard
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.v1.rollout_pb2_grpc import RolloutServiceServicer
from rollout_gateway.api.http.bodies import parse
from rollout_gateway.api.http.openai.schema import ChatBody
from rollout_gateway.calls.call import Plan
from rollout_gateway.chat.messages import ChatRequest
from rollout_gateway.gateway import Gateway
from rollout_gateway.runs.tasks import TaskRuns
from rollout_gateway.sessions.assignment import Assignment, FailReason, SessionState
from rollout_gateway.sessions.session import Caller, Grant, Session
from rollout_gateway.sessions.view import tree_json

STATES = {
    SessionState.OPEN: rpb.SESSION_STATE_OPEN,
    SessionState.FINAL: rpb.SESSION_STATE_FINAL,
    SessionState.UNSCORED: rpb.SESSION_STATE_UNSCORED,
    SessionState.ABORTED: rpb.SESSION_STATE_ABORTED,
    SessionState.FAILED: rpb.SESSION_STATE_FAILED,
}
FAILURES = {rpb.FAIL_REASON_INFRA: FailReason.INFRA, rpb.FAIL_REASON_DATA: FailReason.DATA}
MAX_WAIT_S = 60.0
MAX_NAME = 200


class RolloutServicer(RolloutServiceServicer):
    """The methods of rollout.proto."""

    def __init__(self, gateway: Gateway, guard: EpochGuard) -> None:
        self._gateway = gateway
        self._guard = guard
        self._runs = TaskRuns(gateway)

    async def Generate(
        self, request: rpb.GenerateRequest, context: Any
    ) -> AsyncIterator[rpb.GenerateResponse]:
        gateway = self._gateway
        gateway.admit()
        plan = replace(self._plan(request), forced_arm=request.forced_arm)
        call = gateway.call(plan)
        async with aclosing(call.pieces(stream=True)) as pieces:
            async for piece in pieces:
                news = rpb.GenerateResponse(
                    chunk=piece.chunk,
                    text=piece.text,
                    versions=versions_to_proto(gateway.weights.versions),
                )
                if piece.finish:
                    news.prompt_tokens = len(plan.prompt)
                    news.completion_id = plan.completion_id
                    if (message := call.message) is not None:
                        news.message_json = json.dumps(message.shown(), ensure_ascii=False)
                yield news

    async def OpenSession(
        self, request: rpb.OpenSessionRequest, context: Any
    ) -> rpb.OpenSessionResponse:
        gateway = self._gateway
        if request.context.run_id:
            self._guard.check(request.context)
        _check_opening(request)
        if request.claim:
            return await self._claim(request)
        assignment = Assignment(
            run_id=request.context.run_id or gateway.config.run.id,
            step=request.context.step,
            task_id=request.task_id,
            group_id=request.group_id,
            group_size=request.group_size or 1,
            sample_index=request.sample_index,
            trainable=request.trainable,
            turn_discount=request.turn_discount if request.HasField("turn_discount") else None,
            timeout_s=request.timeout_s,
            open_group=not request.context.run_id,
        )
        gateway.admit()
        return self._opened(await gateway.agents.open(assignment))

    async def _claim(self, request: rpb.OpenSessionRequest) -> rpb.OpenSessionResponse:
        self._gateway.admit()
        claimed = await self._gateway.agents.claim(request.wait_s, request.timeout_s)
        if claimed is None:
            return rpb.OpenSessionResponse()
        session, task = claimed
        opened = self._opened(session)
        opened.task.CopyFrom(
            rpb.TaskSpec(task_id=task.task_id, prompt=task.prompt, metadata=dict(task.metadata))
        )
        return opened

    @staticmethod
    def _opened(session: Session) -> rpb.OpenSessionResponse:
        group = session.assignment.group_id or session.session_id
        return rpb.OpenSessionResponse(
            session_id=session.session_id, api_key=session.api_key, group_id=group
        )

    async def PostReward(
        self, request: rpb.PostRewardRequest, context: Any
    ) -> rpb.PostRewardResponse:
        if not request.HasField("reward"):
            raise InvalidInput("the call carries no reward", allowed="reward.value")
        sessions = self._gateway.agents.sessions
        session = (
            sessions.get(request.session_id)
            if request.session_id
            else sessions.by_completion(request.completion_id)
        )
        session.score(
            Grant(
                request.reward.value,
                request.completion_id,
                request.accumulate,
                request.idempotency_key,
            )
        )
        return rpb.PostRewardResponse(state=STATES[session.state])

    async def CloseSession(
        self, request: rpb.CloseSessionRequest, context: Any
    ) -> rpb.CloseSessionResponse:
        ended = self._gateway.agents.sessions.ended(request.session_id)
        if ended is not None:
            return rpb.CloseSessionResponse(state=STATES[ended.state])
        session = self._gateway.agents.sessions.get(request.session_id)
        if request.fail_reason not in FAILURES and request.fail_reason:
            raise InvalidInput(
                "no such reason of a failure", seen=request.fail_reason, allowed="infra, data"
            )
        if request.fail_reason:
            self._gateway.agents.finish(
                session, fail=FAILURES[request.fail_reason], message=request.message
            )
        elif request.abort:
            self._gateway.agents.finish(session, abort=True)
        else:
            await self._gateway.agents.complete(session)
        return rpb.CloseSessionResponse(state=STATES[session.state])

    async def GetSession(
        self, request: rpb.GetSessionRequest, context: Any
    ) -> rpb.GetSessionResponse:
        ended = self._gateway.agents.sessions.ended(request.session_id)
        if ended is not None:
            return rpb.GetSessionResponse(state=STATES[ended.state])
        session = self._gateway.agents.sessions.get(request.session_id)
        return rpb.GetSessionResponse(
            state=STATES[session.state],
            branches=[trajectory_to_proto(one) for one in session.trajectories()],
            tree_json=json.dumps(tree_json(session), ensure_ascii=False),
        )

    async def RunTasks(
        self, request: rpb.RunTasksRequest, context: Any
    ) -> AsyncIterator[rpb.RunTasksResponse]:
        self._guard.check(request.context)
        news = self._runs.run(request)
        async with aclosing(news):
            async for response in news:
                yield response

    async def SetArm(self, request: rpb.SetArmRequest, context: Any) -> rpb.SetArmResponse:
        if request.context.run_id:
            self._guard.check(request.context)
        await self._gateway.set_arm(request.arm)
        return rpb.SetArmResponse()

    async def GetStatus(self, request: rpb.GetStatusRequest, context: Any) -> rpb.GetStatusResponse:
        gateway = self._gateway
        pids = {process.index: process.pid for process in gateway.router.processes()}
        healths = await gateway.router.healths()
        workers = [
            rpb.WorkerStatus(
                worker_index=index,
                pid=pids.get(index, 0),
                ready=index in healths,
                health=healths.get(index),
            )
            for index in range(gateway.router.count)
        ]
        return rpb.GetStatusResponse(
            workers=workers,
            versions=versions_to_proto(gateway.weights.versions),
            open_sessions=len(gateway.agents.sessions),
            unsent_bytes=gateway.outbox.unsent_bytes,
            feature_batches=gateway.publisher.batches,
            feature_rows_dropped=gateway.publisher.rows_dropped + sum(gateway.router.rows_dropped),
            model=gateway.model,
        )

    def _plan(self, request: rpb.GenerateRequest) -> Plan:
        planner = self._gateway.planner
        caller = Caller(
            self._gateway.agents.sessions.get(request.session_id) if request.session_id else None
        )
        name = f"gen-{uuid.uuid4().hex}"

        def sampling(index: int, room: int) -> tpb.SamplingParams:
            return request.sampling

        match request.WhichOneof("prompt"):
            case "text":
                return planner.completions(
                    caller, [request.text], sampling, count=1, completion_id=name
                )[0]
            case "token_ids":
                ids = tuple(request.token_ids.ids)
                return planner.completions(caller, [ids], sampling, count=1, completion_id=name)[0]
            case "conversation":
                chat = conversation(request.conversation)
                return planner.chat(caller, chat, sampling, count=1, completion_id=name)[0]
            case _:
                raise InvalidInput(
                    "the request has no prompt", allowed="text, token_ids or conversation"
                )


def _check_opening(request: rpb.OpenSessionRequest) -> None:
    """Raises InvalidInput naming the field; comparisons are false for NaN."""
    ranges = {
        "timeout_s": (request.timeout_s, sys.float_info.max),
        "wait_s": (request.wait_s, MAX_WAIT_S),
    }
    for field, (value, most) in (ranges | {"turn_discount": (request.turn_discount, 1.0)}).items():
        if not 0 <= value <= most:
            raise InvalidInput(f"{field} is out of range", seen=value, allowed=f"0 to {most:g}")
    for field, name in (("task_id", request.task_id), ("group_id", request.group_id)):
        if len(name) > MAX_NAME:
            raise InvalidInput(
                f"{field} is too long", seen=len(name), allowed=f"{MAX_NAME} characters"
            )


def conversation(given: rpb.Conversation) -> ChatRequest:
    """A conversation in the JSON of chat completions.

    Raises InvalidInput naming the wrong field.
    """
    choice: dict[str, Any] | str = given.tool_choice or "auto"
    if choice not in ("auto", "none", "required"):
        choice = {"type": "function", "function": {"name": choice}}
    parts = {"messages": given.messages_json or "[]", "tools": given.tools_json or "null"}
    listed = [f'"{name}":{text}' for name, text in parts.items()]
    raw = "{" + ",".join([*listed, f'"tool_choice":{json.dumps(choice)}']) + "}"
    return parse(ChatBody, raw.encode()).request()
