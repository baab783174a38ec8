"""Loads the policy, and runs it over packed rows to log-probs.

Shape letters: R rows, W row width, M trained tokens, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from paceline.training.hugging_face import load_causal_lm
from policy_trainer.algorithms.losses import token_entropy, token_logprobs
from policy_trainer.batches.batch import MicroBatch


class PolicyModel(nn.Module):
    """A transformers causal language model whose forward ends in log-probs at the trained positions
    only.

    The decoder runs with position ids and without an attention mask: transformers reads a position
    that does not continue its left neighbour as the start of a new document and masks attention
    across it.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, micro: MicroBatch) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
        """(log_softmax(logits / temperature)[target], entropy in nats, without gradient), in
        fp32.
        """
        hidden = self.lm.model(
            input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False
        ).last_hidden_state
        logits = (
            self.lm.lm_head(hidden.flatten(0, 1)[micro.predict_at]).float()
            / micro.temperatures[:, None]
        )
        return token_logprobs(logits, micro.targets), token_entropy(logits.detach())

    def layers(self) -> list[nn.Module]:
        """Decoder layers, the units of sharding."""
        return list(self.lm.model.layers)


def load_policy(directory: Path, *, recompute: bool = False) -> PolicyModel:
    """The model of a Hugging Face directory in fp32 master weights, on the CPU.

    recompute: keep of each decoder layer's forward its input alone (Chen et al. 2016, arXiv
    1604.06174). Raises ConfigError when the directory holds no Llama, Qwen2 or Qwen3 checkpoint.
    """
    lm = load_causal_lm(directory, torch.float32)
    lm.config.use_cache = False
    if recompute:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        lm.train()  # else transformers leaves it out; there is no dropout
    return PolicyModel(lm)
