"""Computes what a run on many GPUs moves, keeps and waits for: bytes, memory and seconds, of dense
models and mixtures of experts.

Nothing here is measured. Seconds are lower bounds by what the hardware can do at best, times the
shares of it in `Hardware`: no message, no imbalance, no tensor-parallel traffic. Memory is what
`memory_plan` counts. Work grows with the GPUs, so that a step stays as long.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.errors import InvalidInput
from paceline.local.memory_plan import (
    FLOAT,
    LIBRARIES,
    PolicySizes,
    ServicePlan,
    layer_parameters,
    parameters,
    policy_plan,
    sglang_plan,
)
from paceline.local.push_tree import Network, direct_s, tree_s
from paceline.models.config import ModelConfig

HALF = 2
"""Bytes of a number in bfloat16: served, pushed and computed with."""
HOST_GPUS = 8
TOKEN_BYTES = 4 + 1 + 4
"""Of a trajectory's token in the stream: id, mask, log-prob (docs/streams.md)."""
CAPTURED_LAYERS = 3
"""Whose hidden states are a row of the features, as drafters of the kind EAGLE-3 read them."""


@dataclass(frozen=True, slots=True)
class ScaledModel:
    """A model by its shape; of a mixture `shape.intermediate_size` is that of one expert."""

    name: str
    shape: ModelConfig
    tensor_parallel: int
    """GPUs of an engine worker."""
    experts: int = 1  # of a layer
    used: int = 1  # of them, by a token

    def __post_init__(self) -> None:
        if not 1 <= self.used <= self.experts:
            allowed = f"1 to {self.experts}, the experts"
            raise InvalidInput("a token goes through experts", seen=self.used, allowed=allowed)

    @property
    def stored(self) -> ModelConfig:
        """A dense shape with as many weights; the router's, hidden x experts a layer, are no
        matter.
        """
        return replace(self.shape, intermediate_size=self.experts * self.shape.intermediate_size)

    @property
    def active(self) -> ModelConfig:
        """A dense shape with the weights that one token is multiplied with."""
        return replace(self.shape, intermediate_size=self.used * self.shape.intermediate_size)

    def read(self, requests: float) -> float:
        """Weights that a round of so many requests, a token each, reads: of the experts those that
        one of them has chosen, were the choice even: experts (1 - (1 - used / experts)^requests).
        The embedding is read by row.
        """
        touched: float = self.experts * (1 - (1 - self.used / self.experts) ** requests)
        one = replace(self.shape, intermediate_size=0)
        expert = layer_parameters(self.shape) - layer_parameters(one)
        layers = self.shape.num_layers * (layer_parameters(one) + touched * expert)
        return layers + self.shape.vocab_size * self.shape.hidden_size


