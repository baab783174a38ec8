"""The tokens that a drafter can draft: of a large vocabulary, the run's most frequent ones.

A head of 49,152 rows costs more than the drafter's layer, in training and in each draft, while a
run uses few thousands of the tokens often.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from paceline.config import Config
from paceline.errors import InvalidInput, WeightsError
from paceline.models import loading
from paceline.models.config import ModelConfig
from paceline.speculators import packed
from paceline.speculators.net import DraftNet

MAP_DTYPES = {"d2t": torch.int64, "t2d": torch.bool}
"""The draft vocabulary's two tensors; all other tensors are weights."""
LARGE, DEFAULT_SIZE = 16_384, 8_192
"""Vocabularies with more tokens than LARGE are limited to DEFAULT_SIZE unless a size is given."""


def draft_size(chosen: int | None, vocab_size: int) -> int:
    """Number of draftable tokens for an option's value: 0 for all, None for the default."""
    if chosen is None:
        return DEFAULT_SIZE if vocab_size > LARGE else vocab_size
    return chosen or vocab_size


def frequent_tokens(counts: Tensor, size: int) -> Tensor:
    """The most frequent tokens: int64 [size] token ids, ascending. Among equal counts the lower id
    is chosen.

    counts int64 [V]: how often each token was a drafting target. Raises InvalidInput.
    """
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


class LimitedOptions(Config):
    """Settings of a network with a draft vocabulary."""

    draft_vocab_size: int | None = Field(default=None, ge=0)
    """Tokens it can draft; 0: all; none: 8,192 of a vocabulary above 16,384."""


class LimitedNet(DraftNet):
    """A drafter's network with the target's head, or a slice of it: see DraftNet."""

    config: ModelConfig
    """Shape of a layer."""
    options: Any
    d2t: Tensor
    t2d: Tensor
    _slice: Tensor | None = None

    def limit(self, token_ids: Tensor) -> None:
        """Limits drafts to these ascending token ids [Vd]. A checkpoint then holds d2t, int64 [Vd]
        (token id = draft id + d2t[draft id]), and t2d, bool [V].
        """
        device = self.head.device
        maps = token_maps(token_ids, self.config.vocab_size)
        for name, one in zip(MAP_DTYPES, maps, strict=True):
            self.register_buffer(name, one.to(device))
        self._slice = None

    @property
    def token_ids(self) -> Tensor | None:
        """See DraftNet.token_ids."""
        d2t, t2d = self._buffers.get("d2t"), self._buffers.get("t2d")
        if d2t is None or t2d is None or len(d2t) == len(t2d):
            return None
        return d2t + torch.arange(len(d2t), device=d2t.device)

    @property
    def draft_ids(self) -> Tensor | None:
        """int64 [V]: draft id of a token, -1 for a token that it cannot draft; None: token ids."""
        if self.token_ids is None:
            return None
        t2d = self.get_buffer("t2d")
        return torch.where(t2d, t2d.cumsum(0) - 1, -1)

    def draftable(self, row: packed.PackedRow) -> Tensor:
        """bool [T]: whether the policy's most likely token at a taught row can be drafted."""
        assert row.top_tokens is not None
        ids, first = self.draft_ids, row.top_tokens[:, 0].long()
        return torch.ones_like(row.valid) if ids is None else ids[first] >= 0

    def choose_tokens(self, counts: Tensor) -> None:
        """Limits drafts to the most frequent tokens, of the number that its options name. counts
        int64 [V]: how often each token was a drafting target. Raises InvalidInput.
        """
        size = draft_size(self.options.draft_vocab_size, self.config.vocab_size)
        if size < self.config.vocab_size:
            self.limit(frequent_tokens(counts, size))

    def follow_tokens(self, counts: Tensor) -> None:
        """See DraftNet.follow_tokens. Among equally frequent tokens the present ones stay."""
        if (present := self.token_ids) is not None:
            ranked = 2 * counts
            ranked[present] += 1
            self.limit(frequent_tokens(ranked, len(present)))

    def bind(self, embed: Tensor, head: Tensor) -> None:
        """See DraftNet.bind."""
        super().bind(embed, head)
        self._slice = None

    @property
    def drafted_head(self) -> Tensor:
        """The target's lm_head [Vd, H] of the draftable tokens."""
        ids = self.token_ids
        if ids is None:
            return self.head
        if self._slice is None:
            self._slice = self.head.index_select(0, ids.to(self.head.device))
        return self._slice

    def vocabulary_json(self) -> dict[str, Any]:
        """Entries of config.json for a draft vocabulary; none without."""
        ids = self.token_ids
        return {} if ids is None else {"draft_vocab_size": len(ids)}

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """See DraftNet.check; d2t and t2d must agree."""
        loading.check_tensors(tensors, self.shapes(), MAP_DTYPES)
        if "d2t" in tensors:
            check_maps(tensors["d2t"], tensors["t2d"])


Limited = TypeVar("Limited", bound=LimitedNet)


def with_tokens(net: Limited, target: ModelConfig) -> Limited:
    """A fresh network with its first draft vocabulary: end tokens and the lowest ids, which
    tokenizers give to frequent tokens.
    """
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    counts[list(target.eos_token_ids)] = 1
    net.choose_tokens(counts)
    return net


def of_size(net: Limited, raw: Mapping[str, Any]) -> Limited:
    """A network with room for the draft vocabulary of a checkpoint's config.json. Raises
    InvalidInput.
    """
    size, largest = raw.get("draft_vocab_size"), net.config.vocab_size
    if size is None:
        return net
    if type(size) is not int or not 0 < size <= largest:
        raise InvalidInput("draft_vocab_size", seen=size, allowed=f"1 to {largest}")
    net.limit(torch.arange(size))
    return net
