"""Estimates the memory in bytes of each service before a run starts.

The estimate includes weights, gradients, Adam's two moments, keys and values, and the activations
for backward. Model sizes are from config.json.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.errors import ConfigError
from paceline.models.config import ModelConfig

FLOAT = 4
"""Bytes of a trained number."""
INT8 = 1 + FLOAT / 256
"""Bytes of an eight-bit moment; 256 moments share a scale."""
TOKEN_ID = 8
"""Bytes of a token id in the embedded engine."""
LIBRARIES = 1 << 30
"""Approximate bytes of CUDA and NCCL per process on a GPU."""
LOGITS = 4
"""Concurrent arrays of logits during computation of log-probs and entropy."""


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """Memory of one service on each of its devices."""

    service: str
    devices: int
    parts: Mapping[str, int]
    """Bytes by content."""
    stays: int
    """Bytes that remain while another service uses the device."""

    @property
    def total(self) -> int:
        """Total bytes per device."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        return f"{self.service} {self.devices} x {shown(self.total)}"


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Memory of the services that share a run's devices."""

    engine: ServicePlan
    policy: ServicePlan
    drafter: ServicePlan
    apart: bool = False  # the policy has separate devices

    @property
    def services(self) -> tuple[ServicePlan, ...]:
        """The services in the order of the data."""
        return self.engine, self.policy, self.drafter

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes on a shared GPU during the turn of each service."""
        workers = (self.engine, self.drafter)
        together = (workers, (self.policy,)) if self.apart else (self.services,)
        return {
            plan.service: plan.total - plan.stays + sum(one.stays + LIBRARIES for one in sharing)
            for sharing in together
            for plan in sharing
        }

    def turns(self, device_bytes: int) -> str:
        """A sentence with the largest peak on a GPU of that size."""
        service, most = max(self.peaks.items(), key=lambda turn: turn[1])
        return f"memory of a GPU: at most {shown(most)} of {shown(device_bytes)}, for {service}"

    def check(self, device_bytes: int) -> None:
        """Raises ConfigError if the peak of a service exceeds a device."""
        service, most = max(self.peaks.items(), key=lambda turn: turn[1])
        if most > device_bytes:
            raise ConfigError(
                f"a GPU is too small for the turn of {service}: "
                + ", ".join(map(str, self.services)),
                seen=f"{shown(most)}",
                allowed=f"{shown(device_bytes)}, with another model, more GPUs, memory_saver, "
                "a smaller memory_fraction, reshard_after_forward, recompute_activations, "
                "compute_dtype=bfloat16, optimizer.moments=int8, offload, fewer head_rows or "
                "shorter sequences",
            )


def together(services: Sequence[ServicePlan], ram: int) -> str:
    """A sentence with the memory of all services on a machine without GPUs."""
    needed = sum(one.devices * one.total for one in services)
    verdict = "memory may run short" if needed > ram else "memory"
    return f"{verdict}: {shown(needed)} of {shown(ram)} ({', '.join(map(str, services))})"


def parameters(model: ModelConfig) -> int:
    """Weights of a model: matrices and embeddings; norms and biases are negligible."""
    layer = layer_parameters(model) + gate_parameters(model)
    return embedding_parameters(model) + model.num_layers * layer


def embedding_parameters(model: ModelConfig) -> int:
    """Weights of the embedding and the head."""
    return (1 if model.tie_word_embeddings else 2) * model.vocab_size * model.hidden_size


def adapter_parameters(model: ModelConfig, rank: int, targets: Collection[str]) -> int:
    """Weights of low-rank adapters beside the target linear layers."""
    heads, inner = model.num_heads * model.head_dim, model.intermediate_size
    hidden, keys = model.hidden_size, model.kv_width // 2
    ends = {  # input size plus output size
        "q_proj": hidden + heads,
        "k_proj": hidden + keys,
        "v_proj": hidden + keys,
        "o_proj": heads + hidden,
        "gate_proj": hidden + inner,
        "up_proj": hidden + inner,
        "down_proj": inner + hidden,
    }
    return model.num_layers * rank * sum(ends[target] for target in targets)


def layer_parameters(model: ModelConfig) -> int:
    """Weights of one decoder layer with all experts, without the router that selects experts."""
    # attention: queries and output, keys and values
    heads = 2 * model.num_heads * model.head_dim + model.kv_width
    inner = model.experts * model.expert_size or model.intermediate_size
    return model.hidden_size * (heads + 3 * inner)


def gate_parameters(model: ModelConfig) -> int:
    """Weights of the router that selects a layer's experts."""
    return model.hidden_size * model.experts


