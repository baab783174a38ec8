"""Collects the tokens of one request over all its tries."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable

from paceline.errors import DataLoss, InternalError, PacelineError
from paceline.messages import stats_from_proto, stats_to_proto
from paceline.services.rollout_gateway import metrics
from paceline.trajectory import SpeculationStats
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb


class Generation:
    """Tokens of one request over all its tries; each try continues from the tokens of the earlier
    tries.

    Unread output waits in one merged chunk, so memory is bounded by the request's max_tokens.
    A direct reader gets output while `chunks` waits. That saves a turn of the event loop and a
    task's wake-up per chunk.
    """

    def __init__(
        self, request: pb.EngineRequest, worker_index: int | None, *, rerun: bool = True
    ) -> None:
        self.request = request
        self.pinned = worker_index  # None: the router may choose
        self.worker_index = worker_index if worker_index is not None else 0
        # when the worker is lost and no other worker serves: True waits for a new worker, False
        # ends
        self.rerun = rerun
        self.queued_s = time.perf_counter()
        self.ended_s = 0.0  # time of the last chunk; 0 before it
        self.tries = 0  # number of lost workers
        self._counted = False  # a try has ended
        self.speculation = SpeculationStats()
        """Statistics of the ended tries; complete at the end of the request."""
        self._smallest_gap = math.inf
        self._first_token_s = 0.0
        self.whole = pb.TokenChunk(request_id=request.request_id)
        self.finished = False  # the last chunk has arrived
        self._news = pb.TokenChunk(request_id=request.request_id)
        self._wake = asyncio.Event()
        self._awaited = False  # the reader waits and has no unread output
        self._at_once: Callable[[pb.TokenChunk], bool] | None = None
        self._defect: Exception | None = None  # error of a direct reader, raised in `chunks`

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean seconds per token after the first, measured by the gateway; None before the end or
        with a single token.
        """
        count = len(self.whole.token_ids) - 1
        if not self.finished or count < 1:
            return None
        return max(self.ended_s - self.queued_s - self.whole.time_to_first_token_s, 0.0) / count

    def accept(self, chunk: pb.TokenChunk) -> None:
        """Take a chunk from the worker.

        Log-probs that are not finite end the request with DataLoss: its tokens can be neither
        trained on nor trusted.
        """
        # of 32 bits each, so the sum cannot overflow
        if not math.isfinite(sum(chunk.behavior_logprobs)):
            metrics.NOT_FINITE.record()
            self.fail("the engine gave a log-prob that is no finite number", DataLoss)
        elif not self.finished:
            if chunk.finish_reason:
                tried = self._counted
                self._count(chunk)
                if tried:  # the last try's counters become the whole request's
                    chunk.speculation.CopyFrom(stats_to_proto(self.speculation))
                    chunk.smallest_gap = self._smallest_gap
                    chunk.time_to_first_token_s = self._first_token_s
                prompt = len(self.request.prompt_token_ids)
                chunk.cached_prompt_tokens = min(chunk.cached_prompt_tokens, prompt)
            self._push(chunk)

    def suspend_try(self, chunk: pb.TokenChunk) -> None:
        """Take the last chunk of a try that the engine ended early. The next try continues from its
        tokens, under the weights that then serve.
        """
        self._count(chunk)
        for name in ("finish_reason", "speculation", "smallest_gap", "time_to_first_token_s"):
            chunk.ClearField(name)  # the request's final chunk carries these totals
        self.accept(chunk)
        self._continue()

    def lose_worker(self) -> None:
        """Record the loss of the worker; the next try continues from the tokens received."""
        self.tries += 1
        self._continue()

    def _continue(self) -> None:
        said = self.request.response_token_ids
        said.extend(self.whole.token_ids[len(said) :])

    def _count(self, chunk: pb.TokenChunk) -> None:
        told = stats_from_proto(chunk.speculation)
        self.speculation = self.speculation + told if self._counted else told
        self._counted = True
        self._smallest_gap = min(self._smallest_gap, chunk.smallest_gap)
        self._first_token_s = self._first_token_s or chunk.time_to_first_token_s

    def fail(self, message: str, kind: type[PacelineError] = InternalError) -> None:
        """End with FINISH_REASON_ERROR, unless the request has ended."""
        if not self.finished:
            ended = pb.TokenChunk(request_id=self.request.request_id)
            ended.finish_reason, ended.error = tpb.FINISH_REASON_ERROR, f"{kind.reason}: {message}"
            self._push(ended)

    def set_direct_reader(self, take: Callable[[pb.TokenChunk], bool] | None) -> None:
        """While the reader of `chunks` waits, pass chunks to `take` first, except the last chunk.

        A chunk for which `take` returns False goes to the reader. An exception of `take` is raised
        in `chunks`. None removes the direct reader.
        """
        self._at_once = take

    async def chunks(self) -> AsyncIterator[pb.TokenChunk]:
        """Yield chunks as they arrive, merged while the reader is slow. The last chunk has
        finish_reason.

        Raises the exception of a direct reader.
        """
        while True:
            self._awaited = not self._wake.is_set()
            await self._wake.wait()
            self._wake.clear()
            if self._defect is not None:
                raise self._defect
            news, self._news = self._news, pb.TokenChunk(request_id=self.request.request_id)
            yield news
            if news.finish_reason:
                return

    def _push(self, chunk: pb.TokenChunk) -> None:
        if self.whole.prompt_scores:
            chunk.ClearField("prompt_scores")  # a later try sends these again
        self.whole.MergeFrom(chunk)
        if chunk.finish_reason:
            self.finished, self.ended_s = True, time.perf_counter()
        elif self._awaited and self._at_once is not None:
            try:
                if self._at_once(chunk):
                    return
            except Exception as error:  # noqa: BLE001 - one request must not stop the feed of all
                self._defect = error
        self._awaited = False
        self._news.MergeFrom(chunk)
        self._wake.set()
