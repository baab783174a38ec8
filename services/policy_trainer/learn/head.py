"""Runs the language-model head over hidden rows, chunk by chunk.

Shape letters: M rows, D hidden size, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from paceline.services.policy_trainer.algorithms.losses import token_entropy, token_logprobs

Head = Callable[[Float[Tensor, "C D"]], Float[Tensor, "C V"]]
HeadKernel = Literal["torch", "compiled", "cut_cross_entropy"]
"""See policy_trainer.head_kernel."""
_Scored = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]]


def head_logprobs(
    hidden: Float[Tensor, "M D"],
    head: Head,
    targets: Int[Tensor, " M"],
    *,
    chunk_rows: int,
    entropy_gradient: bool = False,
    kernel: HeadKernel = "torch",
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
    """Log-prob of each target and entropy in nats, in fp32. The entropy has a gradient only with
    `entropy_gradient`.

    Memory holds the logits of one chunk at most. With several chunks, they are computed again in
    the backward (Chen et al. 2016, arXiv 1604.06174). Cut cross-entropy has no chunks, and
    estimates the entropy by -log p of the target. Its mean over targets drawn by the model itself
    equals the entropy.
    """
    if kernel == "cut_cross_entropy":
        assert isinstance(head, nn.Linear)
        assert not entropy_gradient
        logprobs = _cut_logprobs(hidden, head.weight, targets)
        return logprobs, -logprobs.detach()

    scored = _compiled() if kernel == "compiled" else _scored

    def of_chunk(rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        return scored(head(rows), wanted, entropy_gradient)

    chunks = list(zip(hidden.split(chunk_rows), targets.split(chunk_rows), strict=True))
    again = torch.is_grad_enabled() and len(chunks) > 1
    parts = [
        checkpoint(of_chunk, *one, use_reentrant=False) if again else of_chunk(*one)
        for one in chunks
    ]
    scores, entropies = zip(*parts, strict=True)
    return torch.cat(scores), torch.cat(entropies)


def _cut_logprobs(
    hidden: Float[Tensor, "M D"], weight: Float[Tensor, "V D"], targets: Int[Tensor, " M"]
) -> Float[Tensor, " M"]:
    """Log-prob of each target in fp32, by a kernel that sums logits as it computes them (Wijmans et
    al. 2024, arXiv 2411.09009). Values too small for bfloat16 are left out of the gradient.
    """
    from cut_cross_entropy import linear_cross_entropy  # imports triton

    negative: Tensor = linear_cross_entropy(hidden, weight, targets, reduction="none")
    return -negative.float()


class _Scores(torch.autograd.Function):
    """Equal to `_plain` in half as many passes over tensors of the logits' size, with an explicit
    gradient.

    With p the distribution, H its entropy and y the target: d log p_y / dz = 1_y - p, and dH / dz =
    -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: Tensor, targets: Tensor, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(logits, dim=-1)
        probs = logprobs.exp()
        entropy = torch.einsum("cv,cv->c", probs, logprobs).neg()
        kept = (logprobs, entropy) if entropy_gradient else ()
        ctx.save_for_backward(targets, probs, *kept)
        return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy

    @staticmethod
    def backward(ctx: Any, of_logprob: Tensor, of_entropy: Tensor) -> tuple[Tensor, None, None]:
        targets, probs, *kept = ctx.saved_tensors
        if kept:
            logprobs, entropy = kept
            whole = (logprobs + entropy[:, None]).mul_(-of_entropy[:, None])
            whole.sub_(of_logprob[:, None]).mul_(probs)
        else:
            whole = probs * -of_logprob[:, None]
        return whole.scatter_add_(-1, targets[:, None], of_logprob[:, None]), None, None


def _scored(
    logits: Float[Tensor, "C V"], targets: Int[Tensor, " C"], entropy_gradient: bool
) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"]]:
    logprobs, entropy = _Scores.apply(logits.float(), targets, entropy_gradient)
    return logprobs, entropy if entropy_gradient else entropy.detach()


def _plain(
    logits: Float[Tensor, "C V"], targets: Int[Tensor, " C"], entropy_gradient: bool
) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"]]:
    logits = logits.float()
    entropy = token_entropy(logits if entropy_gradient else logits.detach())
    return token_logprobs(logits, targets), entropy


@cache
def _compiled() -> _Scored:
    made: _Scored = torch.compile(_plain, dynamic=True)
    return made
