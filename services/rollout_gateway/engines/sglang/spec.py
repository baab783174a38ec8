"""Defines the settings of the SGLang engine, its refused arguments and its hidden rows.

A worker is one scheduler and its tensor-parallel ranks. A command reaches all ranks between the
same two rounds. All ranks therefore serve one version set, and each token has one policy version.
SGLang's other layouts have further schedulers, which a command would not reach.

Imports neither torch nor SGLang, so that the gateway can check the settings and size its row rings.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from paceline.arm_names import OFF
from paceline.config import Config
from paceline.errors import ConfigError
from paceline.models.config import read_config_json
from paceline.services.rollout_gateway.engines.nouns import RowLayout
from paceline.services.rollout_gateway.engines.settings import ModelSpec
from paceline.speculators.kinds import SGLANG, SPECULATORS, drafter_directory


class Refusal(NamedTuple):
    """Rejected arguments, the reason and an alternative."""

    arguments: str
    """Their names, separated by spaces."""
    off: tuple[object, ...]
    """Values that leave the feature off; they are accepted."""
    why: str
    instead: str


_SERVERS = (
    "prefill and decode servers are two schedulers that exchange keys and values on CUDA: both "
    "would have to change the version set at the same token of each request, and the prompt's "
    "hidden rows would stay on the prefill server",
    "workers for both (gateway.engine.workers), short prefills (gateway.engine.prefill_tokens)",
)
_OWN = "it has its own setting, which the memory plan and the slot leases use"
REFUSALS = (
    Refusal("disaggregation_mode", ("null",), *_SERVERS),
    Refusal(
        "dp_size enable_dp_attention pp_size attn_cp_size dcp_size moe_dp_size dwdp_size",
        (1, False),
        "it starts further schedulers, which would not receive a version set between the same two "
        "rounds",
        "more workers (gateway.engine.workers)",
    ),
    Refusal(
        "nnodes node_rank dist_init_addr",
        (0, 1, ""),
        "the ranks of a worker rendezvous through a file on one host",
        "one worker per host (gateway.engine.workers) with all GPUs of the host",
    ),
    Refusal(
        "enable_eplb ep_num_redundant_experts elastic_ep_backend enable_elastic_expert_backup",
        (0, False, "none"),
        "experts would move between GPUs during a load of a version",
        "gateway.engine.sglang.expert_parallel_size, with one copy of each expert",
    ),
    Refusal("tp_size", (), _OWN, "gateway.engine.sglang.tensor_parallel_size"),
    Refusal("ep_size", (), _OWN, "gateway.engine.sglang.expert_parallel_size"),
)
_REFUSED = {name: one for one in REFUSALS for name in one.arguments.split()}
_PREFIXES = {prefix: Refusal(prefix, (), *_SERVERS) for prefix in ("disaggregation_", "encoder_")}


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first argument that a worker does not support."""
    for name, value in arguments.items():
        begun = (found for prefix, found in _PREFIXES.items() if name.startswith(prefix))
        refusal = _REFUSED.get(name) or next(begun, None)
        if refusal is None or any(type(one) is type(value) and one == value for one in refusal.off):
            continue  # by type, since True == 1
        off = ", ".join(f"{one!r}" for one in refusal.off) or "nothing"
        message = f"gateway.engine.sglang.arguments.{name} is not served: {refusal.why}"
        raise ConfigError(message, seen=value, allowed=f"{off}; instead: {refusal.instead}")


_PROFILE, _WEIGHTS, _CACHE = "profile", "arguments.quantization", "arguments.kv_cache_dtype"
QUANTIZATION = {"int8_w8a8": "w8a8_int8"}
"""SGLang's quantization method for each profile."""
_SHORT = {"bfloat16": "bf16"}
"""SGLang's names for the same dtypes in its KV cache setting."""


