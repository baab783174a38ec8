"""Asks one worker what counts nowhere, and withholds what it says to others meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from paceline.services.rollout_gateway.workers.generation import Generation
from paceline.services.rollout_gateway.workers.placement import Seat
from paceline.v1 import engine_pb2 as pb

PROMPTS_KEPT, PROMPT_TOKENS_KEPT = 4, 256


class Probes:
    """Requests of the gateway itself, over the places of its workers."""

    def __init__(
        self,
        flush: Callable[[], None],
        deliver: Callable[[Seat, Sequence[pb.TokenChunk]], None],
        abort: Callable[[Generation], None],
    ) -> None:
        """flush: sends what is queued; deliver: gives a worker's news out; abort: ends one."""
        self._flush, self._deliver, self._abort = flush, deliver, abort
        self.prompts: deque[list[int]] = deque(maxlen=PROMPTS_KEPT)
        """Ends of the newest prompts."""

    def note(self, request: pb.EngineRequest) -> None:
        """A request of somebody else is on its way."""
        self.prompts.append(list(request.prompt_token_ids[-PROMPT_TOKENS_KEPT:]))

    async def answers(
        self, seat: Seat, requests: Sequence[pb.EngineRequest]
    ) -> list[pb.TokenChunk]:
        """Whole answers of the worker in this place, also while it is lent; one that is lost
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
        """Whether news wait for a verdict over the weights that they come from."""
        if seat.withheld is None or generation.request.probe:
            return False
        seat.withheld.append(chunk)
        return True

    def give_out(self, seat: Seat) -> None:
        """What was withheld goes to whoever waits for it."""
        chunks, seat.withheld = seat.withheld or [], None
        self._deliver(seat, chunks)
