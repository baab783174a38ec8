"""Declares the settings of the policy trainer."""

from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import Field, PrivateAttr

from paceline.config import Config, OptimizerConfig, ServiceConfig
from paceline.errors import ConfigError
from paceline.services.policy_trainer.algorithm_settings import AnyAlgorithm, GrpoConfig


class PolicyOptimizerConfig(OptimizerConfig):
    """AdamW of the policy, and of a critic."""

    moments: Literal["float32", "int8"] = "float32"
    """Number format of the two moments. int8 takes a quarter of the memory, has no fused kernel and
    needs torchao (the extra `int8`).
    """


Linear = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class AdaptersConfig(Config):
    """Low-rank adapters (LoRA), trained instead of the policy's weights."""

    rank: int = Field(default=0, ge=0)
    """Rank of the two matrices per target; 0: the weights themselves are trained."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the adapters: alpha / rank."""
    targets: tuple[Linear, ...] = Field(default=get_args(Linear), min_length=1)
    """Linear layers with adapters, in each decoder layer."""
    publish: Literal["weights", "adapters"] = "weights"
    """Content of a push: weights with the product added, or adapters alone. Engines then add the
    product to their start policy, which must be the same files, stored in publish_dtype.
    """

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank


class AuditBound(NamedTuple):
    """Bounds of the gap between log-probs of engine and trainer, nats."""

    mean: float
    upper: float
    """Maximum 99th percentile of the absolute difference attributed to rounding, nats."""


class AuditConfig(Config):
    """The exactness audit: the trainer recomputes a sample of tokens in the policy version that
    drew them, and disables paths beyond their bound.
    """

    share: float = Field(default=0.01, ge=0.0, le=1.0)
    """Share of audited trajectories, chosen by a hash of their seeds; 0: no audit. Tokens from the
    step's start weights need no further forward.
    """
    least_tokens: int = Field(default=256, ge=100)
    """Minimum tokens of one path per verdict."""
    kept_versions: ClassVar[int] = 1
    """Number of earlier versions kept in CPU memory for their tokens, if `max_staleness` admits
    them. Tokens of older versions are not audited.
    """
    float32: ClassVar[AuditBound] = AuditBound(mean=5e-4, upper=5e-3)
    """Bound if engine and trainer compute in float32."""
    bfloat16: ClassVar[AuditBound] = AuditBound(mean=0.05, upper=1.0)
    """Bound if engine or trainer computes in 16 bits."""
    quantised: ClassVar[AuditBound] = AuditBound(mean=0.05, upper=1.0)
    """Bound if the engine rounds weights to int8."""
    coarse: ClassVar[AuditBound] = AuditBound(mean=0.2, upper=3.0)
    """Bound if the engine rounds weights to e4m3 or also rounds activations; also for SGLang's
    quantization, and for keys and values in fewer bits.
    """
    swapped: ClassVar[AuditBound] = AuditBound(mean=0.1, upper=2.0)
    """Bound after a commit "in_place": keys and values were computed under an earlier policy."""


LOGITS_BYTES = 256 << 20


def rows_of_head(vocabulary: int) -> int:
    """Rows with float32 logits of LOGITS_BYTES in total: 441 for a vocabulary of 152k."""
    return max(1, LOGITS_BYTES // (4 * vocabulary))


class PolicyTrainerConfig(ServiceConfig):
    """Settings of the policy trainer."""

    model: str = "examples/demo/policy_start"
    """Hugging Face directory of the start policy (Llama, Qwen2, Qwen3). A whole run without it
    takes gateway.model.
    """
    algorithm: AnyAlgorithm = GrpoConfig()
    optimizer: PolicyOptimizerConfig = PolicyOptimizerConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks; auto: CUDA if each rank has its own GPU."""
    ranks: int = Field(default=0, ge=0)
    """Number of ranks, each on its own slot. 0: min(2, cores); in a whole run on GPUs, the smaller
    number of slots and GPUs.
    """
    threads_per_rank: int = Field(default=1, ge=1)
    """Compute threads of a rank."""
    reshard_after_forward: bool = False
    """Whether a layer's gathered weights are freed between forward and backward, with sharded
    gradient sums: less memory, more communication.
    """
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of forward, backward and gathered weights. Weights, gradient sums and the
    optimiser's moments are always float32.
    """
    attention: Literal["sdpa", "flex"] = "sdpa"
    """Attention kernel. sdpa: torch's, which masks packed rows; flex: compiled, only CUDA, skips
    masked blocks.
    """
    offload: bool = False
    """Whether weights and moments move to CPU memory between steps: less GPU memory, two copies per
    step.
    """
    recompute_activations: bool = False
    """Whether only a layer's input is kept for the backward: less memory, one more forward."""
    tokens_per_micro_batch: int = Field(default=4096, ge=1)
    """Maximum tokens of a rank's forward, padding included."""
    row_tokens: int = Field(default=0, ge=0)
    """Tokens of a packed row; a longer trajectory has its own row. Shared beginnings of a group in
    one row are computed once. 0: the width with the shortest
    predicted step for each batch, up to 4,096.
    """
    head_rows: int = Field(default=0, ge=0)
    """Maximum tokens per chunk of logits; the backward recomputes chunks. 0: as many as fit 256 MiB
    of float32 logits.
    """
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of pushed weights."""
    publish_deltas: Literal["auto", "never"] = "auto"
    """Push of changed weights only; receivers get the same bits. `auto`: if these take at most a
    sixteenth of the bytes; `never`. With `auto`, each rank keeps its rows of the last version
    beside the pushed version.
    """
    push_head: bool = True
    """Whether embed_tokens and lm_head are also pushed to the drafter trainer."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Maximum policy versions between the oldest token of a group and the trained weights; older
    groups are dropped whole. Empty: coordinator.max_policy_lag in a whole run, else 0.
    """
    audit: AuditConfig = AuditConfig()
    group_filter: str = ""
    """Your own filter of groups, module:function or file.py:function. It receives the trajectories
    of a group; groups with the answer False are dropped as "filtered".
    """
    checkpoint_interval_steps: int = Field(default=10, ge=1)
    """RL steps between checkpoints."""
    ledger_keep: int = Field(default=16, ge=0)
    """Number of checkpointed steps with single trajectories in Redis; older steps keep only totals.
    """
    resume: bool = True
    """Whether the run continues from its directory; false: a directory with a run is refused."""
    start_deadline_s: float = Field(default=120.0, gt=0)
    """Maximum time without progress while ranks load the model or replay steps, seconds: CPU time
    while they work, else wall time.
    """
    step_deadline_s: ClassVar[float] = 3600.0
    """Maximum wait of a collective, and of a step after its groups are closed, seconds."""

    _node: int = PrivateAttr(default=0)

    @property
    def node(self) -> int:
        """Number of this process's node among run.policy_nodes; node 0 serves."""
        return self._node

    def of_node(self, node: int) -> Self:
        """The settings of the process on one node. Raises ConfigError if there is no such node."""
        if not 0 <= node < self.run.policy_nodes:
            allowed = f"0..{self.run.policy_nodes - 1}"
            raise ConfigError("run.policy_nodes: there is no such node", seen=node, allowed=allowed)
        own = self.model_copy()
        own._node = node
        return own

    @property
    def checkpoints_dir(self) -> Path:
        """Directory of the run's checkpoints and batch records."""
        return Path(self.run.dir) / "checkpoints" / "policy"

    def rows_of_logits(self, vocabulary: int) -> int:
        """Maximum tokens with logits in memory at once."""
        return self.head_rows or rows_of_head(vocabulary)
