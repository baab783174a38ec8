"""Reads the bodies of requests.

Unknown fields are refused by name: an ignored one could change a result in silence.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from paceline.errors import InvalidInput
from paceline.rpc.http_requests import field_errors
from paceline.v1 import policy_pb2, tinker_pb2

NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}"
"""Pattern of a saved state's name."""
_FIELDS = TypeAdapter(dict[str, Any])
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Optimizer = dict[Literal["type"], Literal["adamw"]]
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


class Body(BaseModel):
    """A JSON object without unknown fields."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    type: str = ""

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """The checked fields. Raises FieldError with the first wrong field."""
        with field_errors():
            return cls.model_validate(fields)


def parsed(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises FieldError for any other text."""
    with field_errors():
        return _FIELDS.validate_json(data or b"{}")


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


class ModelBody(Body):
    """create_model."""

    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraBody | None = None
    optimizer_config: Optimizer | None = None


class AdamBody(Body):
    """AdamW's settings of a step."""

    learning_rate: float = Field(default=1e-4, ge=0, allow_inf_nan=False)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    clip_norm: float = Field(default=0.0, ge=0, allow_inf_nan=False, alias="grad_clip_norm")


class StepBody(Body):
    """optim_step."""

    model_id: str
    seq_id: int
    adam_params: AdamBody

    def order(self) -> policy_pb2.OptimStep:
        """The step for the trainer."""
        return policy_pb2.OptimStep(**self.adam_params.model_dump(exclude={"type"}))


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
    optimizer_config: Optimizer | None = None
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
    tokens: list[Token]


class PromptBody(Body):
    """A prompt of token ids."""

    chunks: list[ChunkBody]


class SamplingBody(Body):
    """Sampling parameters; the gateway checks most ranges."""

    max_tokens: int | None = Field(default=None, ge=0, lt=1 << 31)
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    stop: str | list[str] | list[Token] | None = None
    temperature: float = Field(default=1.0, allow_inf_nan=False)
    top_k: int = Field(default=-1, ge=-1, lt=1 << 31)
    top_p: float = Field(default=1.0, gt=0, allow_inf_nan=False)


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


def read_binary(data: bytes) -> tinker_pb2.TinkerForwardBackward:
    """The body of forward_backward. Raises InvalidInput for other bytes."""
    try:
        return tinker_pb2.TinkerForwardBackward.FromString(data)
    except DecodeError as error:
        message = "the body is not protobuf, in which tinker sends it since 0.38"
        raise InvalidInput(message) from error
