"""Drafts with a recurrent network, "mlp" or "lstm", in the embedded engine.

A round reads the target's state of token n - 2, then token n - 1 and its own drafts. Nothing is
kept of a sequence between rounds: there is no cache to fill, to move or to catch up, however long
the drafter has been off.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from paceline.models.decoder import DecoderWeights
from paceline.models.loading import read_tensors
from paceline.speculators.base import CaptureSpec, DraftBatch, Drafts, DraftShape, SpeculatorSetup
from paceline.speculators.draft_tree import Beam, grow_tree
from paceline.speculators.recurrent.lstm import LstmNet
from paceline.speculators.recurrent.mlp import MlpNet
from paceline.speculators.recurrent.net import RecurrentNet, State, StepWeights


class RecurrentDrafter:
    """A speculator of one of these networks (see speculators/base.py for the methods)."""

    trainable = True
    capture = CaptureSpec()
    net: ClassVar[type[RecurrentNet]]
    """What it drafts with."""

    def __init__(self, setup: SpeculatorSetup) -> None:
        self._target = setup.target.config
        self._device, self._dtype = setup.target.head.device, setup.dtype
        if setup.directory:
            self._serve(self.net.read(setup.directory, self._target))
        else:
            self._serve(self.net.fresh(self._target, self.net.Options(), setup.seed))

    def _serve(self, net: RecurrentNet) -> None:
        self._net = copy.deepcopy(net).requires_grad_(False).to(self._device, self._dtype)
        self._weights = self._net.step_weights()

    def bind(self, target: DecoderWeights) -> None:
        """Embeddings and heads are its own: nothing changes."""

    def load_state(self, directory: Path) -> RecurrentNet:
        """A version's weights, checked: of any shape where a config.json tells it, else of the
        serving one's.

        Raises WeightsError, DataLoss or InvalidInput.
        """
        if (directory / "config.json").is_file():
            return type(self._net).read(directory, self._target)
        net = self._net.twin()
        net.load_tensors(read_tensors(directory))
        return net

    def commit_state(self, state: object) -> None:
        """Serve what load_state returned."""
        assert isinstance(state, RecurrentNet)
        self._serve(state)

    def catch_up(self, batch: DraftBatch) -> None:
        """Keeps nothing of a sequence: there is nothing to catch up with."""

    def ended(self, batch: DraftBatch) -> None:
        """Learns from hidden states in its trainer, not from tokens."""

    def flush(self) -> None:
        """Keeps nothing of earlier sequences."""

    def free(self, slot: int) -> None:
        """Keeps nothing of a sequence."""

    def move(self, source: int, destination: int, length: int) -> None:
        """Keeps nothing of a sequence."""

    def propose(self, batch: DraftBatch, shape: DraftShape) -> Drafts:
        """The most likely chain or tree, n_predict levels at most; see Speculator.propose."""
        shape = replace(shape, steps=min(shape.steps, len(self._weights)))
        slots = torch.tensor(batch.slots, device=self._device)
        last = torch.tensor(batch.lengths, device=self._device) - 1
        # A sequence of one token has no known state; its drafts are as good as what stands there.
        hidden = batch.hidden[slots, (last - 1).clamp_(min=0), -self._target.hidden_size :].to(
            self._dtype
        )
        state = self._net.advance(
            self._weights[0], self._net.start(hidden), batch.token_ids[slots, last]
        )
        if shape.topk == 1:
            return self._chain(batch, state, shape)
        return self._tree(len(batch.slots), state, shape)

    def _chain(self, batch: DraftBatch, state: State, shape: DraftShape) -> Drafts:
        """The most likely token after each, or one drawn, from the state of the first draft."""
        tokens: list[Tensor] = []
        scores: list[Tensor] = []
        for step, weights in enumerate(self._weights[: shape.steps]):
            if step:
                state = self._net.advance(weights, state, tokens[-1])
            logits = functional.linear(state[0], weights.head)
            shares = torch.softmax(logits, dim=-1)
            if batch.sampler is None:
                share, token = shares.max(dim=-1)
            else:
                token = batch.sampler(logits, step)
                share = shares.gather(1, token[:, None])[:, 0]
            tokens.append(token)
            scores.append(share if not step else scores[-1] * share)
            if shape.floor > 0 and bool(scores[-1].max() < shape.floor):
                break
        return Drafts(torch.stack(tokens, dim=1), torch.stack(scores, dim=1).float())

    def _tree(self, count: int, state: State, shape: DraftShape) -> Drafts:
        """EAGLE-2's tree; every node of a beam has a state of its own."""
        rows = torch.arange(count, device=self._device)[:, None]

        def expand(beam: Beam) -> Tensor:
            nonlocal state
            weights = self._weights[beam.level]
            sources = (
                part.view(count, -1, part.shape[-1])[rows, beam.sources].flatten(0, 1)
                for part in state
            )
            state = self._net.advance(weights, tuple(sources), beam.tokens.flatten())
            return _logprobs(weights, state).view(count, beam.tokens.shape[1], -1)

        return grow_tree(_logprobs(self._weights[0], state), expand, shape)


def _logprobs(weights: StepWeights, state: State) -> Tensor:
    return torch.log_softmax(functional.linear(state[0], weights.head).float(), dim=-1)


class MlpDrafter(RecurrentDrafter):
    """The speculator "mlp"."""

    net = MlpNet


class LstmDrafter(RecurrentDrafter):
    """The speculator "lstm"."""

    net = LstmNet
