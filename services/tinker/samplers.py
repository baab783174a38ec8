"""Samples from saved weights through the gateway, which serves one set of weights at a time.

Requests for other weights than the serving ones wait until the running requests have ended. Then
the trainer pushes their weights, and this front commits them in the place of the coordinator.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import numpy as np

from paceline import errors
from paceline.local.patience import cancel
from paceline.messages import versions_from_proto
from paceline.rpc import responses, rpc_errors
from paceline.rpc.progress import while_moving
from paceline.services.tinker.bodies import SampleBody
from paceline.services.tinker.drafter import DrafterLeases
from paceline.services.tinker.futures import BINARY, Result
from paceline.services.tinker.trainer import Trainer
from paceline.telemetry import get_logger
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2, policy_pb2, rollout_pb2, tinker_pb2, trajectory_pb2
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub
from paceline.v1.weights_pb2 import GetVersionsRequest
from paceline.v1.weights_pb2_grpc import WeightServiceStub
from paceline.weights import REFUSALS, commit_versions

_ASK_S = 30.0
_ANSWER_S = 3600.0
_STILL_S = 300.0
"""Seconds without progress of the gateway after which a commit fails."""
_LONGEST = 1 << 30
"""Tokens of a sample without a maximum: the context ends it."""
_ENDS = (trajectory_pb2.FINISH_REASON_STOP, trajectory_pb2.FINISH_REASON_LENGTH)
_log = get_logger(__name__)


class Samplers:
    """Samples and the serving weights. Use on one event loop."""

    def __init__(
        self,
        trainer: Trainer,
        gateway: grpc.aio.Channel,
        context: trajectory_pb2.CommandContext,
        parallel: int,
        leases: DrafterLeases,
    ) -> None:
        self._trainer, self._gateway, self._context = trainer, gateway, context
        self._leases = leases
        self._rollouts: Any = RolloutServiceStub(gateway)  # type: ignore[no-untyped-call]
        self._weights: Any = WeightServiceStub(gateway)  # type: ignore[no-untyped-call]
        self._room = asyncio.Semaphore(parallel)
        self._path: str | None = None  # of the serving weights; None: unknown
        self._running = set[asyncio.Future[None]]()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}  # by path, longest wait first
        self._switching: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Notes the serving weights. Raises the gateway's errors."""
        await self._leases.end()
        if not (await self._served()).policy:
            self._path = ""

    async def sample(self, path: str, body: SampleBody, name: str) -> Result:
        """Draws the samples of the request of that name. Raises the gateway's errors."""
        async with self._serving(path):
            numbers = range(body.num_samples)
            drawing = [
                asyncio.create_task(self._generate(body, name, number)) for number in numbers
            ]
            try:
                found = await asyncio.gather(*drawing)
            finally:  # no sample runs on while other weights are served
                await cancel(*drawing)
        sequences, scores = zip(*found, strict=True)
        answer = tinker_pb2.TinkerSample(sequences=sequences, prompt_logprobs=scores[0])
        return Result(answer.SerializeToString(), BINARY)

    async def _generate(
        self, body: SampleBody, name: str, number: int
    ) -> tuple[tinker_pb2.TinkerSampledSequence, bytes | None]:
        scored = bool(body.prompt_logprobs) and number == 0
        prompt = [token for chunk in body.prompt.chunks for token in chunk.tokens]
        request = rollout_pb2.GenerateRequest(
            token_ids=rollout_pb2.TokenIds(ids=prompt),
            sampling=_sampling(body, number, scored),
            capture_group="" if scored or not self._leases.enabled else name,
        )
        tokens, logprobs = list[int](), list[float]()
        scores, chunk = np.full(len(prompt), np.nan, np.float32), engine_pb2.TokenChunk()
        async with self._room:
            with rpc_errors():
                call = self._rollouts.Generate(request, timeout=_ANSWER_S)
                async with aclosing(responses(call)) as pieces:
                    async for piece in pieces:
                        chunk = piece.chunk
                        tokens.extend(chunk.token_ids)
                        logprobs.extend(chunk.behavior_logprobs)
                        if chunk.prompt_scores:
                            scores[1:] = [one.logprob for one in chunk.prompt_scores]
        if chunk.finish_reason == trajectory_pb2.FINISH_REASON_ERROR:
            raise errors.InternalError(f"the engine failed: {chunk.error}")
        if chunk.finish_reason not in _ENDS:
            raise errors.Unavailable("the engine aborted the sample")
        if body.prompt_logprobs_last_n:
            scores[: len(prompt) - body.prompt_logprobs_last_n] = np.nan
        sequence = tinker_pb2.TinkerSampledSequence(
            stop_reason=int(chunk.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH),
            tokens=np.asarray(tokens, "<i4").tobytes(),
            logprobs=np.asarray(logprobs, "<f4").tobytes(),
        )
        return sequence, scores.astype("<f4").tobytes() if scored else None

    # --- the serving weights ----------------------------------------------------------------------

    @asynccontextmanager
    async def _serving(self, path: str) -> AsyncIterator[None]:
        """A block in which the gateway serves these weights."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(path, []).append(turn)
        self._advance()
        try:
            await turn
            yield
        finally:
            self._running.discard(turn)
            self._advance()

    def _advance(self) -> None:
        """Admits the requests for the serving weights if no other request waits longer; otherwise
        changes the weights once nothing runs. Without requests the drafter trains.
        """
        if self._switching is not None:
            return
        if not self._waiting:
            if not self._running:
                self._leases.begin()
            return
        path = next(iter(self._waiting))
        if path == self._path and not self._leases.held:
            for turn in self._waiting.pop(path):
                if not turn.done():
                    self._running.add(turn)
                    turn.set_result(None)
        elif not self._running:
            self._switching = asyncio.create_task(self._switch(path))

    async def _switch(self, path: str) -> None:
        try:
            await self._serve(path)
        except Exception as error:  # noqa: BLE001  its requests must not wait for ever
            self._path = None
            _log.error("weights_not_served", path=path, error=str(error))
            for turn in self._waiting.pop(path, []):
                if not turn.done():
                    turn.set_exception(error)
        finally:
            self._switching = None
            self._advance()

    async def _serve(self, path: str) -> None:
        """Pushes other weights as the next policy version, takes the slots back from the drafter
        trainer, and commits what is new. A set that is refused with a new drafter is committed
        without it.
        """
        serving = await self._served()
        policy = serving.policy
        if path != self._path:
            policy += 1
            order = policy_pb2.PublishSaved(path=path, policy_version=policy)
            await self._trainer.order("", publish=order)
        await self._leases.end()
        drafter = self._leases.promoted or serving.drafter
        while (policy, drafter) != (serving.policy, serving.drafter):
            following = VersionSet(serving.seq + 1, policy, drafter, serving.profile)
            gateway, context = self._gateway, self._context
            try:
                async with while_moving(gateway, _STILL_S) as timeout:
                    await commit_versions(gateway, context, following, deadline_s=timeout)
                break
            except REFUSALS as error:
                if drafter == serving.drafter:
                    raise
                _log.warning("drafter_refused", drafter_version=drafter, error=str(error))
                drafter = serving.drafter
        self._leases.promoted = 0
        self._path = path

    async def _served(self) -> VersionSet:
        with rpc_errors():
            answer = await self._weights.GetVersions(GetVersionsRequest(), timeout=_ASK_S)
        return versions_from_proto(answer.versions)


def _sampling(body: SampleBody, number: int, scored: bool) -> trajectory_pb2.SamplingParams:
    """The engine's sampling of sample `number`."""
    given = body.sampling_params
    stop = [given.stop] if isinstance(given.stop, str) else given.stop
    return trajectory_pb2.SamplingParams(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=max(given.top_k, 0),
        max_tokens=given.max_tokens if given.max_tokens is not None else _LONGEST,
        stop=[one for one in stop or () if isinstance(one, str)],
        stop_token_ids=[one for one in stop or () if isinstance(one, int)],
        ignore_eos=stop is not None and not stop,
        seed=None if given.seed is None else (given.seed + number) % (1 << 63),
        prompt_logprobs=0 if scored else None,
    )
