"""Traces a generation: the request's settings, and below it the stages that the engine timed.

Engines export no spans. Their timings arrive with a request's last chunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from opentelemetry.trace import Span, set_span_in_context
from opentelemetry.util.types import AttributeValue

from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.telemetry import names, past_span
from paceline.v1 import engine_pb2 as pb

REQUESTS_PER_S = 25.0
"""Requests per second with a span for each stage; further requests only get `engine.request`."""


def asked(
    model: str,
    sampling: Sampling,
    prompt_tokens: int,
    *,
    chat: bool,
    completion_id: str,
    session_id: str,
) -> Mapping[str, AttributeValue]:
    """Attributes of `engine.request` at its start."""
    labels: dict[str, AttributeValue] = {
        names.GEN_AI_OPERATION: names.CHAT if chat else names.TEXT_COMPLETION,
        names.GEN_AI_PROVIDER: names.PROVIDER,
        names.GEN_AI_MODEL: model,
        names.GEN_AI_TEMPERATURE: sampling.temperature,
        names.GEN_AI_TOP_P: sampling.top_p,
        names.GEN_AI_MAX_TOKENS: sampling.max_tokens,
        names.GEN_AI_INPUT_TOKENS: prompt_tokens,
    }
    if completion_id:
        labels[names.GEN_AI_RESPONSE_ID] = completion_id
    if session_id:
        labels[names.GEN_AI_CONVERSATION] = session_id
    return labels


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