@dataclass(frozen=True, slots=True)
class Hardware:
    """A GPU (H100 SXM, its data sheet's dense bfloat16) and what of its best is reached."""

    memory: int = 80 << 30
    flops: float = 989e12
    read_bytes_s: float = 3.35e12
    computed: float = 0.4
    """Share of the operations, by a trainer or a full batch."""
    read: float = 0.75
    """Share of the bytes a second, by a decode round: 7B in 6.07 ms (TLT, table 2)."""
    pool: float = 0.85
    """Of a GPU, that an engine takes while it serves."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step asks of each GPU; the lengths are log-normal as in the simulations."""

    samples: int = 64
    prompt: int = 512
    response: int = 1849
    """Tokens on the mean: 900 exp(1.2^2 / 2)."""
    longest: int = 32_768


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """One model on a number of GPUs, on which rollouts and policy take turns."""

    model: ScaledModel
    gpus: int
    hardware: Hardware = Hardware()
    work: StepWork = StepWork()
    network: Network = field(default_factory=Network)

    @property
    def hosts(self) -> int:
        """Of eight GPUs."""
        return -(-self.gpus // HOST_GPUS)

    @property
    def tokens(self) -> int:
        """Of a step, prompts included."""
        return self.gpus * self.work.samples * (self.work.prompt + self.work.response)

    @property
    def engine(self) -> ServicePlan:
        """A GPU of a worker, whose memory the engine gives back to the trainers."""
        degree = self.model.tensor_parallel
        pool = round(self.hardware.pool * self.hardware.memory)
        return sglang_plan(
            self.model.stored,
            workers=self.gpus // degree,
            tensor_parallel=degree,
            item=HALF,
            pool=pool,
            saver=True,
        )

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token on each GPU of a worker: of a head at least, whose copies
        several GPUs have where there are fewer heads.
        """
        shape, degree = self.model.shape, self.model.tensor_parallel
        heads = max(1, -(-shape.num_kv_heads // degree))
        return HALF * shape.num_layers * 2 * heads * shape.head_dim

    @property
    def cached_tokens(self) -> int:
        """That a worker has room for."""
        return self.engine.parts["keys and values"] // self.token_bytes

    @property
    def policy(self) -> ServicePlan:
        """A rank, one a GPU: bfloat16 is computed with, weights are gathered layer by layer, and of
        activations the inputs of layers are kept; a row has room for the longest trajectory. A
        mixture keeps what its used experts read.
        """
        tokens = self.work.prompt + self.work.longest
        sizes = PolicySizes(reshard=True, recompute=True, item=HALF)
        plan, read = (
            policy_plan(shape, ranks=self.gpus, tokens=tokens, settings=sizes)
            for shape in (self.model.stored, self.model.active)
        )
        return replace(plan, parts={**plan.parts, "activations": read.parts["activations"]})

    @property
    def fits(self) -> bool:
        """Whether the policy's turn fits a GPU, beside what CUDA and NCCL keep for the engine and
        for both trainers.
        """
        return self.policy.total + 3 * LIBRARIES <= self.hardware.memory

    @property
    def push_bytes(self) -> int:
        """A version as it is pushed, whole."""
        return HALF * parameters(self.model.stored)

    @property
    def checkpoint_bytes(self) -> int:
        """Weights and both moments in float32."""
        return 3 * FLOAT * parameters(self.model.stored)

    @property
    def trajectory_bytes(self) -> int:
        """All tokens of a step in the stream."""
        return TOKEN_BYTES * self.tokens

    @property
    def feature_bytes(self) -> int:
        """Hidden states of all tokens of a step, if all were captured."""
        return HALF * CAPTURED_LAYERS * self.model.shape.hidden_size * self.tokens

    def round_s(self, requests: float, context: float, tokens: int = 1) -> float:
        """Of a decode round with so many requests of so long a context, each with so many new
        tokens: weights, keys and values are read once, or the products take longer.
        """
        degree, hardware = self.model.tensor_parallel, self.hardware
        multiplied = requests * tokens
        read = HALF * self.model.read(multiplied) / degree + requests * context * self.token_bytes
        products = 2 * parameters(self.model.active) * multiplied / degree
        return max(
            read / (hardware.read * hardware.read_bytes_s),
            products / (hardware.computed * hardware.flops),
        )

    @property
    def tail_s(self) -> float:
        """The longest response, alone on its worker: no rollout ends sooner."""
        return self.work.longest * self.round_s(1, self.work.prompt + self.work.longest / 2)

    @property
    def requests(self) -> int:
        """Of a worker at once: all of its share, or as many as it has room for at the mean."""
        share = self.work.samples * self.model.tensor_parallel
        room = self.cached_tokens // (self.work.prompt + self.work.response)
        return min(share, room)

    @property
    def busy_s(self) -> float:
        """A worker's share in full batches: no rollout ends sooner either."""
        share = self.work.samples * self.model.tensor_parallel
        context = self.work.prompt + self.work.response / 2
        rounds = share / self.requests * self.work.response
        return rounds * self.round_s(self.requests, context)

    @property
    def train_s(self) -> float:
        """Eight operations a token and active weight: forward, again for what was not kept, and
        twice backward. The products of the attention itself are left out.
        """
        operations = 8 * parameters(self.model.active) * self.tokens
        return operations / (self.gpus * self.hardware.computed * self.hardware.flops)

    @property
    def direct_s(self) -> float:
        """A version from one host to all others, one copy each."""
        return direct_s(self.push_bytes, self.hosts - 1, self.network)

    def tree_s(self, arity: int) -> float:
        """A version from one host to all others by a tree."""
        return tree_s(self.push_bytes, self.hosts - 1, arity, self.network)


def fewest_gpus(model: ScaledModel) -> int:
    """The smallest power of two on which the policy's turn fits. Raises InvalidInput for a model
    that fits on none up to 2^20.
    """
    for power in range(21):
        if ScalePlan(model, 1 << power).fits:
            return 1 << power
    raise InvalidInput("a layer is too large for a GPU", seen=model.name)


def _shape(
    vocabulary: int, hidden: int, intermediate: int, layers: int, *, heads: int, kv_heads: int
) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=32_768,
    )


MODELS = (
    ScaledModel("7B", _shape(152_064, 3584, 18_944, 28, heads=28, kv_heads=4), tensor_parallel=1),
    ScaledModel("32B", _shape(152_064, 5120, 27_648, 64, heads=40, kv_heads=8), tensor_parallel=4),
    ScaledModel(
        "235B-A22B",
        _shape(151_936, 4096, 1536, 94, heads=64, kv_heads=4),
        tensor_parallel=8,
        experts=128,
        used=8,
    ),
)
"""Shaped as Qwen2.5-7B, Qwen2.5-32B and Qwen3-235B-A22B, by their config.json."""
GPUS = (8, 64, 1024)
