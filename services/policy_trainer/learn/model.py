"""Loads the policy and its critic, and runs them over packed rows.

Shape letters: R rows, W row width, M trained tokens, U different ones, D hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from paceline.services.policy_trainer.batches.batch import MicroBatch
from paceline.services.policy_trainer.config import rows_of_head
from paceline.services.policy_trainer.learn.head import HeadKernel, head_logprobs
from paceline.services.policy_trainer.learn.loading import KERNELS, causal_lm_on_meta

MASKED = 2.5
"""What a multiplication in attention takes, in those of products: of masked rows on a CPU a core
does fewer a second (2.6 times, of the demo's policy).
"""


class PolicyModel(nn.Module):
    """A transformers causal language model whose forward ends in log-probs at the trained positions
    only.

    A trained token that several trajectories share is predicted once.
    """

    def __init__(self, lm: Any, chunk_rows: int = 0, *, head_kernel: HeadKernel = "torch") -> None:
        """chunk_rows, head_kernel: policy_trainer.head_rows and head_kernel."""
        super().__init__()
        self.lm = lm
        self._chunk_rows = chunk_rows or rows_of_head(lm.config.vocab_size)
        self._head_kernel = head_kernel

    def forward(
        self, micro: MicroBatch, *, entropy_gradient: bool = False
    ) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
        """(log_softmax(logits / temperature)[target], entropy in nats), in fp32.

        The head has no bias, so that hidden rows are divided in the place of logits.
        """
        hidden = hidden_rows(self.lm.model, micro)
        rows = hidden / micro.temperatures[:, None]
        logprobs, entropy = head_logprobs(
            rows.to(hidden.dtype),
            self.lm.lm_head,
            micro.targets,
            chunk_rows=self._chunk_rows,
            entropy_gradient=entropy_gradient,
            kernel=self._head_kernel,
        )
        return logprobs[micro.predictions], entropy[micro.predictions]

    @property
    def config(self) -> Any:
        """Of the decoder, as transformers has it."""
        return self.lm.config

    def layers(self) -> list[nn.Module]:
        """Decoder layers, the units of sharding."""
        return list(self.lm.model.layers)

    def names(self) -> dict[nn.Parameter, str]:
        """Parameters by what a Hugging Face directory calls them; tied ones once. Adapters, which
        stand in none, by what peft calls them.
        """
        return {
            one: name.removeprefix("lm.").replace(".base_layer.", ".")
            for name, one in self.named_parameters()
        }


class ValueModel(nn.Module):
    """A decoder and one number a token: zero everywhere before it has learned."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = nn.Linear(decoder.config.hidden_size, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, micro: MicroBatch) -> Float[Tensor, " M"]:
        """Value before each trained token is drawn, in fp32."""
        value: Tensor = self.head(hidden_rows(self.decoder, micro))
        value = value.float().sum(-1)  # of one; no view, which FSDP2 does not hook
        return value[micro.predictions]

    @property
    def config(self) -> Any:
        """Of the decoder, as transformers has it."""
        return self.decoder.config

    def layers(self) -> list[nn.Module]:
        """Decoder layers, the units of sharding."""
        return list(self.decoder.layers)

    def names(self) -> dict[nn.Parameter, str]:
        """Parameters of the decoder by what a Hugging Face directory calls them."""
        return {one: f"model.{name}" for name, one in self.decoder.named_parameters()}


def hidden_rows(decoder: Any, micro: MicroBatch) -> Float[Tensor, "U D"]:
    """Last hidden states at the positions that predict a trained token."""
    ids, positions, mask = micro.input_ids, micro.position_ids, None
    kernel = decoder.config._attn_implementation
    if kernel == KERNELS["flash"]:
        # It takes documents of any length, and finds them by their positions in a single row only.
        ids, positions = ids.view(1, -1), positions.view(1, -1)
    elif micro.subtree_ends is not None:
        mask = tree_mask(micro.subtree_ends, blocks=kernel == KERNELS["flex"])
    hidden: Tensor = decoder(
        input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False
    ).last_hidden_state
    return hidden.flatten(0, 1)[micro.predict_at]


def pair_cost(model: PolicyModel | ValueModel) -> float:
    """What one token's attention to another takes, in what all products of a token take.

    By their multiplications: scores and weighted sum against the weights of the layers.
    """
    config, layers = model.config, model.layers()
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    weights = sum(one.numel() for layer in layers for one in layer.parameters())
    return MASKED * 2 * width * len(layers) / weights


def tree_mask(subtree_ends: Int[Tensor, "R W"], *, blocks: bool) -> Any:
    """Which tokens of its row each one attends to, bool [R, 1, W, W]; in blocks as flex takes it.

    Transformers takes either as it is.
    """
    rows, width = subtree_ends.shape

    def attends(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < subtree_ends[row, key])

    if blocks:
        return create_block_mask(attends, rows, None, width, width, subtree_ends.device)
    at = torch.arange(width, device=subtree_ends.device)
    return (at <= at[:, None]) & (at[:, None] < subtree_ends[:, None, None, :])


def policy_on_meta(
    directory: Path,
    *,
    recompute: bool = False,
    chunk_rows: int = 0,
    head_kernel: HeadKernel = "torch",
    attention: str = "sdpa",
) -> PolicyModel:
    """The model of a Hugging Face directory in fp32, still without its numbers (loading.py).

    recompute: keep of each decoder layer's forward its input alone (Chen et al. 2016, arXiv
    1604.06174). chunk_rows, head_kernel: as PolicyModel has them. Raises what causal_lm_on_meta
    raises.
    """
    lm = causal_lm_on_meta(directory, attention)
    lm.config.use_cache = False
    if recompute:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        lm.train()  # else transformers leaves it out; there is no dropout
    return PolicyModel(lm, chunk_rows, head_kernel=head_kernel)


def critic_on_meta(directory: Path, *, attention: str = "sdpa") -> ValueModel:
    """A critic that will begin with the decoder of a Hugging Face directory. Raises as above."""
    return ValueModel(causal_lm_on_meta(directory, attention).model)
