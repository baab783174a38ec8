"""RolloutService of a head: passes each call to its replica, or to all replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import orjson

from paceline.errors import FailedPrecondition, NotFound, PacelineError, Unavailable
from paceline.messages import versions_to_proto
from paceline.rpc import EpochGuard, Track, responses, rpc_errors
from paceline.rpc.progress import Activity
from paceline.services.rollout_gateway.replicas import merge
from paceline.services.rollout_gateway.replicas.claims import claim_in_turn
from paceline.services.rollout_gateway.replicas.fleet import Replica, ReplicaFleet, each
from paceline.services.rollout_gateway.replicas.routing import SessionRouting
from paceline.services.rollout_gateway.replicas.streams import merged
from paceline.services.rollout_gateway.replicas.task_runs import SplitRuns
from paceline.services.rollout_gateway.replicas.weights import ReplicaWeights
from paceline.v1 import progress_pb2 as ppb
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1.rollout_pb2_grpc import RolloutServiceServicer

STATUS_DEADLINE_S = 10.0
PROGRESS_DEADLINE_S = 1.5


class HeadServicer(RolloutServiceServicer):
    """The methods of rollout.proto over several replicas."""

    def __init__(
        self,
        fleet: ReplicaFleet,
        weights: ReplicaWeights,
        routing: SessionRouting,
        guard: EpochGuard,
    ) -> None:
        self._fleet = fleet
        self._weights = weights
        self._routing = routing
        self._guard = guard
        self._runs = SplitRuns(fleet, weights)
        self._arm: str | None = None  # the last forced arm

    async def Generate(
        self, request: rpb.GenerateRequest, context: Any
    ) -> AsyncIterator[rpb.GenerateResponse]:
        async with aclosing(self._generated(request)) as pieces:
            async for piece in pieces:
                yield piece

    async def OpenSession(
        self, request: rpb.OpenSessionRequest, context: Any
    ) -> rpb.OpenSessionResponse:
        if request.claim:
            return await self._claim(request)
        replica = self._routing.group(request.group_id)
        answer: rpb.OpenSessionResponse = await _asked(replica, "OpenSession", request, context)
        return answer

    async def PostReward(
        self, request: rpb.PostRewardRequest, context: Any
    ) -> rpb.PostRewardResponse:
        if request.session_id:
            answer = await self._of_session("PostReward", request, context)
        else:
            replica = self._routing.completion(request.completion_id)
            answer = await _asked(replica, "PostReward", request, context)
        assert isinstance(answer, rpb.PostRewardResponse)
        return answer

    async def CloseSession(
        self, request: rpb.CloseSessionRequest, context: Any
    ) -> rpb.CloseSessionResponse:
        answer: rpb.CloseSessionResponse = await self._of_session("CloseSession", request, context)
        return answer

    async def GetSession(
        self, request: rpb.GetSessionRequest, context: Any
    ) -> rpb.GetSessionResponse:
        answer: rpb.GetSessionResponse = await self._of_session("GetSession", request, context)
        return answer

    async def RunTasks(
        self, request: rpb.RunTasksRequest, context: Any
    ) -> AsyncIterator[rpb.RunTasksResponse]:
        self._guard.check(request.context, Track.ROLLOUTS)

        async def accepted() -> None:
            await context.send_initial_metadata(())

        async with aclosing(self._runs.run(request, accepted)) as news:
            async for response in news:
                yield response

    async def SetArm(self, request: rpb.SetArmRequest, context: Any) -> rpb.SetArmResponse:
        if request.context.run_id:
            self._guard.check(request.context, Track.ROLLOUTS)
        await self._all("SetArm", request, context)
        self._arm = request.arm
        return rpb.SetArmResponse()

    async def equip(self, replica: Replica) -> None:
        """Commands for a restarted replica, besides weights, before it gets requests."""
        if self._arm is not None:
            request = rpb.SetArmRequest(arm=self._arm)
            method = replica.rollout.SetArm
            await replica.ask(method, request, STATUS_DEADLINE_S, starting=True)

    async def Quarantine(
        self, request: rpb.QuarantineRequest, context: Any
    ) -> rpb.QuarantineResponse:
        self._guard.check(request.context, Track.LEARNER)
        answer: rpb.QuarantineResponse = (await self._all("Quarantine", request, context))[0]
        return answer

    async def ReleaseWorkers(
        self, request: rpb.ReleaseWorkersRequest, context: Any
    ) -> rpb.ReleaseWorkersResponse:
        merge.check_workers(request.workers, [one.place for one in self._fleet.replicas])
        asked = []
        for replica in self._fleet.replicas:
            place, part = replica.place, rpb.ReleaseWorkersRequest()
            part.CopyFrom(request)
            del part.workers[:]
            part.workers.extend(
                worker - place.first_worker for worker in request.workers if place.holds(worker)
            )
            asked.append(_asked(replica, "ReleaseWorkers", part, context))
        answers = await each(asked)
        freed = {
            replica.place.first_worker + worker: nbytes
            for replica, answer in zip(self._fleet.replicas, answers, strict=True)
            for worker, nbytes in answer.released_bytes.items()
        }
        return rpb.ReleaseWorkersResponse(released_bytes=freed)

    async def ResumeWorkers(
        self, request: rpb.ResumeWorkersRequest, context: Any
    ) -> rpb.ResumeWorkersResponse:
        answers = await self._all("ResumeWorkers", request, context)
        back = [
            replica.place.first_worker + worker
            for replica, answer in zip(self._fleet.replicas, answers, strict=True)
            for worker in answer.workers
        ]
        versions = versions_to_proto(self._weights.versions)
        return rpb.ResumeWorkersResponse(workers=back, versions=versions)

    async def WatchTraffic(
        self, request: rpb.WatchTrafficRequest, context: Any
    ) -> AsyncIterator[rpb.WatchTrafficResponse]:
        for replica in self._fleet.replicas:
            replica.require_up()
        replicas = dict(enumerate(self._fleet.replicas))
        calls = {number: one.rollout.WatchTraffic(request) for number, one in replicas.items()}
        with rpc_errors():
            await asyncio.gather(*(call.wait_for_connection() for call in calls.values()))
        await context.send_initial_metadata(())
        async with aclosing(merged(calls, endless=True)) as told:
            async for number, news in told:
                first = replicas[number].place.first_worker
                workers = [first + worker for worker in news.workers]
                yield rpb.WatchTrafficResponse(
                    epoch=news.epoch, requests=news.requests, workers=workers
                )

    async def GetStatus(self, request: rpb.GetStatusRequest, context: Any) -> rpb.GetStatusResponse:
        answers = await self._answers("rollout", "GetStatus", request, STATUS_DEADLINE_S)
        merged = merge.status(answers)
        merged.versions.CopyFrom(versions_to_proto(self._weights.versions))
        return merged

    async def progress(self, weights: Activity) -> ppb.GetProgressResponse:
        """The progress of all replicas, and of this process with `weights`."""
        request = ppb.GetProgressRequest()
        merged = merge.progress(
            await self._answers("progress", "GetProgress", request, PROGRESS_DEADLINE_S)
        )
        weights.show_on(merged.parts[0])
        return merged

    async def _answers(
        self, stub: str, method: str, request: Any, deadline_s: float
    ) -> list[tuple[Any, Any]]:
        """(place, answer) of every replica; None for a replica without an answer."""
        replicas = self._fleet.replicas
        answers = await asyncio.gather(
            *(
                one.ask(getattr(getattr(one, stub), method), request, deadline_s)
                for one in replicas
            ),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, PacelineError):
                raise answer
        return [
            (one.place, None if isinstance(answer, BaseException) else answer)
            for one, answer in zip(replicas, answers, strict=True)
        ]

    async def _all(self, method: str, request: Any, context: Any) -> list[Any]:
        replicas = self._fleet.replicas
        return await each([_asked(replica, method, request, context) for replica in replicas])

    async def _of_session(self, method: str, request: Any, context: Any) -> Any:
        """The answer of the replica that has the session."""
        return await _first_known(
            self._routing.session(request.session_id), method, request, context
        )

    async def _claim(self, request: rpb.OpenSessionRequest) -> rpb.OpenSessionResponse:
        async def at(replica: Replica, wait_s: float) -> rpb.OpenSessionResponse | None:
            part = rpb.OpenSessionRequest()
            part.CopyFrom(request)
            part.wait_s = wait_s
            method = replica.rollout.OpenSession
            answer: rpb.OpenSessionResponse = await replica.ask(method, part, wait_s + 30.0)
            return answer if answer.session_id else None

        def refusal(error: PacelineError) -> bool:
            return isinstance(error, FailedPrecondition)

        claimed = await claim_in_turn(self._routing, request.wait_s, at, refusal)
        return claimed or rpb.OpenSessionResponse()

    async def _generated(
        self, request: rpb.GenerateRequest
    ) -> AsyncGenerator[rpb.GenerateResponse]:
        if request.session_id:
            where = self._routing.session(request.session_id)
        elif request.WhichOneof("prompt") == "conversation":
            where = [self._routing.conversation(_body(request.conversation))]
        else:
            where = [self._routing.next()]
        for replica in where:
            replica.require_up()
            try:
                with rpc_errors():
                    async with aclosing(responses(replica.rollout.Generate(request))) as pieces:
                        async for piece in pieces:
                            yield piece
                return
            except NotFound:
                if replica is where[-1]:
                    raise


def _body(conversation: rpb.Conversation) -> dict[str, Any]:
    """The request as a body of chat completions; the replica refuses text that is not JSON."""
    try:
        return {"messages": orjson.loads(conversation.messages_json or "[]")}
    except ValueError:
        return {}


async def _asked(replica: Replica, method: str, request: Any, context: Any) -> Any:
    return await replica.ask(getattr(replica.rollout, method), request, context.time_remaining())


async def _first_known(where: Sequence[Replica], method: str, request: Any, context: Any) -> Any:
    for replica in where:
        try:
            return await _asked(replica, method, request, context)
        except NotFound:
            if replica is where[-1]:
                raise
    raise Unavailable("no replica may be asked")
