"""An engine's refusal reaches the gateway with its kind."""

from __future__ import annotations

import pytest

from examples.scripted_engine.engine import build_scripted
from examples.scripted_engine.script import ScriptedSpec
from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.calls.call import _refuse
from paceline.services.rollout_gateway.engines.nouns import Chunk, Request
from paceline.services.rollout_gateway.engines.sampling import TOO_LONG, Sampling
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.services.rollout_gateway.engines.worker.process import answer
from paceline.v1 import engine_pb2 as pb


def test_an_error_with_a_reason_of_its_own_is_raised_as_what_it_is() -> None:
    engine = build_scripted(ScriptedSpec(max_sequence_tokens=16))
    asked = Request(1, (5,) * 40, Sampling(1, 4))
    with pytest.raises(InvalidInput) as caught:
        engine.enqueue(asked)
    assert caught.value.reason == TOO_LONG != InvalidInput.reason
    told: list[Chunk] = []
    enqueue = pb.EnqueueRequests(requests=[wire.request_to(asked)])
    answer(engine, pb.WorkerCommand(enqueue=enqueue), told.extend)
    (chunk,) = told
    with pytest.raises(InvalidInput, match="prompt does not fit; seen: 40 tokens"):
        _refuse(wire.chunk_to(chunk))
