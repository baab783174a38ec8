"""Traces the stages of a generation that the engine timed.

Engines export no spans. Their timings arrive with a request's last chunk.
"""

import time
from collections.abc import Callable

from opentelemetry.trace import Span, set_span_in_context
from opentelemetry.util.types import AttributeValue

from paceline.telemetry import names, past_span
from paceline.v1 import engine_pb2 as pb

REQUESTS_PER_S = 25.0
"""Requests per second with a span for each stage; further requests only get `engine.request`."""


class StageSpans:
    """Makes spans of requests' stages, up to a rate of requests per second."""

    def __init__(
        self, requests_per_s: float = REQUESTS_PER_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = self._left = requests_per_s
        self._clock = clock
        self._at = clock()

    def show(self, request: Span, worker: int, whole: pb.TokenChunk) -> None:
        """Record a child span for each stage of the request."""
        if not request.is_recording() or not whole.stages or not self._may():
            return
        parent = set_span_in_context(request)
        for one in whole.stages:
            labels: dict[str, AttributeValue] = {
                names.WORKER: worker,
                names.TOKENS: one.tokens,
                names.BUSY_S: one.busy_s,
            }
            if one.arm:
                labels |= {
                    names.ARM: one.arm,
                    names.POLICY_VERSION: one.policy_version,
                    names.ROUNDS: one.rounds,
                }
            name = names.engine_stage(one.stage)
            past_span(name, labels, one.start_ns, one.end_ns, parent)

    def _may(self) -> bool:
        now = self._clock()
        self._left = min(self._left + (now - self._at) * self._rate, self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


STAGE_SPANS = StageSpans()
"""The limiter of this process."""
