"""Drafts with the gated cell of lstm.py in the embedded engine: chains, and trees with a state per
node.
"""

import copy
from dataclasses import replace

import torch
from torch import Tensor

from paceline.models import decoder
from paceline.models.products import linear, serve_matrices
from paceline.speculators import base, net_drafter
from paceline.speculators.lstm import LstmNet, State, StepWeights


class LstmDrafter(net_drafter.NetDrafter[LstmNet]):
    """The speculator "lstm" (see speculators/base.py for the methods)."""

    net = LstmNet

    def __init__(self, setup: base.SpeculatorSetup) -> None:
        super().__init__(setup)
        self._serve(self._net)

    def _serve(self, net: LstmNet) -> None:
        self._net = copy.deepcopy(net).requires_grad_(False).to(self._device, self._dtype)
        serve_matrices(one for one in self._net.parameters() if one.dim() == 2)
        self._weights = self._net.step_weights()

    def bind(self, target: decoder.DecoderWeights) -> None:
        """No effect: it has its own embeddings and heads."""

    def propose(self, batch: base.DraftBatch, shape: base.DraftShape) -> base.Drafts:
        """The most likely chain or tree, at most n_predict levels; see Speculator.propose."""
        shape = replace(shape, steps=min(shape.steps, len(self._weights)))
        slots = torch.tensor(batch.slots, device=self._device)
        last = torch.tensor(batch.lengths, device=self._device) - 1
        # A sequence of one token has no state yet; its drafts use the state at position 0, whatever
        # it is.
        hidden = batch.hidden[
            slots, (last - 1).clamp_(min=0), -self._target.config.hidden_size :
        ].to(self._dtype)
        state = self._net.advance(
            self._weights[0], self._net.start(hidden), batch.token_ids[slots, last]
        )
        if shape.topk > 1:
            return self._tree(batch, state, shape)

        def advance(step: int, tokens: Tensor) -> Tensor:
            nonlocal state
            state = self._net.advance(self._weights[step], state, tokens)
            return _logits(self._weights[step], state)

        return self._chain(batch, shape, _logits(self._weights[0], state), advance)

    def _tree(self, batch: base.DraftBatch, state: State, shape: base.DraftShape) -> base.Drafts:
        """EAGLE-2's tree; every node of a beam has its own state."""
        count = len(batch.slots)
        rows = torch.arange(count, device=self._device)[:, None]

        def expand(beam: net_drafter.Beam) -> Tensor:
            nonlocal state
            weights = self._weights[beam.level]
            sources = (
                part.view(count, -1, part.shape[-1])[rows, beam.sources].flatten(0, 1)
                for part in state
            )
            state = self._net.advance(weights, tuple(sources), beam.tokens.flatten())
            logits = _logits(weights, state).view(count, beam.tokens.shape[1], -1)
            return self._log_scores(batch, logits, beam.level)

        first = self._log_scores(batch, _logits(self._weights[0], state))
        return net_drafter.grow_tree(first, expand, shape)


def _logits(weights: StepWeights, state: State) -> Tensor:
    return linear(state[0], weights.head)
