"""Reads the bodies of requests and turns them into orders; turns answers into the SDK's form.

Unknown fields are refused by name: an ignored one could change a result in silence.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import InvalidInput
from paceline.services.tinker.futures import BINARY, Result
from paceline.v1 import policy_pb2, tinker_pb2

NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}"
"""Pattern of a saved state's name."""
_LARGEST_ID = (1 << 31) - 1
_PATH = re.compile(f"{NAME}(/{NAME})*")
_DTYPES = {1: "<f4", 2: "<i8", 3: "<i4"}
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


class Body(BaseModel):
    """A JSON object without unknown fields."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    type: str = ""

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """The checked fields. Raises InvalidInput with the first wrong field."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            seen = str(first["input"])[:100]
            raise InvalidInput(f"{place}: {first['msg']}", seen=seen) from error


def parsed(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises InvalidInput for any other text."""
    try:
        found = json.loads(data or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidInput("the body is not a JSON object", seen=type(found).__name__)
    return found


def is_name(path: str) -> bool:
    """Whether a path consists of names of saved states, so that it stays below its folder."""
    return _PATH.fullmatch(path) is not None


class LoraBody(Body):
    """LoRA settings. Adapters of the head are not served, so train_unembed has no effect."""

    rank: int = Field(ge=1, le=1024)
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def targets(self) -> tuple[str, ...]:
        """Layers with adapters. Raises InvalidInput without any."""
        found = _ATTENTION * self.train_attn + _MLP * self.train_mlp
        if not found:
            raise InvalidInput("no layer is trained", allowed="train_attn or train_mlp")
        return found


class OptimizerBody(Body):
    """The optimiser of a training client."""

    type: Literal["adamw"] = "adamw"


class ModelBody(Body):
    """create_model."""

    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody = OptimizerBody()


class AdamBody(Body):
    """AdamW's settings of a step."""

    learning_rate: float = Field(default=1e-4, ge=0, allow_inf_nan=False)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class StepBody(Body):
    """optim_step."""

    model_id: str
    seq_id: int
    adam_params: AdamBody

    def order(self) -> policy_pb2.OptimStep:
        """The step for the trainer."""
        given = self.adam_params.model_dump(exclude={"type", "grad_clip_norm"})
        return policy_pb2.OptimStep(**given, clip_norm=self.adam_params.grad_clip_norm)


class SaveBody(Body):
    """save_weights and save_weights_for_sampler. Nothing expires: ttl_seconds has no effect."""

    model_id: str
    seq_id: int
    path: str | None = Field(default=None, pattern=f"^{NAME}$")
    sampling_session_seq_id: int | None = Field(default=None, ge=0)
    kind: Literal["snapshot"] = "snapshot"
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class LoadBody(Body):
    """load_weights, into a training client or as a new one."""

    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0)
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerBody | None = None
    weights_access_token: None = None


class SamplerBody(Body):
    """create_sampling_session."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None


class ChunkBody(Body):
    """A part of a prompt."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]]


class PromptBody(Body):
    """A prompt of token ids."""

    chunks: list[ChunkBody]

    def tokens(self) -> list[int]:
        """Token ids of all parts."""
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingBody(Body):
    """Sampling parameters; the gateway checks most ranges."""

    max_tokens: int | None = Field(default=None, ge=0, lt=1 << 31)
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(default=1.0, allow_inf_nan=False)
    top_k: int = Field(default=-1, lt=1 << 31)
    top_p: float = Field(default=1.0, allow_inf_nan=False)


class SampleBody(Body):
    """asample. The fields of fixed value are not served."""

    num_samples: int = Field(default=1, ge=1, le=1024)
    prompt: PromptBody
    sampling_params: SamplingBody
    sampling_session_id: str
    seq_id: int = Field(ge=0)
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None


# --- forward and forward_backward -----------------------------------------------------------------


def read_binary(data: bytes) -> tinker_pb2.TinkerForwardBackward:
    """The body of forward_backward. Raises InvalidInput for other bytes."""
    try:
        return tinker_pb2.TinkerForwardBackward.FromString(data)
    except DecodeError as error:
        raise InvalidInput("the body is no protobuf message of tinker 0.38") from error


def learn_order(body: tinker_pb2.TinkerForwardBackward) -> policy_pb2.ForwardBackward:
    """The order for the trainer. Raises InvalidInput for chunks, tensors and options that are not
    served.
    """
    options = dict(body.loss_fn_config)
    for name, value in body.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise InvalidInput("loss_fn_config has a text", seen=name, allowed="numbers")
        options[name] = value.number
    examples = [_example(datum, f"data[{number}]") for number, datum in enumerate(body.data)]
    if not examples:
        raise InvalidInput("data is empty", allowed="one sequence or more")
    return policy_pb2.ForwardBackward(
        examples=examples, loss=body.loss_fn, options=options, forward_only=body.forward_only
    )


def _example(datum: tinker_pb2.TinkerDatum, place: str) -> policy_pb2.LearnExample:
    tokens = b""
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            kind = chunk.WhichOneof("chunk")
            raise InvalidInput(f"{place}: model_input has a chunk", seen=kind, allowed="tokens")
        tokens += chunk.encoded_text.tokens
    inputs = {}
    for name, tensor in datum.loss_fn_inputs.items():
        values = _values(tensor, f"{place}: {name}")
        if name == "target_tokens":  # a larger id is not in any vocabulary either
            inputs[name] = values.clip(-1, _LARGEST_ID).astype("<i4").tobytes()
        else:
            inputs[name] = values.astype("<f4").tobytes()
    if "target_tokens" not in inputs:
        raise InvalidInput(f"{place}: target_tokens are missing", seen=sorted(inputs))
    targets = inputs.pop("target_tokens")
    return policy_pb2.LearnExample(tokens=tokens, targets=targets, inputs=inputs)


def _values(tensor: tinker_pb2.TinkerTensor, place: str) -> np.ndarray[Any, Any]:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or tensor.WhichOneof("encoding") != "dense":
        allowed = "dense float32, int64 or int32"
        raise InvalidInput(
            f"{place} has another form", seen=f"type {tensor.dtype}", allowed=allowed
        )
    if len(tensor.dense) % np.dtype(dtype).itemsize:
        raise InvalidInput(f"{place} ends within a number", seen=f"{len(tensor.dense)} bytes")
    return np.frombuffer(tensor.dense, dtype)


def learned(body: tinker_pb2.TinkerForwardBackward, answer: policy_pb2.LearnResponse) -> Result:
    """The result of forward_backward: log-prob and loss of each target, as the targets are
    shaped, and the sum of the losses.
    """
    metrics = {"loss:sum": answer.figures["loss"]}
    output = tinker_pb2.TinkerForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", metrics=metrics
    )
    parts = {"logprobs": answer.logprobs, "elementwise_loss": answer.losses}
    done = 0
    for datum in body.data:
        targets, record = datum.loss_fn_inputs["target_tokens"], output.loss_fn_outputs.add()
        record.num_datums, size = 1, 4 * len(_values(targets, ""))
        for name, data in parts.items():
            held = record.fields[name]
            held.data, held.dtype = data[done : done + size], 1
            held.offsets = np.array([0, size], "<i8").tobytes()
            held.trailing_shape.extend(targets.shape[1:])
        done += size
    return Result(output.SerializeToString(), BINARY)
