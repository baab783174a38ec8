"""A drafter of one decoder layer that drafts token by token, and its training-time test."""

from abc import abstractmethod
from collections.abc import Iterator

from pydantic import Field
from torch import Tensor
from torch.nn import functional

from paceline.speculators import layer_net, packed, vocabulary
from paceline.speculators.net import Objective, soft_losses


class ChainOptions(vocabulary.LimitedOptions):
    """Settings of a network that drafts token by token."""

    ttt_steps: int = Field(default=7, ge=1, le=7)
    """Steps of a draft chain that are trained."""
    ttt_decay: float = Field(default=0.8, gt=0, le=1)
    """Weight of a step, relative to the one before."""


class ChainNet(layer_net.LayerNet):
    """A network of one layer that drafts token by token: a step reads the step before."""

    chain_steps: int
    """Trained steps of a draft chain."""
    token_weight = 1.0
    """Weight of the soft cross-entropy on tokens."""

    def forward(self, row: packed.PackedRow) -> Objective:
        """See DraftNet.forward: the training-time test (Li et al. 2025, arXiv 2503.01840), sum over
        steps i of ttt_decay^i loss_i.

        Step i at position t is for the draft of token t + 2 + i. It counts if that token is a
        drafting target; its tokens are taught if their distribution peaks at a draftable token.
        Positions are the row's drafting targets. `correct` and `alpha` are of the first draft, with
        tokens outside the draft vocabulary as misses.
        """
        row = row.taught(self.head)
        chain = self.unroll(row, self.chain_steps)
        losses, (terms, *_) = zip(*(self.objective(row, *step) for step in chain), strict=True)
        of_steps = {f"loss_{step}": loss.detach() for step, loss in enumerate(losses)}
        loss = sum(self.options.ttt_decay**step * loss for step, loss in enumerate(losses))
        return Objective(loss, row.valid.sum(), of_steps | terms)

    def objective(
        self, row: packed.PackedRow, features: Tensor, there: Tensor, inside: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of one step with features [T, H] for a taught row, see forward, and its terms."""
        wanted = inside & row.valid[there]
        loss, terms = self.regression(features[wanted], row.next_states[there[wanted]])
        taught = wanted & self.draftable(row)[there]
        losses, right, alpha = soft_losses(
            self.logits(features[taught]), row, there[taught], self.draft_ids
        )
        terms |= {"correct": right.sum(), "alpha": alpha.sum()}
        return loss + self.token_weight * losses.sum(), terms

    def regression(self, features: Tensor, states: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of outputs beside the target's states, [N, H] each, and its terms; here none."""
        return features.new_zeros(()), {}

    @abstractmethod
    def fused(self, states: Tensor) -> Tensor:
        """Features [T, H] that the first step reads, from the states [T, .] of the target."""

    @abstractmethod
    def step(self, embedded: Tensor, features: Tensor, *sight: *layer_net.Sight) -> Tensor:
        """The layer's output [B, T, H], from embedded tokens and features [B, T, H] each."""

    def features(
        self,
        features: Tensor,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        chain: layer_net.Chain | None = None,
    ) -> Tensor:
        """The layer's output [B, T, H], which the next step reads.

        features [B, T, H]: fused states, or its own output of the previous step; tokens int64 [B,
        T]: the next tokens; positions int64 [B, T]: within their documents; mask bool [B, T, T]
        (True where row i may see row j) or None for causal; chain: the previous steps, to which
        this step is added.
        """
        embedded = functional.embedding(tokens, self.embed).to(features.dtype)
        cos, sin = layer_net.rotary_angles(self.config, positions)
        seen = None if mask is None else mask[:, None]
        return self.step(embedded, features, cos, sin, seen, chain)

    def unroll(self, row: packed.PackedRow, steps: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """A draft chain from every position, teacher-forced (EAGLE-3's training-time test). Yields
        features [T, H] and PackedRow.ahead per step.

        As in the engine's drafter, a step sees the true rows up to its own row, and its own earlier
        steps. While all earlier drafts equal the true tokens, this is exactly the engine's chain.
        """
        features, mask = self.fused(self.states_read(row))[None], row.mask()[None]
        chain: layer_net.Chain = []
        for step in range(steps):
            there, inside = row.ahead(step)
            tokens, positions = row.next_tokens[there][None], row.positions[None] + step
            features = self.features(features, tokens, positions, mask, chain)
            yield features[0], there, inside

    def chain_states(
        self, row: packed.PackedRow, steps: int
    ) -> Iterator[tuple[int, slice, Tensor]]:
        """See DraftNet.chain_states."""
        for step, (features, _, _) in enumerate(self.unroll(row, steps)):
            yield step, slice(0, len(row)), features
