"""RolloutService over gRPC: translates calls for the gateway and its runs."""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

from paceline.errors import InvalidInput
from paceline.messages import to_message, versions_to_proto
from paceline.rpc import EpochGuard, Track
from paceline.services.rollout_gateway.api.http import openai_schema, requests
from paceline.services.rollout_gateway.api.http.sessions import OpenBody
from paceline.services.rollout_gateway.calls.call import Plan
from paceline.services.rollout_gateway.calls.planner import Asked
from paceline.services.rollout_gateway.chat.messages import ChatRequest
from paceline.services.rollout_gateway.environments import EpisodeTask
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.services.rollout_gateway.runs.tasks import TaskRuns
from paceline.services.rollout_gateway.sessions import FailReason
from paceline.services.rollout_gateway.sessions.registry import Ended, tree_json
from paceline.services.rollout_gateway.sessions.session import Caller, Grant, Session
from paceline.services.rollout_gateway.workers.lending import DRAIN_S, OUTLASTS_S
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.v1.rollout_pb2_grpc import RolloutServiceServicer

TRUNCATED, SPECIAL = "truncate_prompt_tokens", "add_special_tokens"
FAILURES = {rpb.FAIL_REASON_INFRA: FailReason.INFRA, rpb.FAIL_REASON_DATA: FailReason.DATA}