def embedded_plan(
    model: ModelConfig,
    *,
    workers: int,
    running: int,
    kept: int,
    tokens: int,
    item: int,
    states: int,
    drafter: bool,
    saver: bool,
    matrix_item: int = 0,
) -> ServicePlan:
    """Memory of the embedded engine's workers.

    Each worker holds `running` sequences of `tokens` tokens, `kept` sequences of the same length,
    and `states` hidden states per token. Its drafter has one layer of the model's size. `item`:
    bytes per number; `matrix_item`: bytes per number in layer matrices, if not 0.
    """
    matrices, cells = model.num_layers * layer_parameters(model), (running + kept) * tokens
    one = layer_parameters(replace(model, experts=0, experts_per_token=0))
    own = one + 2 * model.hidden_size**2 + running * tokens * model.kv_width
    parts = {
        "weights": item * embedding_parameters(model) + (matrix_item or item) * matrices,
        "keys and values": item * cells * model.num_layers * model.kv_width,
        "hidden states": item * cells * states * model.hidden_size,
        "token ids": TOKEN_ID * cells,
        "drafter": item * own if drafter else 0,
    }
    remain = ("token ids", "drafter") if saver else parts
    return ServicePlan("gateway", workers, parts, sum(parts[name] for name in remain))


def sglang_plan(
    model: ModelConfig, *, workers: int, tensor_parallel: int, item: int, pool: int, saver: bool
) -> ServicePlan:
    """Memory of SGLang workers that use `pool` bytes of each GPU. Raises ConfigError if the weights
    leave no room for keys and values.
    """
    # Each GPU has the same share of experts, whole or split. Only the routers are whole on each
    # GPU.
    gates = model.num_layers * gate_parameters(model)
    weights = item * ((parameters(model) - gates) // tensor_parallel + gates)
    if weights >= pool:
        raise ConfigError(
            "gateway.engine.sglang.memory_fraction leaves no room for keys and values",
            seen=f"{shown(pool)} of a GPU",
            allowed=f"more than the weights, {shown(weights)}",
        )
    parts = {"weights": weights, "keys and values": pool - weights}
    return ServicePlan("gateway", workers * tensor_parallel, parts, 0 if saver else pool)


def layer_activations(model: ModelConfig) -> int:
    """Numbers per token that the backward of one decoder layer reads.

    They are the inputs of both norms, the attention with its inputs and outputs, and the gated MLP.
    Arrays with one number per token or head are ignored.
    """
    inner = model.experts_per_token * model.expert_size or model.intermediate_size
    return 8 * model.hidden_size + model.kv_width + 4 * inner


@dataclass(frozen=True, slots=True)
class PolicySizes:
    """The settings of the policy trainer that determine its memory."""

    reshard: bool = False
    recompute: bool = False
    item: int = FLOAT
    """Bytes of a number in computations."""
    head_rows: int = 1024
    """Tokens per block of logits."""
    critic: bool = False
    reference: bool = False
    adapters: int = 0
    """Trained adapter weights; 0: the model's weights are trained."""
    moment: float = FLOAT
    """Bytes of a moment, including its share of a block's scale."""
    offload: bool = False
    """Whether weights and moments leave the device between steps."""


def policy_plan(
    model: ModelConfig, *, ranks: int, tokens: int, settings: PolicySizes
) -> ServicePlan:
    """Memory of FSDP2 over `ranks` with float32 storage and forwards of `tokens` tokens.

    Each rank holds its share, the gathered weights, and the activations for backward. The critic is
    a model without a head, trained without adapters. The reference is an untrained model; with
    adapters it is the policy without its adapters.
    """
    count, layer = parameters(model), layer_parameters(model)
    share = -(-FLOAT * count // ranks)
    trained = -(-FLOAT * settings.adapters // ranks) if settings.adapters else share
    moments = 2 * settings.moment / FLOAT  # moments per trained number
    kept = layer_activations(model)  # with recompute: of one layer, plus all layer inputs
    layers = model.num_layers
    read = kept + layers * model.hidden_size if settings.recompute else kept * layers
    parts = {
        "weights": share + (trained if settings.adapters else 0),
        "gradients": trained,
        "optimizer": round(moments * trained),
        "gathered": _gathered(model, ranks, settings),
        "activations": settings.item * tokens * read,
        "logits": LOGITS * FLOAT * min(tokens, settings.head_rows) * model.vocab_size,
    }
    stays = parts["weights"] + parts["optimizer"]
    whole = settings.item * count if not settings.reshard and _gathers(ranks, settings) else 0
    if settings.critic:
        decoder = layers * layer + model.vocab_size * model.hidden_size
        own = -(-FLOAT * decoder // ranks)
        parts["critic"] = round((2 + moments) * own) + whole * decoder // count
        stays += round((1 + moments) * own)
    if settings.reference and not settings.adapters:
        parts["reference"] = share + whole
        stays += share
    return ServicePlan("policy_trainer", ranks, parts, 0 if settings.offload else stays)


def _gathers(ranks: int, settings: PolicySizes) -> bool:
    """Whether a rank computes with a gathered or converted copy of its shards."""
    return ranks > 1 or settings.item != FLOAT


def _gathered(model: ModelConfig, ranks: int, settings: PolicySizes) -> int:
    """Bytes of gathered weights and of gradients, which are summed in float32.

    With reshard, only some weights are gathered: the current layer, the next layer, and the unit of
    embedding and head.
    """
    if not _gathers(ranks, settings):
        return 0
    count, layer = parameters(model), layer_parameters(model)
    ends = embedding_parameters(model)
    weights, gradients = (ends + 2 * layer, ends + layer) if settings.reshard else (count, count)
    gradients = min(gradients, settings.adapters or gradients)
    return settings.item * (weights + settings.adapters) + FLOAT * gradients


def drafter_plan(model: ModelConfig, *, ranks: int, tokens: int) -> ServicePlan:
    """Memory of a drafter with one layer of the model's size, plus the model's embedding and head.

    Each rank holds all of it, because a lease may have one slot. The drafter has no experts.
    """
    model = replace(model, experts=0, experts_per_token=0)
    share = FLOAT * (layer_parameters(model) + 2 * model.hidden_size**2)
    head = 2 * FLOAT * model.vocab_size * model.hidden_size
    parts = {
        "weights": share,
        "gradients": share,
        "optimizer": 2 * share,
        "policy's head": head,
        "activations": FLOAT * tokens * layer_activations(model),
        "logits": LOGITS * FLOAT * tokens * model.vocab_size,
    }
    return ServicePlan("drafter_trainer", ranks, parts, 0)


def policy_ranks(wanted: int, slots: int, *, cores: int, gpus: int) -> int:
    """Number of policy trainer ranks, one per leased slot.

    With GPUs it is the minimum of slots and GPUs; on CPU at most two.

    Raises ConfigError if `wanted` exceeds the slots.
    """
    if wanted > slots:
        raise ConfigError(
            "the policy's ranks compute on leased slots, one each; set policy_trainer.ranks",
            seen=f"{wanted} ranks",
            allowed=f"0 to {slots}, the slots that it is leased",
        )
    return wanted or min(slots, gpus or min(2, cores))


def check_slots_per_worker(slots_per_worker: int, tensor_parallel: int) -> None:
    """Raises ConfigError if a worker's slots differ from its GPUs."""
    if slots_per_worker != tensor_parallel:
        raise ConfigError(
            "coordinator.slots_per_worker is not the number of GPUs of a worker",
            seen=slots_per_worker,
            allowed=f"{tensor_parallel} (gateway.engine.sglang.tensor_parallel_size)",
        )


def check_experts(model: ModelConfig, tensor_parallel: int, expert_parallel: int) -> None:
    """Raises ConfigError if SGLang cannot divide a model's experts this way."""
    key = "gateway.engine.sglang.expert_parallel_size"
    if expert_parallel > 1 and not model.experts:
        raise ConfigError(
            f"{key} divides a model's experts among the GPUs of a worker, and this model has none",
            seen=f"{expert_parallel} with {model.family}",
            allowed="1",
        )
    beside = tensor_parallel // expert_parallel  # GPUs that hold the same experts
    if model.experts % expert_parallel or model.expert_size % beside:
        raise ConfigError(
            f"{key} leaves a part of an expert over",
            seen=f"{model.experts} experts of {model.expert_size} on {expert_parallel} x {beside}",
            allowed="a divisor of the experts; and tensor_parallel_size / expert_parallel_size "
            "divides their size",
        )


def shown(size: int) -> str:
    """Formats a size as MiB."""
    return f"{size / 2**20:,.0f} MiB"
