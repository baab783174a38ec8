"""Log-probs and entropies of the head, and their gradients, against autograd's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.services.policy_trainer.learn.model import _Scores, head_logprobs


def drawn(rows: int = 5, vocabulary: int = 11) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(rows, vocabulary, generator=source, dtype=torch.float64)
    return logits, torch.randint(0, vocabulary, (rows,), generator=source)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_the_written_gradient_is_that_of_finite_differences(entropy_gradient: bool) -> None:
    logits, targets = drawn()

    def of(live: Tensor) -> tuple[Tensor, ...]:
        logprobs, entropy = _Scores.apply(live, targets, entropy_gradient)
        return (logprobs, entropy) if entropy_gradient else (logprobs,)

    assert torch.autograd.gradcheck(of, (logits.requires_grad_(),))


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("chunk_rows", [2, 5])
def test_scores_and_gradients_are_those_of_whole_logits(
    chunk_rows: int, entropy_gradient: bool
) -> None:
    logits, targets = drawn()
    hidden, weights = torch.eye(5), torch.linspace(-1, 1, 5)

    def gradient(live: Tensor, logprobs: Tensor, entropy: Tensor) -> Tensor:
        ((weights * logprobs).sum() + 0.3 * (weights**2 * entropy).sum()).backward()
        assert live.grad is not None
        return live.grad

    ours = logits.float().requires_grad_()
    found = head_logprobs(
        hidden,
        lambda rows: rows @ ours,
        targets,
        chunk_rows=chunk_rows,
        entropy_gradient=entropy_gradient,
    )
    whole = logits.clone().requires_grad_()
    scores = whole.log_softmax(-1)
    entropy = -(scores.exp() * scores).sum(-1)
    own = scores.gather(-1, targets[:, None])[:, 0]
    wanted = own, entropy if entropy_gradient else entropy.detach()
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one.double(), other, atol=1e-6)
    assert torch.allclose(gradient(ours, *found).double(), gradient(whole, *wanted), atol=1e-6)


def test_entropy_has_no_gradient_where_none_is_wanted() -> None:
    logits, targets = drawn()
    hidden = torch.eye(5, requires_grad=True)
    logprobs, entropy = head_logprobs(
        hidden, lambda rows: rows @ logits.float(), targets, chunk_rows=5
    )
    assert logprobs.requires_grad
    assert not entropy.requires_grad