class RolloutServicer(RolloutServiceServicer):
    """The methods of rollout.proto."""

    def __init__(self, gateway: Gateway, guard: EpochGuard) -> None:
        self._gateway = gateway
        self._guard = guard
        self.runs = TaskRuns(gateway)
        self._run_calls = 0

    async def Generate(
        self, request: rpb.GenerateRequest, context: Any
    ) -> AsyncIterator[rpb.GenerateResponse]:
        gateway = self._gateway
        gateway.admit()
        plan = await self._plan(request)
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
                    news.overridden.extend(plan.overridden)
                    if request.return_prompt_token_ids:
                        news.prompt_token_ids.extend(plan.prompt)
                    if (message := call.message) is not None:
                        news.message_json = json.dumps(message.shown(), ensure_ascii=False)
                yield news

    async def OpenSession(
        self, request: rpb.OpenSessionRequest, context: Any
    ) -> rpb.OpenSessionResponse:
        gateway, run_id = self._gateway, request.context.run_id
        if run_id:
            self._guard.check(request.context, Track.ROLLOUTS)
        fields = {
            field.name: value for field, value in request.ListFields() if field.name != "context"
        }
        body = requests.parse(OpenBody, {"trainable": request.trainable, **fields})
        gateway.admit()
        if body.claim:
            claimed = await gateway.agents.claim(
                body.wait_s, body.timeout_s, body.override_sampling
            )
            return rpb.OpenSessionResponse() if claimed is None else _opened(*claimed)
        step = request.context.step
        about = body.assignment(
            run_id or gateway.config.run.id, gateway.config.sessions, step, open_group=not run_id
        )
        return _opened(await gateway.agents.open(about))

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
        return rpb.PostRewardResponse(state=_state(session))

    async def CloseSession(
        self, request: rpb.CloseSessionRequest, context: Any
    ) -> rpb.CloseSessionResponse:
        agents, reason = self._gateway.agents, request.fail_reason
        found = agents.sessions.find(request.session_id)
        if isinstance(found, Ended):
            return rpb.CloseSessionResponse(state=_state(found))
        if reason not in FAILURES and reason:
            raise InvalidInput("no such reason of a failure", seen=reason, allowed="infra, data")
        if reason:
            agents.finish(found, fail=FAILURES[reason], message=request.message)
        elif request.abort:
            agents.finish(found, abort=True)
        else:
            await agents.complete(found)
        return rpb.CloseSessionResponse(state=_state(found))

    async def GetSession(
        self, request: rpb.GetSessionRequest, context: Any
    ) -> rpb.GetSessionResponse:
        found = self._gateway.agents.sessions.find(request.session_id)
        if isinstance(found, Ended):
            return rpb.GetSessionResponse(state=_state(found))
        return rpb.GetSessionResponse(
            state=_state(found),
            branches=[to_message(one, tpb.Trajectory) for one in found.trajectories()],
            tree_json=json.dumps(tree_json(found), ensure_ascii=False),
        )

    async def RunTasks(
        self, request: rpb.RunTasksRequest, context: Any
    ) -> AsyncIterator[rpb.RunTasksResponse]:
        self._guard.check(request.context, Track.ROLLOUTS)
        # the call has its turn, so the next call may arrive
        await context.send_initial_metadata(())
        activity, news = self._gateway.activity, self.runs.run(request, context.time_remaining())
        activity.begins(f"runs the tasks of step {request.context.step}")
        self._run_calls += 1  # a new call may begin before the call that it replaces has ended
        try:
            async with aclosing(news):
                async for response in news:
                    activity.moves()
                    yield response
        finally:
            self._run_calls -= 1
            if not self._run_calls:
                activity.begins("")

    async def WatchGroups(
        self, request: rpb.WatchGroupsRequest, context: Any
    ) -> AsyncIterator[rpb.WatchGroupsResponse]:
        async with aclosing(self._gateway.agents.groups.waiting()) as counts:
            async for closed in counts:
                yield rpb.WatchGroupsResponse(closed=closed)

    async def AssignGroups(
        self, request: rpb.AssignGroupsRequest, context: Any
    ) -> rpb.AssignGroupsResponse:
        # steps overlap, so the step has its own order of epochs
        self._guard.check_proof(request.context, Track.ROLLOUTS)
        assigned = await self.runs.open.assign(request.context, request.most, last=request.last)
        return rpb.AssignGroupsResponse(assigned=assigned)

    async def Quarantine(
        self, request: rpb.QuarantineRequest, context: Any
    ) -> rpb.QuarantineResponse:
        self._guard.check(request.context, Track.LEARNER)  # the learner sends it
        return rpb.QuarantineResponse(unmet=await self._gateway.quarantined.add(request.paths))

    async def ReleaseWorkers(
        self, request: rpb.ReleaseWorkersRequest, context: Any
    ) -> rpb.ReleaseWorkersResponse:
        drain_s = request.drain_s if request.HasField("drain_s") else DRAIN_S
        outlasts_s = request.outlasts_s or OUTLASTS_S
        freed = await self._gateway.lending.grant(
            request.context, request.workers, drain_s, outlasts_s
        )
        return rpb.ReleaseWorkersResponse(released_bytes=freed)

    async def ResumeWorkers(
        self, request: rpb.ResumeWorkersRequest, context: Any
    ) -> rpb.ResumeWorkersResponse:
        back = await self._gateway.lending.revoke(request.context)
        versions = versions_to_proto(self._gateway.weights.versions)
        return rpb.ResumeWorkersResponse(workers=back, versions=versions)

    async def WatchTraffic(
        self, request: rpb.WatchTrafficRequest, context: Any
    ) -> AsyncIterator[rpb.WatchTrafficResponse]:
        gateway = self._gateway
        with gateway.lending.listening():
            await context.send_initial_metadata(())  # the caller now counts as listening
            async with aclosing(gateway.router.traffic.reports()) as news:
                async for report in news:
                    report.epoch = gateway.lending.epoch
                    yield report

    async def GetStatus(self, request: rpb.GetStatusRequest, context: Any) -> rpb.GetStatusResponse:
        gateway = self._gateway
        pids = {process.index: process.pid for process in gateway.router.processes()}
        healths = await gateway.router.healths()
        workers = [
            rpb.WorkerStatus(
                worker_index=seat.index,
                pid=pids.get(seat.index, 0),
                ready=seat.index in healths,
                health=healths.get(seat.index),
            )
            for seat in gateway.router.seats
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

    async def _plan(self, request: rpb.GenerateRequest) -> Plan:
        gateway, planner, size = self._gateway, self._gateway.planner, request.ByteSize()
        sessions, longest = gateway.agents.sessions, gateway.router.ready.max_sequence_tokens
        kept = request.truncate_prompt_tokens if request.HasField(TRUNCATED) else None
        asked = Asked(
            Caller(sessions.get(request.session_id) if request.session_id else None),
            lambda room: request.sampling,
            gateway.names.draw("gen-"),
            forced_arm=request.forced_arm,
            size=size,
            special=request.add_special_tokens if request.HasField(SPECIAL) else True,
            kept=kept,
        )
        match request.WhichOneof("prompt"):
            case "text":
                return (await planner.completions(asked, [request.text]))[0]
            case "token_ids":
                return (await planner.completions(asked, [request.token_ids.ids]))[0]
            case "conversation" if request.add_special_tokens:
                raise InvalidInput(
                    f"{SPECIAL}: the chat template writes those of a conversation",
                    seen=True,
                    allowed="false, or none",
                )
            case "conversation":
                given = request.conversation
                read = partial(conversation, given, longest)
                return (await planner.chat(asked, await gateway.aside.run(size, read)))[0]
            case _:
                raise InvalidInput(
                    "the request has no prompt", allowed="text, token_ids or conversation"
                )


def _state(session: Session | Ended) -> str:
    return f"SESSION_STATE_{session.state.name}"


def _opened(session: Session, task: EpisodeTask | None = None) -> rpb.OpenSessionResponse:
    opened = rpb.OpenSessionResponse(
        session_id=session.session_id,
        api_key=session.api_key,
        group_id=session.group_id,
    )
    if task is not None:
        shown = rpb.TaskSpec(task_id=task.task_id, prompt=task.prompt, metadata=task.metadata)
        opened.task.CopyFrom(shown)
    return opened


def conversation(given: rpb.Conversation, longest: int) -> ChatRequest:
    """A conversation in the JSON of chat completions, for a model with `longest` tokens of context.

    Raises InvalidInput with the wrong field.
    """
    choice: dict[str, Any] | str = given.tool_choice or "auto"
    if choice not in ("auto", "none", "required"):
        choice = {"type": "function", "function": {"name": choice}}
    parts = {"messages": given.messages_json or "[]", "tools": given.tools_json or "null"}
    parts["tool_choice"] = json.dumps(choice)
    raw = "{" + ",".join(f'"{name}":{text}' for name, text in parts.items()) + "}"
    requests.Outline(longest).add(encoded := raw.encode())
    return requests.parse(openai_schema.ChatBody, encoded).request()