class SGLangConfig(Config):
    """Settings of the SGLang engine."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; auto: CUDA if available."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Number of GPUs per worker."""
    expert_parallel_size: int = Field(default=1, ge=1)
    """Number of expert groups among the worker's GPUs, a divisor of tensor_parallel_size. Each
    group holds a share of the experts.
    """
    memory_fraction: float = Field(default=0.4, gt=0, lt=1)
    """Share of each GPU for weights and KV cache."""
    memory_saver: bool = False
    """Whether weights and KV cache are released between steps (GPU)."""
    profile: Literal["", "int8_w8a8"] = ""
    """Number format: the decoder layers' matrices in int8 and activations rounded per token, as
    SGLang's method w8a8_int8, for the first policy and every version. Sets keep this profile until
    the engine restarts. Needs engine.dtype=bfloat16 and the extra `int8`. Empty: `dtype`.
    """
    arguments: dict[str, str | int | float | bool] = Field(default={})
    """Further arguments of SGLang's server by its own names; they override. Its quantization and
    kv_cache_dtype name the number format of token spans. Weights that SGLang rounds after loading,
    such as fp8, can receive versions; a checkpoint stored in a rounded format cannot.
    """

    @model_validator(mode="after")
    def _one_scheduler_decides(self) -> Self:
        check_arguments(self.arguments)
        if self.profile and self.arguments.get("quantization"):
            rounds = "gateway.engine.sglang.profile chooses how SGLang rounds"
            message = f"{rounds}; unset gateway.engine.sglang.arguments.quantization"
            seen, allowed = self.arguments["quantization"], f"none beside profile={self.profile}"
            raise ConfigError(message, seen=seen, allowed=allowed)
        name = "gateway.engine.sglang.expert_parallel_size"
        groups, gpus = self.expert_parallel_size, self.tensor_parallel_size
        if gpus % groups:
            message = f"{name} does not divide tensor_parallel_size"
            raise ConfigError(message, seen=groups, allowed=f"a divisor of {gpus}")
        backend = self.arguments.get("moe_a2a_backend", "none")
        if backend != "none" and groups != gpus:
            why = f"moe_a2a_backend={backend} divides experts over all GPUs of a worker"
            allowed = f"{gpus} (tensor_parallel_size)"
            raise ConfigError(f"{why}; set {name}", seen=groups, allowed=allowed)
        return self

    def check_dtype(self, dtype: str) -> None:
        """Raises ConfigError when the profile does not support a dtype."""
        if self.profile and dtype != "bfloat16":
            profile = f"gateway.engine.sglang.profile={self.profile}"
            message = f"{profile} is not served in this gateway.engine.dtype"
            raise ConfigError(message, seen=dtype, allowed="bfloat16")

    def check_model(self, experts: int) -> None:
        """Raises ConfigError when a profile is set for a model with experts.

        experts: number of experts in a layer; 0 for a dense model.
        """
        if self.profile and experts:
            message = f"gateway.engine.sglang.profile={self.profile} rounds no experts"
            allowed = "a model without experts, or gateway.engine.sglang.arguments.quantization"
            raise ConfigError(message, seen=f"{experts} experts a layer", allowed=allowed)

    def rounding(self, dtype: str) -> dict[str, str]:
        """Settings that store weights or KV cache in another number format than `dtype`.

        Maps the name of each setting to SGLang's name of the format.
        """
        named = {
            _PROFILE: self.profile,
            _WEIGHTS: str(self.arguments.get("quantization") or ""),
            _CACHE: str(self.arguments.get("kv_cache_dtype") or ""),
        }
        kept = ("", "auto", dtype, _SHORT.get(dtype, dtype))
        return {name: value for name, value in named.items() if value not in kept}


