"""Declares the settings of the policy trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from paceline.config import Config, OptimizerConfig, ServiceConfig
from paceline.services.policy_trainer.algorithm_settings import AnyAlgorithm, GrpoConfig


class PolicyOptimizerConfig(OptimizerConfig):
    """AdamW of the policy, and of a critic."""

    moments: Literal["float32", "int8"] = "float32"
    """Numbers that the two moments are kept in; int8 takes a quarter of the memory, by torchao (the
    extra `int8`).
    """


class AdaptersConfig(Config):
    """Low-rank adapters that are trained in the place of the policy's weights (LoRA)."""

    rank: int = Field(default=0, ge=0)
    """Rank of the two matrices beside each target; 0 trains the weights themselves."""
    alpha: float = Field(default=32.0, gt=0)
    """What they add is multiplied by alpha / rank."""
    targets: tuple[
        Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], ...
    ] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
    )
    """Linear layers of each decoder layer that have them."""
    publish: Literal["weights", "adapters"] = "weights"
    """What is pushed: whole weights with the product added, or the adapters alone, which engines
    add to the start policy they hold. That must be the same files, stored in publish_dtype.
    """

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank


class AuditBound(NamedTuple):
    """Largest distance of the engine's log-probs from the trainer's that is rounding, in nats."""

    mean: float
    upper: float
    """The 99th percentile."""


class AuditConfig(Config):
    """The exactness audit: the trainer scores a sample of the tokens again, in the policy version
    that drew them. A way of drawing that is beyond its bound is turned off.
    """

    share: float = Field(default=0.01, ge=0.0, le=1.0)
    """Share of the trajectories, drawn by a hash of their seeds; 0 switches the audit off. Tokens
    of the weights that a step starts from are not computed again for it.
    """
    least_tokens: int = Field(default=256, ge=100)
    """Tokens drawn alike that a verdict rests on."""
    kept_versions: ClassVar[int] = 1
    """Earlier versions of the weights that stay in the CPU's memory for the tokens which they drew,
    where `max_staleness` lets such tokens in; tokens of older ones are not audited.
    """
    float32: ClassVar[AuditBound] = AuditBound(mean=5e-4, upper=5e-3)
    """Where engine and trainer compute in float32."""
    bfloat16: ClassVar[AuditBound] = AuditBound(mean=0.05, upper=1.0)
    """Where one of them computes in 16 bits."""
    quantised: ClassVar[AuditBound] = AuditBound(mean=0.05, upper=1.0)
    """Where the engine rounds weights to int8."""
    coarse: ClassVar[AuditBound] = AuditBound(mean=0.2, upper=3.0)
    """Where it rounds weights to e4m3, or activations too; SGLang's quantization, and keys and
    values in fewer bits.
    """
    swapped: ClassVar[AuditBound] = AuditBound(mean=0.1, upper=2.0)
    """Behind a commit "in_place": keys and values that were computed under an earlier policy."""


LOGITS_BYTES = 256 << 20


