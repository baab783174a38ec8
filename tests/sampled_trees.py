"""Trees of sampled drafts: what rejection.py's rule walks, grown level by level."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.models.sampling import DrawParams
from paceline.services.rollout_gateway.engines.embedded.rejection import sample_drafts


@dataclass(frozen=True, slots=True)
class SampledTree:
    """Drafts of B rows; Q nodes, the root and every draft, parents first.

    It grows by whole levels and cannot lose a token: whether a draft is kept may not depend on
    which one it is, or the output is not p. Every prune comes before the draw: choose depth and
    `count`, then grow.
    """

    tokens: Tensor
    """int64 [B, Q]: token at each node; the root's is the last known one; -1 where there is none.
    """
    parents: Tensor
    """int64 [B, Q]: parent of each node, the root's is itself; siblings stand in the order drawn.
    """
    probs: Tensor
    """float64 [B, Q, V]: q of each node's children; zero where nothing has been drawn."""
    leaves: int
    """Nodes of the last level."""

    @classmethod
    def of(cls, tokens: Tensor, vocab: int) -> SampledTree:
        """Roots alone: tokens int64 [B], the last known token of each row."""
        batch, device = len(tokens), tokens.device
        parents = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        return cls(
            tokens[:, None],
            parents,
            torch.zeros(batch, 1, vocab, dtype=torch.float64, device=device),
            1,
        )

    def grow(
        self, draft_logits: Tensor, positions: Tensor, params: DrawParams, count: int
    ) -> SampledTree:
        """The tree with `count` children drawn at every leaf.

        draft_logits [B, leaves, V]: the drafter's at the leaves; positions int64 [B, leaves]:
        absolute position of the children; params: B leaves rows. Raises InvalidInput when count is
        not 1 .. V.
        """
        batch, nodes = self.tokens.shape
        vocab = self.probs.shape[-1]
        drawn = sample_drafts(draft_logits.reshape(-1, vocab), positions.reshape(-1), params, count)
        first = nodes - self.leaves
        parents = (
            torch.arange(first, nodes, device=self.tokens.device)
            .repeat_interleave(count)
            .expand(batch, -1)
        )
        return SampledTree(
            torch.cat((self.tokens, drawn.tokens.view(batch, -1)), dim=1),
            torch.cat((self.parents, parents), dim=1),
            functional.pad(
                torch.cat((self.probs[:, :first], drawn.probs.view(batch, -1, vocab)), dim=1),
                (0, 0, 0, self.leaves * count),
            ),
            self.leaves * count,
        )