class SGLangSpec(SGLangConfig, ModelSpec):
    """Model, drafter and settings of one SGLang engine. An engine serves one speculator."""

    prefill_tokens: int = Field(default=2048, ge=16)
    """Prompt tokens of one prefill; SGLang's chunks are no shorter than 16."""

    @model_validator(mode="after")
    def _multiplied_in_dtype(self) -> Self:
        self.check_dtype(self.dtype)
        return self

    @property
    def number_format(self) -> str:
        """Number format that the policy computes in: int8_w8a8, fp8, bfloat16+kv_fp8_e5m2 ..."""
        rounding = self.rounding(self.dtype)
        weights = rounding.get(_PROFILE) or rounding.get(_WEIGHTS, self.dtype)
        cache = rounding.get(_CACHE)
        return f"{weights}+kv_{cache}" if cache else weights

    @property
    def speculator(self) -> str:
        """Name of the kind that drafts, or `off`.

        Raises ConfigError for a drafter that SGLang does not support or would misread.
        """
        if self.drafter in (OFF, *SGLANG):
            return self.drafter
        config = Path(self.drafter_dir) / "config.json"
        if not self.drafter_dir or not config.is_file():
            allowed = f"{OFF}, {', '.join(SGLANG)} or a checkpoint directory"
            raise ConfigError("not a drafter for SGLang", seen=self.drafter, allowed=allowed)
        raw = json.loads(config.read_text(encoding="utf-8"))
        if raw.get("norm_before_residual"):  # SGLang would ignore this option
            message = "SGLang's EAGLE-3 does not know norm_before_residual"
            raise ConfigError(message, seen=True, allowed=False)

        name = (raw.get("architectures") or ["(none)"])[0]
        endings = {one.architecture_ending: kind for kind, one in SGLANG.items()}
        endings.pop("", None)
        for ending, kind in endings.items():
            if name.endswith(ending):
                return kind
        allowed = ", ".join(f"...{ending}" for ending in endings)
        raise ConfigError("the drafter's architecture is not served", seen=name, allowed=allowed)

    @property
    def drafter_dir(self) -> str:
        """Directory of the drafter's checkpoint; empty when there is none."""
        return str(drafter_directory(self.drafter) or "")

    @property
    def shared_with_target(self) -> tuple[str, ...]:
        """Tensor names that a drafter shares with the target; a drafter's versions never contain
        them.
        """
        return () if self.drafter == OFF else SGLANG[self.speculator].shared_with_target

    @property
    def arm_names(self) -> tuple[str, ...]:
        """Arms served; `off` is always the first."""
        shapes = () if self.drafter == OFF else SGLANG[self.speculator].shapes
        arms = self.arms or tuple(f"{self.speculator}:{shape}" for shape in shapes)
        return (OFF, *(arm for arm in arms if arm != OFF))


SHALLOWEST = 7
"""Fewest layers L at which SGLang's default layers 2, L // 2 and L - 3 ascend. For a shallower
model the drafter's config.json must name the layers.
"""


def layout_of_settings(settings: dict[str, Any]) -> RowLayout:
    """Row layout from the values of SGLangSpec; see `row_layout`."""
    return row_layout(SGLangSpec(**settings))


def row_layout(spec: SGLangSpec) -> RowLayout:
    """Layout of one hidden row of this engine.

    Raises ConfigError for a model that is too shallow for EAGLE-3.
    """
    model = read_config_json(Path(spec.model_dir))
    hidden_size, layers = int(model["hidden_size"]), int(model["num_hidden_layers"])
    if spec.speculator == OFF:
        return RowLayout.last(hidden_size)
    drafter = read_config_json(Path(spec.drafter_dir)) if spec.drafter_dir else {}
    inner = SPECULATORS[spec.speculator].inner_layers(drafter, layers)
    named = (drafter.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    # a newly initialized drafter names its layers
    if inner and spec.drafter_dir and layers < SHALLOWEST and not named:
        message = "EAGLE-3 in SGLang: the model is too shallow"
        raise ConfigError(message, seen=layers, allowed=f">= {SHALLOWEST} layers")

    return RowLayout.entering(hidden_size, inner)
