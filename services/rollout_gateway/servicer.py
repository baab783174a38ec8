"""RolloutService over gRPC. Owns the translation of calls; the gateway and its task runs do the work."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from paceline.errors import InvalidInput
from paceline.rpc import EpochGuard
from paceline.trajectory import Trajectory
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.v1.rollout_pb2_grpc import RolloutServiceServicer
from rollout_gateway.engines import wire
from rollout_gateway.gateway import Gateway
from rollout_gateway.session import Assignment, State
from rollout_gateway.task_runs import TaskRuns

STATES = {
    State.OPEN: rpb.SESSION_STATE_OPEN,
    State.FINAL: rpb.SESSION_STATE_FINAL,
    State.UNSCORED: rpb.SESSION_STATE_UNSCORED,
    State.ABORTED: rpb.SESSION_STATE_ABORTED,
}


class RolloutServicer(RolloutServiceServicer):
    """The methods of rollout.proto."""

    def __init__(self, gateway: Gateway, guard: EpochGuard) -> None:
        self._gateway = gateway
        self._guard = guard
        self._runs = TaskRuns(gateway)

    async def Generate(self, request: rpb.GenerateRequest, context: Any) -> AsyncIterator[rpb.GenerateResponse]:
        gateway = self._gateway
        session = gateway.sessions.get(request.session_id) if request.session_id else None
        prompt = self._prompt(request)
        pieces = gateway.generate(prompt, request.sampling, stream=True, forced_arm=request.forced_arm, session=session)
        async with aclosing(pieces):
            async for piece in pieces:
                last = piece.chunk.finish_reason != tpb.FINISH_REASON_UNSPECIFIED
                yield rpb.GenerateResponse(
                    chunk=piece.chunk,
                    text=piece.text,
                    prompt_tokens=len(prompt) if last else 0,
                    versions=wire.versions_to(gateway.weights.versions),
                )

    async def OpenSession(self, request: rpb.OpenSessionRequest, context: Any) -> rpb.OpenSessionResponse:
        gateway = self._gateway
        if request.context.run_id:
            self._guard.check(request.context)
        gateway.admit()
        assignment = Assignment(
            run_id=request.context.run_id or gateway.config.run.id,
            step=request.context.step,
            task_id=request.task_id,
            group_id=request.group_id,
            group_size=request.group_size or 1,
            sample_index=request.sample_index,
            trainable=request.trainable,
        )
        return rpb.OpenSessionResponse(session_id=gateway.sessions.open(assignment).session_id)

    async def PostReward(self, request: rpb.PostRewardRequest, context: Any) -> rpb.PostRewardResponse:
        if not request.HasField("reward"):
            raise InvalidInput("the call carries no reward", allowed="reward.value")
        session = self._gateway.sessions.get(request.session_id)
        session.score(request.reward.value)
        return rpb.PostRewardResponse(state=STATES[session.state])

    async def CloseSession(self, request: rpb.CloseSessionRequest, context: Any) -> rpb.CloseSessionResponse:
        ended = self._gateway.sessions.ended(request.session_id)
        if ended is None:
            session = self._gateway.sessions.get(request.session_id)
            self._gateway.finish(session, abort=request.abort)
            ended = session.state
        return rpb.CloseSessionResponse(state=STATES[ended])

    async def GetSession(self, request: rpb.GetSessionRequest, context: Any) -> rpb.GetSessionResponse:
        ended = self._gateway.sessions.ended(request.session_id)
        if ended is not None:
            return rpb.GetSessionResponse(state=STATES[ended])
        session = self._gateway.sessions.get(request.session_id)
        branches = [_sample(one) for one in session.trajectories()]
        return rpb.GetSessionResponse(state=STATES[session.state], branches=branches)

    async def RunTasks(self, request: rpb.RunTasksRequest, context: Any) -> AsyncIterator[rpb.RunTasksResponse]:
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
                worker_index=index, pid=pids.get(index, 0), ready=index in healths, health=healths.get(index)
            )
            for index in range(gateway.router.count)
        ]
        return rpb.GetStatusResponse(
            workers=workers,
            versions=wire.versions_to(gateway.weights.versions),
            open_sessions=len(gateway.sessions),
            unsent_bytes=gateway.outbox.unsent_bytes,
            feature_batches=gateway.publisher.batches,
            feature_rows_dropped=gateway.publisher.rows_dropped + sum(gateway.router.rows_dropped),
            model=gateway.model,
        )

    def _prompt(self, request: rpb.GenerateRequest) -> tuple[int, ...]:
        match request.WhichOneof("prompt"):
            case "text":
                return self._gateway.codec.encode(request.text)
            case "token_ids":
                return tuple(request.token_ids.ids)
            case _:
                raise InvalidInput("the request has no prompt", allowed="text or token_ids")


def _sample(found: Trajectory) -> tpb.Trajectory:
    """A branch on the wire."""
    return tpb.Trajectory(
        schema_version=1,
        run_id=found.key.run_id,
        step=found.step,
        session_id=found.key.session_id,
        branch_id=found.key.branch_id,
        task_id=found.task_id,
        group_id=found.group_id,
        group_size=found.group_size,
        task_index=found.task_index,
        sample_index=found.sample_index,
        token_ids=found.token_ids,
        loss_mask=bytes(found.loss_mask),
        behavior_logprobs=found.behavior_logprobs,
        version_spans=[
            tpb.VersionSpan(start=s.start, end=s.end, policy_version=s.policy_version) for s in found.version_spans
        ],
        reward=None if found.reward is None else tpb.Reward(value=found.reward),
        speculation=wire.stats_to(found.speculation),
        seed=found.seed,
        temperature=found.temperature,
        branch_count=found.branch_count,
    )
