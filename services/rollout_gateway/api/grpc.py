"""RolloutService over gRPC: translates calls for the gateway and its runs."""

import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, nullcontext
from typing import Any

from paceline.errors import InvalidInput
from paceline.messages import versions_to_proto
from paceline.rpc import EpochGuard, Track
from paceline.services.rollout_gateway.calls.call import Call
from paceline.services.rollout_gateway.calls.planner import Asked
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.services.rollout_gateway.runs.tasks import TaskRuns
from paceline.services.rollout_gateway.sessions.session import Caller, Session
from paceline.services.rollout_gateway.workers.lending import DRAIN_S, OUTLASTS_S
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1.rollout_pb2_grpc import RolloutServiceServicer


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
        gateway, agents = self._gateway, self._gateway.agents
        gateway.admit()
        session = agents.sessions.get(request.session_id) if request.session_id else None
        group = request.capture_group
        captured = session is None and group and gateway.captures(secrets.randbits(63))
        policy = gateway.weights.versions.policy
        with agents.captured(group, policy) if captured else nullcontext(session) as session:
            async with aclosing(self._generated(request, session)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _generated(
        self, request: rpb.GenerateRequest, session: Session | None
    ) -> AsyncGenerator[rpb.GenerateResponse]:
        gateway = self._gateway
        asked = Asked(
            Caller(session),
            lambda room: request.sampling,
            gateway.names.draw("gen-"),
            forced_arm=request.forced_arm,
            size=request.ByteSize(),
            special=not request.HasField("add_special_tokens") or request.add_special_tokens,
        )
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise InvalidInput("the request has no prompt", allowed="text or token_ids")
        prompt = request.text if kind == "text" else request.token_ids.ids
        [plan] = await gateway.planner.completions(asked, [prompt])
        async with aclosing(Call(gateway, plan).pieces(stream=True)) as pieces:
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
                yield news

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
        lending, workers = self._gateway.lending, request.workers
        freed = await lending.grant(request.context, workers, drain_s, outlasts_s)
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
        healths = await gateway.router.healths()
        workers = [
            rpb.WorkerStatus(
                worker_index=seat.index,
                pid=seat.process.pid if seat.process else 0,
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