def rows_of_head(vocabulary: int) -> int:
    """Rows whose logits fill LOGITS_BYTES in float32: 441 of a vocabulary of 152k."""
    return max(1, LOGITS_BYTES // (4 * vocabulary))


class PolicyTrainerConfig(ServiceConfig):
    """The policy trainer's tree."""

    model: str = "examples/demo/policy_start"
    """Hugging Face directory of the start policy (Llama, Qwen2, Qwen3)."""
    algorithm: AnyAlgorithm = GrpoConfig()
    optimizer: PolicyOptimizerConfig = PolicyOptimizerConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the ranks compute; auto takes CUDA where each of them has a GPU of its own."""
    ranks: int = Field(default=0, ge=0)
    """Number of ranks, each on a slot; 0 is min(2, cores), in a whole run on GPUs as many as there
    are of slots and GPUs. `paceline set-ranks` changes it while a run goes on.
    """
    hosts: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Ranks on each host, the trainer's own first; empty: all on that. The others run
    `python -m paceline.services.policy_trainer.rank_host`, each with its number. No host gets more
    by `paceline set-ranks`.
    """
    interface: str = ""
    """Network interface by which ranks on this host reach those on others; empty: the one of the
    trainer's address, on another host the one that leads there.
    """
    threads_per_rank: int = Field(default=1, ge=1)
    """Compute threads of a rank."""
    reshard_after_forward: bool = False
    """Free a layer's gathered weights between forward and backward, and add up gradients in shards:
    less memory, more communication.
    """
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Numbers that forward and backward compute with, and ranks gather; weights, their gradients'
    sums and the optimiser's moments are float32 in either case.
    """
    attention: Literal["sdpa", "flex", "flash"] = "sdpa"
    """Kernel of the attention: torch's own, which masks a packed row; flex, compiled and on CUDA
    only, which skips what is masked; flash, where the package flash_attn is installed.
    """
    offload: bool = False
    """Keep weights and moments in the CPU's memory between steps, while others have the slots: less
    memory of the GPU, two copies a step.
    """
    recompute_activations: bool = False
    """Keep of a layer's forward its input alone, and compute the rest again for the backward: less
    memory, one more forward.
    """
    tokens_per_micro_batch: int = Field(default=4096, ge=1)
    """Most tokens of a rank's forward, padding included."""
    row_tokens: int = Field(default=0, ge=0)
    """Tokens of a packed row; a longer trajectory has a row of its own. What a group's trajectories
    in one row begin with alike is computed once, but with attention "flash". 0: for each batch the
    width, up to 4,096, that promises the shortest step.
    """
    head_rows: int = Field(default=0, ge=0)
    """Tokens whose logits are computed at once; more of them in chunks, which are computed again in
    the backward. 0: as many as have 256 MiB of logits in float32.
    """
    head_kernel: Literal["torch", "compiled", "cut_cross_entropy"] = "torch"
    """What turns the head's hidden rows into log-probs and entropy. compiled: one kernel reads the
    logits once and keeps nothing of their size (torch.compile); the first step takes seconds more.
    cut_cross_entropy: there are no logits at all, on CUDA and in bfloat16; entropy is then what the
    trained tokens tell of it, the mean of their -log p, and cannot be rewarded.
    """
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of pushed weights."""
    publish_deltas: Literal["auto", "always", "never"] = "auto"
    """Push what has changed since the version before in the place of all weights; receivers get the
    same bits. `auto`: where that is faster, judged by the last whole push; `always`: where at most
    a tenth has changed, for networks whose bytes count; `never`. But for `never` each rank keeps
    its rows of that version: a file without a name beside the one of the version that is pushed.
    """
    push_head: bool = True
    """Also push embed_tokens and lm_head to the drafter trainer."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Policy versions that the oldest token of a group may lie behind the weights trained; a group
    with an older one is not trained at all. Empty: coordinator.max_policy_lag in a whole run, else
    0.
    """
    audit: AuditConfig = AuditConfig()
    group_filter: str = ""
    """Your own choice of the groups that are trained, module:function or file.py:function: asked of
    the trajectories of each that would be. Those it says False of are dropped as "filtered".
    """
    checkpoint_interval_steps: int = Field(default=10, ge=1)
    """Steps between checkpoints."""
    checkpoint_keep: ClassVar[int] = 2
    """Newest checkpoints kept; beside them the one with the best held-out accuracy (best.json)."""
    ledger_keep: int = Field(default=16, ge=0)
    """Steps whose trajectories Redis still names one by one when checkpoints hold them; of older
    ones it keeps the totals.
    """
    resume: bool = True
    """Continue from the run's directory where it holds something; false refuses to start on one
    that does.
    """
    start_deadline_s: float = Field(default=120.0, gt=0)
    """Seconds that ranks may load the model, or replay what the checkpoint misses, without
    progress: of their processors while they work, else of the clock.
    """
    step_deadline_s: float = Field(default=3600.0, gt=0)
    """Longest wait of a collective, and of a step after its groups are closed."""

    @property
    def checkpoints_dir(self) -> Path:
        """Where checkpoints and batch records of the run lie."""
        return Path(self.run.dir) / "checkpoints" / "policy"

    def rows_of_logits(self, vocabulary: int) -> int:
        """Tokens whose logits are there at once."""
        none = self.head_kernel == "cut_cross_entropy"
        return 0 if none else self.head_rows or rows_of_head(vocabulary)
