"""One table of ranges: an HTTP body, the gateway and every engine accept and reject the same
values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from examples.scripted_engine.engine import build_scripted
from examples.scripted_engine.script import ScriptedSpec
from paceline.errors import InvalidInput, MissingCapability
from paceline.models.config import read_config
from paceline.services.rollout_gateway.api.http.openai_schema import ChatBody
from paceline.services.rollout_gateway.calls.planner import check_request
from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.requests.control import Admission
from paceline.services.rollout_gateway.engines.sampling import RANGES, Sampling, untrainable
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

DEMO = Path(__file__).parents[4] / "examples" / "demo" / "policy_start"
READY = pb.WorkerReady(vocab_size=320, max_sequence_tokens=64, capabilities=["penalties"])
# Documented bounds of the wire and of the APIs; not read from the table.
PROMISED = {
    "max_tokens": ([1, 2**31 - 1], [0, 2**31]),
    "temperature": (
        [0.0, 1e-20, 1e-8, 10.0],
        [-0.5, 1e-30, 1e-38, 1e-45, 10.5, math.nan, math.inf],
    ),
    "top_p": ([0.25, 1.0], [-0.5, 1.5, math.nan]),
    "top_k": ([0, 2**31 - 1], [-2]),
    "min_p": ([0.0, 1.0], [-0.5, 1.5, math.nan]),
    "top_logprobs": ([0, 20], [21]),
    "presence_penalty": ([-2.0, 2.0], [-2.5, 2.5, math.nan]),
    "frequency_penalty": ([-2.0, 2.0], [-2.5, 2.5, math.nan]),
    "repetition_penalty": ([0.125, 10.0], [0.05, 10.5, math.nan]),
    "min_tokens": ([0, 1], [-1, 2**31]),
    "prompt_logprobs": ([0, 20], [21]),
}


def test_the_wire_names_the_range_of_temperatures() -> None:
    wire_file = DEMO.parents[2] / "proto" / "paceline" / "v1" / "trajectory.proto"
    assert f"0 is greedy. Range: {RANGES['temperature']}." in wire_file.read_text()


def over_http(name: str, value: float) -> None:
    message = {"role": "user", "content": "x"}
    ChatBody.model_validate({"messages": [message], "logprobs": True, name: value})


def over_grpc(name: str, value: float) -> None:
    values: dict[str, Any] = {"max_tokens": 1, "temperature": 1.0, name: value}
    check_request(READY, [5], wire.sampling_from(tpb.SamplingParams(**values)))


def asked(name: str, value: float) -> Request:
    values: dict[str, Any] = {"seed": 1, "max_tokens": 1, name: value}
    return Request(1, (5,), Sampling(**values))


def at_an_engine_with_a_model(name: str, value: float) -> None:
    Admission.of_model(read_config(DEMO), DEMO, 64).sequence(asked(name, value))


def at_the_scripted_engine(name: str, value: float) -> None:
    build_scripted(ScriptedSpec()).enqueue(asked(name, value))


DOORS = [over_http, over_grpc, at_an_engine_with_a_model, at_the_scripted_engine]


def accepts(door: Callable[[str, float], None], name: str, value: float) -> bool:
    try:
        door(name, value)
    except (InvalidInput, ValidationError):
        return False
    except MissingCapability:
        return True
    return True


def test_every_ranged_parameter_is_promised() -> None:
    assert set(PROMISED) == set(RANGES)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", PROMISED)
def test_every_door_accepts_and_refuses_the_same(
    door: Callable[[str, float], None], name: str
) -> None:
    good, bad = PROMISED[name]
    if door is over_grpc and name in ("max_tokens", "top_k", "top_logprobs", "min_tokens"):
        bad = [value for value in bad if 0 <= value < 2**31]  # the wire holds no other values
    assert [value for value in good if not accepts(door, name, value)] == []
    assert [value for value in bad if accepts(door, name, value)] == []


@pytest.mark.parametrize(
    "bias", [{5: 101.0}, {5: math.nan}, {320: 1.0}, dict.fromkeys(range(301), 1.0)]
)
def test_every_door_refuses_the_same_bias(bias: dict[int, float]) -> None:
    with pytest.raises(InvalidInput, match="logit_bias"):
        check_request(READY, [5], Sampling(1, 1, logit_bias=tuple(bias.items())))
    request = Request(1, (5,), Sampling(1, 1, logit_bias=tuple(bias.items())))
    for enqueue in (
        Admission.of_model(read_config(DEMO), DEMO, 64).sequence,
        build_scripted(ScriptedSpec(vocab_size=320)).enqueue,
    ):
        with pytest.raises(InvalidInput, match="logit_bias"):
            enqueue(request)


def test_a_parameter_that_nobody_declared_harmless_cannot_be_trained() -> None:
    off = Sampling(1, 1)
    assert untrainable(off) == {}
    free = {"seed", "max_tokens", "temperature", "stop", "stop_token_ids", "ignore_eos"}
    free |= {"top_logprobs", "prompt_logprobs", "include_stop_str_in_output"}
    for field in fields(Sampling):
        if field.name in free:
            continue
        other = {str: "{}", tuple: ((5, 1.0),)}.get(type(field.default), 0.5)
        assert set(untrainable(Sampling(1, 1, **{field.name: other}))) == {field.name}
    assert untrainable(Sampling(1, 1, temperature=0.0)) == {"temperature": 0.0}


def test_a_parameter_stands_in_every_list_that_the_recipe_names() -> None:
    """The five files of CONTRIBUTING's recipe; the wire's own list is held by test_engine_wire."""
    not_openai = {"tool_grammar", "free_until"}
    # response_format and structured_outputs are their spelling there
    not_openai |= {"json_schema", "regex", "choice", "grammar"}
    names = {field.name for field in fields(Sampling)} - not_openai
    assert names <= set(ChatBody.model_fields)
