"""The reduced vocabulary of a drafter: its choice, its maps d2t and t2d, and their checks."""

import torch
from torch import Tensor

from paceline.errors import InvalidInput, WeightsError


def frequent_tokens(counts: Tensor, size: int) -> Tensor:
    """The most frequent tokens: int64 [size] token ids, ascending. Among equal counts the lower id
    is chosen.

    counts int64 [V]: how often each token was a drafting target. Raises InvalidInput.
    """
    if counts.dim() != 1 or counts.dtype != torch.int64 or bool((counts < 0).any()):
        raise InvalidInput(
            "counts of tokens",
            seen=f"{counts.dtype} {tuple(counts.shape)}",
            allowed="int64 [V], >= 0",
        )
    if not 0 < size <= len(counts):
        raise InvalidInput("size of a draft vocabulary", seen=size, allowed=f"1 to {len(counts)}")
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def token_maps(token_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """d2t int64 [Vd], offsets: token id = draft id + d2t[draft id]; and t2d bool [V]. Both are from
    ascending ids [Vd].
    """
    draft_ids = torch.arange(len(token_ids), device=token_ids.device)
    drafted = torch.zeros(vocab_size, dtype=torch.bool, device=token_ids.device)
    drafted[token_ids] = True
    return token_ids - draft_ids, drafted


def check_maps(d2t: Tensor, t2d: Tensor) -> None:
    """Raises WeightsError when d2t leaves the vocabulary, is not ascending, or
    disagrees with t2d.
    """
    token_ids = d2t + torch.arange(len(d2t), device=d2t.device)
    outside = token_ids[(token_ids < 0) | (token_ids >= len(t2d))]
    if len(outside):
        raise WeightsError(
            "d2t names a token outside the vocabulary",
            seen=int(outside[0]),
            allowed=f"< {len(t2d)}",
        )

    if bool((token_ids.diff() <= 0).any()):
        raise WeightsError(
            "d2t is not ascending", seen=token_ids[:8].tolist(), allowed="ascending token ids"
        )

    if not torch.equal(token_maps(token_ids, len(t2d))[1], t2d):
        raise WeightsError(
            "t2d and d2t name other tokens",
            seen=f"t2d: {int(t2d.sum())} tokens",
            allowed=f"the {len(d2t)} of d2t",
        )


def over_tokens(logits: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    """Logits [..., V] by token, from logits [..., Vd] of the tokens int64 [Vd]; -inf for all other
    tokens.
    """
    full = logits.new_full((*logits.shape[:-1], vocab_size), float("-inf"))
    full[..., token_ids] = logits
    return full
