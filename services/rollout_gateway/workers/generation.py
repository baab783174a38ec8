"""Holds one request under way: the router feeds it, the caller reads it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator

from paceline.errors import DataLoss, InternalError, PacelineError
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb
from rollout_gateway import metrics


class Generation:
    """Tokens of one request.

    News wait in one merged chunk, so memory is bounded by the request's max_tokens.
    """

    def __init__(
        self, request: pb.EngineRequest, worker_index: int | None, *, rerun: bool = True
    ) -> None:
        self.request = request
        self.pinned = worker_index  # None: the router may choose
        self.worker_index = worker_index if worker_index is not None else 0
        # when its worker is lost and no other serves: wait for the new one, else end at once
        self.rerun = rerun
        self.queued_s = time.perf_counter()
        self.ended_s = 0.0  # when its last chunk came; 0 before
        self.tries = 0
        self._given = 0  # tokens that earlier tries had given out
        self._replayed = 0  # how many of them the present try has drawn again
        self.whole = pb.TokenChunk(request_id=request.request_id)
        self._news = pb.TokenChunk(request_id=request.request_id)
        self._wake = asyncio.Event()

    @property
    def finished(self) -> bool:
        """True after the last chunk."""
        return self.whole.finish_reason != tpb.FINISH_REASON_UNSPECIFIED

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean seconds of a token after the first, as the gateway saw them; None before the end or
        without any.
        """
        count = len(self.whole.token_ids) - 1
        if not self.finished or count < 1:
            return None
        return max(self.ended_s - self.queued_s - self.whole.time_to_first_token_s, 0.0) / count

    def accept(self, chunk: pb.TokenChunk) -> None:
        """Take news from the worker; after a restart, tokens given out before must come again and
        are left out. Log-probs that are not finite end the request: nothing could be trained on
        it, and no answer be trusted.
        """
        if not all(map(math.isfinite, chunk.behavior_logprobs)):
            metrics.NOT_FINITE.record()
            self.fail("the engine gave a log-prob that is no finite number", DataLoss)
        elif self.tries and not self._leave_out_replayed(chunk):
            self.fail(
                "the worker was lost and its replacement drew other tokens (weights changed "
                "meanwhile)"
            )
        elif not self.finished:
            self._push(chunk)

    def _leave_out_replayed(self, chunk: pb.TokenChunk) -> bool:
        """False when a repeated token differs from what was given out."""
        seen = self.whole.token_ids
        skip = min(len(chunk.token_ids), self._given - self._replayed)
        if skip <= 0:
            return True
        same = list(chunk.token_ids[:skip]) == list(seen[self._replayed : self._replayed + skip])
        self._replayed += skip
        del chunk.token_ids[:skip], chunk.behavior_logprobs[:skip], chunk.top_logprobs[:skip]
        spans = [span for span in chunk.version_spans if span.end > self._replayed]
        del chunk.version_spans[:]
        chunk.version_spans.extend(spans)
        for span in chunk.version_spans:
            span.start = max(span.start, self._replayed)
        return same

    def restart(self) -> None:
        """The worker is gone; the next try begins at the first token."""
        self.tries += 1
        self._given = len(self.whole.token_ids)
        self._replayed = 0

    def fail(self, message: str, kind: type[PacelineError] = InternalError) -> None:
        """End with FINISH_REASON_ERROR, unless it has ended."""
        if not self.finished:
            text = f"{kind.reason}: {message}"
            self._push(
                pb.TokenChunk(
                    request_id=self.request.request_id,
                    finish_reason=tpb.FINISH_REASON_ERROR,
                    error=text,
                )
            )

    async def chunks(self) -> AsyncIterator[pb.TokenChunk]:
        """News as they come, merged while the reader is slow; the last one has finish_reason."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            news, self._news = self._news, pb.TokenChunk(request_id=self.request.request_id)
            yield news
            if news.finish_reason:
                return

    def _push(self, chunk: pb.TokenChunk) -> None:
        self.whole.MergeFrom(chunk)
        self._news.MergeFrom(chunk)
        if self.finished:
            self.ended_s = time.perf_counter()
        self._wake.set()
