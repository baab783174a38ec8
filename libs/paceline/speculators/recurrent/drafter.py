"""Drafts with a recurrent network, "mlp" or "lstm", in the embedded engine.

A round reads the target's state of token n - 2, then token n - 1 and its own drafts. No state of a
sequence is kept between rounds. So there is no cache to fill or move, and no catch-up after a pause
of any length.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from paceline.models.decoder import DecoderWeights
from paceline.models.products import linear
from paceline.speculators.base import DraftBatch, Drafts, DraftShape, SpeculatorSetup
from paceline.speculators.draft_tree import Beam, grow_tree
from paceline.speculators.net_drafter import NetDrafter, logprobs
from paceline.speculators.recurrent.lstm import LstmNet
from paceline.speculators.recurrent.mlp import MlpNet
from paceline.speculators.recurrent.net import RecurrentNet, State, StepWeights


class RecurrentDrafter(NetDrafter[RecurrentNet]):
    """A speculator with a recurrent network (see speculators/base.py for the methods)."""

    def __init__(self, setup: SpeculatorSetup) -> None:
        super().__init__(setup)
        self._serve(self._net)

    def _serve(self, net: RecurrentNet) -> None:
        self._net = copy.deepcopy(net).requires_grad_(False).to(self._device, self._dtype)
        self._weights = self._net.step_weights()

    def bind(self, target: DecoderWeights) -> None:
        """No effect: it has its own embeddings and heads."""

    def catch_up(self, batch: DraftBatch) -> None:
        """No effect: no state of a sequence is kept."""

    def free(self, slot: int) -> None:
        """No effect: no state of a sequence is kept."""

    def move(self, source: int, destination: int, length: int) -> None:
        """No effect: no state of a sequence is kept."""

    def propose(self, batch: DraftBatch, shape: DraftShape) -> Drafts:
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
            return self._tree(len(batch.slots), state, shape)

        def advance(step: int, tokens: Tensor) -> Tensor:
            nonlocal state
            state = self._net.advance(self._weights[step], state, tokens)
            return _logits(self._weights[step], state)

        return self._chain(batch, shape, _logits(self._weights[0], state), advance)

    def _tree(self, count: int, state: State, shape: DraftShape) -> Drafts:
        """EAGLE-2's tree; every node of a beam has its own state."""
        rows = torch.arange(count, device=self._device)[:, None]

        def expand(beam: Beam) -> Tensor:
            nonlocal state
            weights = self._weights[beam.level]
            sources = (
                part.view(count, -1, part.shape[-1])[rows, beam.sources].flatten(0, 1)
                for part in state
            )
            state = self._net.advance(weights, tuple(sources), beam.tokens.flatten())
            return logprobs(_logits(weights, state)).view(count, beam.tokens.shape[1], -1)

        return grow_tree(logprobs(_logits(self._weights[0], state)), expand, shape)


def _logits(weights: StepWeights, state: State) -> Tensor:
    return linear(state[0], weights.head)


class MlpDrafter(RecurrentDrafter):
    """The speculator "mlp"."""

    net = MlpNet


class LstmDrafter(RecurrentDrafter):
    """The speculator "lstm"."""

    net = LstmNet
