"""Estimates the memory in bytes of each service before a run starts.

The estimate includes weights, gradients, Adam's two moments, keys and values, and the activations
for backward. Model sizes are from config.json.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from paceline import processor
from paceline.arm_names import OFF, speculator_of
from paceline.errors import ConfigError, PacelineError
from paceline.local.processes import usable_cores
from paceline.models.config import ModelConfig, read_config
from paceline.speculators.kinds import inner_layers_read

ITEM = {"float32": 4, "bfloat16": 2}
FLOAT = 4
"""Bytes of a trained number."""
INT8 = 1 + FLOAT / 256
"""Bytes of an eight-bit moment; 256 moments share a scale."""
TOKEN_ID = 8
"""Bytes of a token id in the embedded engine."""
LIBRARIES = 1 << 30
"""Approximate bytes of CUDA and NCCL per process on a GPU."""
LARGE = 128 << 20
"""Weights of this many bytes do not stay in the caches of cores."""
ACTIVATIONS_SHARE = 16
"""Activations of a large model's forward take at most memory divided by this."""
PROCESS = 130 << 20
"""Approximate bytes of a Python process with its libraries."""
OTHERS = 7
"""Processes beside workers and ranks: four services, their starter, the fork server and Redis."""
LOGITS = 4
"""Concurrent arrays of logits during computation of log-probs and entropy."""


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """Memory of one service on each of its devices."""

    service: str
    devices: int
    parts: Mapping[str, int]  # bytes by content
    stays: int = 0  # bytes that remain while another service uses the device

    @property
    def total(self) -> int:
        """Total bytes per device."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        return f"{self.service} {self.devices} x {format_size(self.total)}"


def check_memory(found: Mapping[str, Any], ranks: int, gpus: Sequence[int]) -> str:
    """A sentence on a run's memory, with a warning if it may run short.

    `found`: settings by service. `gpus`: bytes of each GPU. Raises ConfigError if a GPU is too
    small.
    """
    gateway, policy, drafter = itemgetter("gateway", "policy_trainer", "drafter_trainer")(found)
    sglang = gateway.engine.kind == "sglang"
    on_gpus = sglang and gateway.engine.sglang.device != "cpu" and gpus
    try:
        model = read_config(gateway.model_dir, experts=sglang)
    except PacelineError as error:
        return f"memory is unknown: {error}"  # the service reports the model's fault
    engine = engine_plan(model, gateway, min(gpus) if on_gpus else 0)
    if model.experts:
        return f"memory: {engine}; a model with experts is served and not trained"
    # A row is as long as the longest trajectory of its step.
    tokens = max(policy.tokens_per_micro_batch, gateway.engine.max_sequence_tokens)
    learner = policy_plan(model, policy, ranks, tokens)
    trainer = drafter_plan(model, ranks=drafter.ranks, tokens=drafter.max_micro_batch_tokens)
    if on_gpus and drafter.device == "cuda":
        apart = found["coordinator"].learner_slots
        together = [[engine, trainer], [learner]] if apart else [[engine, learner, trainer]]
        return check_gpus(together, min(gpus))
    ram, plans = processor.memory_bytes(), host_plans(model, policy, engine, learner, trainer)
    needed = sum(one.devices * one.total for one in plans)
    verdict = "memory may run short" if needed > ram else "memory"
    sizes = f"{format_size(needed)} of {format_size(ram)}"
    return f"{verdict}: {sizes} ({', '.join(map(str, plans))})"


def host_plans(
    model: ModelConfig, policy: Any, engine: ServicePlan, learner: ServicePlan, trainer: ServicePlan
) -> Sequence[ServicePlan]:
    """The plans on a host without GPUs, with the processes themselves, and with published and saved
    weights.

    A rank keeps its rows of the last version. A push holds another version three times: in the
    rank, in the gateway and in the workers' files. The rank and the gateway keep that memory unless
    it is a large share of the machine's. A checkpoint copies weights and moments. Both follow a
    step, in the memory of its gradients and activations as far as it reaches.
    """
    trained = learner.parts["gradients"]
    version = _share(parameters(model), learner.devices) * ITEM[policy.publish_dtype] // FLOAT
    of_step = ("gradients", "gathered", "activations", "logits")
    held = 3 if version <= processor.memory_bytes() // processor.KEPT_SHARE else 1
    room = sum(learner.parts[part] for part in of_step)
    after = (4 - held) * version + 3 * trained - room
    kept = {"versions": held * version, "push and checkpoint": max(0, after)}
    learner = replace(learner, parts={**learner.parts, **kept})
    alone = [
        replace(one, parts={**one.parts, "process": PROCESS}) for one in (engine, learner, trainer)
    ]
    return (*alone, ServicePlan("others", 1, {"processes": OTHERS * PROCESS}))


def fit_settings(found: Mapping[str, Any]) -> list[str]:
    """Settings on a CPU that follow from the size of a large model, where they have no value.

    Decoding reads all weights for each token. One worker with all cores reads and holds them once;
    small weights stay in each core's caches, so that a worker per core is faster.
    """
    gateway, policy, drafter = itemgetter("gateway", "policy_trainer", "drafter_trainer")(found)
    if gateway.engine.kind != "embedded" or policy.device == "cuda":
        return []
    try:
        model = read_config(gateway.model_dir)
    except PacelineError:
        return []  # check_memory reports it
    if FLOAT * parameters(model) < LARGE:
        return []
    tokens, bytes_each = 4096, FLOAT * layer_activations(model) * model.num_layers
    while tokens > 256 and tokens * bytes_each > processor.memory_bytes() // ACTIVATIONS_SHARE:
        tokens //= 2
    fitting = [("policy_trainer", policy, "tokens_per_micro_batch", tokens)]
    if not gateway.engine.workers:
        fitting += [
            ("gateway.engine", gateway.engine, "workers", 1),
            ("gateway.engine", gateway.engine, "threads", 0),
            ("policy_trainer", policy, "threads_per_rank", usable_cores()),
            ("drafter_trainer", drafter, "threads_per_rank", usable_cores()),
        ]
    return [
        f"{section}.{key}={value}"
        for section, own, key, value in fitting
        if key not in own.model_fields_set
    ]


def check_gpus(sharing: Sequence[Sequence[ServicePlan]], device_bytes: int) -> str:
    """A sentence with the largest peak on a GPU of that size.

    `sharing`: groups of services that take turns on the same GPUs. Raises ConfigError if a peak
    exceeds a GPU.
    """
    peaks = {
        one.service: one.total - one.stays + sum(other.stays + LIBRARIES for other in group)
        for group in sharing
        for one in group
    }
    service, most = max(peaks.items(), key=lambda turn: turn[1])
    if most > device_bytes:
        plans = ", ".join(str(one) for group in sharing for one in group)
        raise ConfigError(
            f"a GPU is too small for the turn of {service}: {plans}",
            seen=format_size(most),
            allowed=f"{format_size(device_bytes)}, with another model, more GPUs, memory_saver, "
            "a smaller memory_fraction, reshard_after_forward, recompute_activations, "
            "compute_dtype=bfloat16, optimizer.moments=int8, offload, fewer head_rows or "
            "shorter sequences",
        )
    sizes = f"{format_size(most)} of {format_size(device_bytes)}"
    return f"memory of a GPU: at most {sizes}, for {service}"


def parameters(model: ModelConfig) -> int:
    """Weights of a model: matrices and embeddings; norms and biases are negligible."""
    layer = layer_parameters(model) + model.hidden_size * model.experts
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


def embedded_parts(
    model: ModelConfig, cells: int, item: int, *, states: int, drafter: bool, matrix_item: int = 0
) -> dict[str, int]:
    """Memory of a worker of the embedded engine, by content.

    It holds `cells` tokens, running or kept, with `states` hidden states each. Its drafter has one
    layer of the model's size. `item`: bytes per number; `matrix_item`: bytes per number in layer
    matrices, if not 0.
    """
    one = layer_parameters(replace(model, experts=0, experts_per_token=0))
    own = one + 2 * model.hidden_size**2 + cells * model.kv_width
    matrices = (matrix_item or item) * model.num_layers * layer_parameters(model)
    return {
        "weights": item * embedding_parameters(model) + matrices,
        "keys and values": item * cells * model.num_layers * model.kv_width,
        "hidden states": item * cells * states * model.hidden_size,
        "token ids": TOKEN_ID * cells,
        "drafter": item * own if drafter else 0,
    }


def engine_plan(model: ModelConfig, gateway: Any, gpu: int) -> ServicePlan:
    """Memory of the engine's workers, for the settings of a gateway. `gpu`: bytes of a GPU of
    SGLang; 0: without GPUs. Raises ConfigError if SGLang cannot serve the model in this way.
    """
    engine, embedded = gateway.engine, gateway.engine.kind == "embedded"
    if engine.kind == "sglang":
        own = engine.sglang
        check_experts(model, own.tensor_parallel_size, own.expert_parallel_size)
        own.check_dtype(engine.dtype)
        own.check_model(model.experts)
        if gpu:
            return sglang_plan(model, gateway, gpu)
    drafters = (gateway.drafter, *engine.embedded.more_drafters)
    inner = gateway.features.layers or inner_layers_read(drafters, model.num_layers)
    keeps_states = embedded and (gateway.trajectories or set(drafters) - {OFF})
    states = 1 + len(inner) if keeps_states else 0
    longest = min(engine.max_sequence_tokens, model.max_position_embeddings)
    cells = engine.max_batch * longest
    if embedded:
        token = ITEM[engine.dtype] * (
            model.num_layers * model.kv_width + states * model.hidden_size
        )
        own = engine.embedded
        cells += min(own.prefix_slots * longest, own.prefix_bytes // token)
    parts = embedded_parts(
        model,
        cells,
        ITEM[engine.dtype],
        states=states,
        drafter=embedded and gateway.drafter != OFF,
        matrix_item=1 if engine.profile else 0,  # every profile has eight bits
    )
    matrix = ITEM[engine.dtype] * model.hidden_size * model.intermediate_size
    small = parts["weights"] < processor.memory_bytes() // processor.PACKED_SHARE
    if embedded and small and not engine.profile and matrix >= processor.FEWEST_BYTES:
        parts["packed weights"] = parts["weights"]
    if embedded and "self" in {gateway.drafter, *map(speculator_of, gateway.speculation.arms)}:
        parts["rounded weights"] = parts["weights"] // ITEM[engine.dtype] * 5 // 8
    return ServicePlan("gateway", gateway.worker_count, parts)


def sglang_plan(model: ModelConfig, gateway: Any, gpu: int) -> ServicePlan:
    """Memory of SGLang's workers on GPUs of `gpu` bytes. Raises ConfigError if the weights leave no
    room for keys and values.
    """
    engine = gateway.engine.sglang
    ranks, pool = engine.tensor_parallel_size, int(engine.memory_fraction * gpu)
    # Each GPU has the same share of experts, whole or split. Only the routers are whole on each
    # GPU.
    routers = model.num_layers * model.hidden_size * model.experts
    weights = ITEM[gateway.engine.dtype] * ((parameters(model) - routers) // ranks + routers)
    if weights >= pool:
        message = "gateway.engine.sglang.memory_fraction leaves no room for keys and values"
        allowed = f"more than the weights, {format_size(weights)}"
        raise ConfigError(message, seen=f"{format_size(pool)} of a GPU", allowed=allowed)
    parts = {"weights": weights, "keys and values": pool - weights}
    stays = 0 if engine.memory_saver else pool
    return ServicePlan("gateway", gateway.worker_count * ranks, parts, stays)


def layer_activations(model: ModelConfig) -> int:
    """Numbers per token that the backward of one decoder layer reads.

    They are the inputs of both norms, the attention with its inputs and outputs, and the gated MLP.
    Arrays with one number per token or head are ignored.
    """
    inner = model.experts_per_token * model.expert_size or model.intermediate_size
    return 8 * model.hidden_size + model.kv_width + 4 * inner


def policy_plan(model: ModelConfig, policy: Any, ranks: int, tokens: int) -> ServicePlan:
    """Memory of FSDP2 over `ranks` with float32 storage and forwards of `tokens` tokens, for the
    settings of a policy trainer.

    Each rank holds its share, the gathered weights, and the activations for backward. The critic is
    a model without a head, trained without adapters. The reference is an untrained model; with
    adapters it is the policy without its adapters.
    """
    count, layer, layers = parameters(model), layer_parameters(model), model.num_layers
    item, low_rank = ITEM[policy.compute_dtype], policy.adapters
    adapters = adapter_parameters(model, low_rank.rank, low_rank.targets)
    share = _share(count, ranks)
    trained = _share(adapters, ranks) if adapters else share
    moments = 2 * INT8 / FLOAT if policy.optimizer.moments == "int8" else 2  # per trained number
    kept = layer_activations(model)  # with recompute: of one layer, plus all layer inputs
    read = kept + layers * model.hidden_size if policy.recompute_activations else kept * layers
    rows = min(tokens, policy.rows_of_logits(model.vocab_size))
    parts = {
        "weights": share + (trained if adapters else 0),
        "gradients": trained,
        "optimizer": round(moments * trained),
        "gathered": 0,
        "activations": item * tokens * read,
        "logits": LOGITS * FLOAT * rows * model.vocab_size,
    }
    stays = parts["weights"] + parts["optimizer"]
    resharded = policy.reshard_after_forward
    # resharded: the layer, the next layer, and the unit of embedding and head
    ends = embedding_parameters(model)
    weights, gradients = (ends + 2 * layer, ends + layer) if resharded else (count, count)
    summed = min(gradients, adapters or gradients) if ranks > 1 or item != FLOAT else 0
    parts["gathered"] = item * (weights + adapters) + FLOAT * summed
    whole = 0 if resharded else item * count
    if policy.algorithm.name == "ppo":
        decoder = layers * layer + model.vocab_size * model.hidden_size
        own = _share(decoder, ranks)
        parts["critic"] = round((2 + moments) * own) + whole * decoder // count
        stays += round((1 + moments) * own)
    if policy.algorithm.kl.coefficient > 0 and not adapters:
        parts["reference"] = share + whole
        stays += share
    return ServicePlan("policy_trainer", ranks, parts, 0 if policy.offload else stays)


def _share(numbers: int, ranks: int) -> int:
    """Bytes of a rank's share of trained numbers, rounded up."""
    return -(-FLOAT * numbers // ranks)


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
    return ServicePlan("drafter_trainer", ranks, parts)


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


def format_size(size: int) -> str:
    """Formats a size as MiB."""
    return f"{size / 2**20:,.0f} MiB"
