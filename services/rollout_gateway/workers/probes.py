"""Sends the gateway's own probe requests, and withholds a worker's other chunks meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from paceline.services.rollout_gateway.workers.generation import Generation
from paceline.services.rollout_gateway.workers.placement import Seat
from paceline.v1 import engine_pb2 as pb

PROMPTS_KEPT, PROMPT_TOKENS_KEPT = 4, 256


class Probes:
    """The gateway's own requests to the workers."""

    def __init__(
        self,
        flush: Callable[[], None],
        deliver: Callable[[Seat, Sequence[pb.TokenChunk]], None],
        abort: Callable[[Generation], None],
    ) -> None:
        """flush: sends queued requests. deliver: delivers a worker's chunks. abort: ends a
        request.
        """
        self._flush, self._deliver, self._abort = flush, deliver, abort
        self.prompts: deque[list[int]] = deque(maxlen=PROMPTS_KEPT)
        """Ends of the newest prompts."""

    def note(self, request: pb.EngineRequest) -> None:
        """Keep the end of a caller's prompt for later probes."""
        self.prompts.append(list(request.prompt_token_ids[-PROMPT_TOKENS_KEPT:]))

    async def answers(
        self, seat: Seat, requests: Sequence[pb.EngineRequest]
    ) -> list[pb.TokenChunk]:
        """Whole answers of the worker in this place, also while it is lent. A lost worker gives
        answers with an error.
        """
        probes = [Generation(request, seat.index) for request in requests]
        for generation in probes:
            seat.add(generation)
        self._flush()
        try:
            for generation in probes:
                async for _ in generation.chunks():
                    pass
        finally:
            for generation in probes:
                self._abort(generation)
        return [generation.whole for generation in probes]

    def withholds(self, seat: Seat, generation: Generation, chunk: pb.TokenChunk) -> bool:
        """Withhold a chunk while its weights are on trial; returns whether it was withheld."""
        if seat.withheld is None or generation.request.probe:
            return False
        seat.withheld.append(chunk)
        return True

    def give_out(self, seat: Seat) -> None:
        """Deliver the withheld chunks."""
        chunks, seat.withheld = seat.withheld or [], None
        self._deliver(seat, chunks)
