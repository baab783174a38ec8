"""Runs the language-model head over hidden rows, a chunk at a time.

Shape letters: M rows, D hidden size, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from policy_trainer.algorithms.losses import token_entropy, token_logprobs

Head = Callable[[Float[Tensor, "C D"]], Float[Tensor, "C V"]]


def head_logprobs(
    hidden: Float[Tensor, "M D"],
    head: Head,
    targets: Int[Tensor, " M"],
    *,
    chunk_rows: int,
    entropy_gradient: bool = False,
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
    """Log-prob of each target and entropy in nats, in fp32; of the entropy there is a gradient only
    where it is wanted.

    At most one chunk's logits are there at once: where there are more chunks than one they are
    computed again in the backward (Chen et al. 2016, arXiv 1604.06174).
    """

    def of_chunk(rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(rows).float()
        entropy = token_entropy(logits if entropy_gradient else logits.detach())
        return token_logprobs(logits, wanted), entropy

    chunks = list(zip(hidden.split(chunk_rows), targets.split(chunk_rows), strict=True))
    again = torch.is_grad_enabled() and len(chunks) > 1
    parts = [
        checkpoint(of_chunk, *one, use_reentrant=False) if again else of_chunk(*one)
        for one in chunks
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
