"""Drafts with the policy's own weights, rounded to four bits (EfficientRollout, arXiv 2606.18967).

The copy follows the policy, so it needs no training and is never stale: the first draft after a
commit renews it. It attends to the policy's own keys and values, and writes those of its drafts
behind them. Verification writes the same cells again before anything else reads them, so the copy
has no cache.

Drafts use the request's own noise. A rounded policy nearly always draws the policy's token with it,
at any temperature. Every token is still the policy's draw: see engines/embedded/verify.py.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.errors import MissingCapability
from paceline.models import cache, decoder, quantised, sampling
from paceline.speculators import base

SHARPNESS = 4.0
"""Factor of a draft's gap in its score; the budget calibrates scores."""


class SelfDrafter(base.Speculator):
    """The speculator "self" (see speculators/base.py for the methods)."""

    capture = base.CaptureSpec(last=False)
    uses_noise = True
    _unrounded: decoder.DecoderWeights | None
    _weights: decoder.DecoderWeights | None
    _head: quantised.PackedMatrix | None

    def __init__(self, setup: base.SpeculatorSetup) -> None:
        self.bind(setup.target)

    def bind(self, target: decoder.DecoderWeights) -> None:
        """Drafts for this target, whose weights are rounded before the next draft. Raises
        MissingCapability on a GPU.
        """
        if target.head.device.type != "cpu":
            message = "the drafter `self` has products for the CPU only"
            raise MissingCapability(message, seen=target.head.device, allowed="cpu")
        self.release()
        self._unrounded = target

    def release(self) -> None:
        """Frees the rounded weights until `bind`."""
        self._unrounded = self._weights = self._head = None

    def catch_up(self, batch: base.DraftBatch) -> None:
        """Rounds the weights of a new target, matrix by matrix."""
        if (target := self._unrounded) is not None:
            self._head = quantised.packed(target.head)
            self._weights = replace(target, layers=tuple(map(_rounded, target.layers)))
            self._unrounded = None

    def propose(self, batch: base.DraftBatch, shape: base.DraftShape) -> base.Drafts:
        """The chain of the draws of the rounded policy."""
        self.catch_up(batch)
        device = batch.token_ids.device
        rows = cache.cache_rows(batch.slots)
        lengths = torch.tensor(batch.lengths, device=device)
        token = batch.token_ids[torch.tensor(batch.slots, device=device), lengths - 1]
        tokens: list[Tensor] = []
        scores: list[Tensor] = []
        for step in range(shape.steps):
            logits = self._forward(batch, rows, token, lengths + (step - 1), step)
            assert batch.draws is not None
            token, gaps = sampling.draw_likely(logits, lengths + step, batch.draws)
            share = torch.sigmoid(SHARPNESS * gaps)
            tokens.append(token)
            scores.append(scores[-1] * share if scores else share)
            if shape.floor > 0 and bool(scores[-1].max() < shape.floor):
                break
        return base.Drafts(torch.stack(tokens, dim=1), torch.stack(scores, dim=1).float())

    def _forward(
        self,
        batch: base.DraftBatch,
        rows: slice | Tensor,
        tokens: Tensor,
        positions: Tensor,
        step: int,
    ) -> Tensor:
        """Logits [B, V] behind tokens int64 [B] at positions int64 [B]."""
        assert batch.kv is not None
        weights, length = self._weights, max(batch.lengths) + step
        assert weights is not None
        assert self._head is not None
        block = decoder.make_block(
            weights.config, weights.rotation, batch.kv, rows, positions[:, None], length
        )
        return self._head.product(decoder.forward_hidden(weights, batch.kv, tokens, block))


def _rounded(layer: decoder.LayerWeights) -> decoder.LayerWeights:
    names = ("qkv", "output", "gate_up", "down")
    rounded: dict[str, Any] = {name: quantised.packed(getattr(layer, name)) for name in names}
    return replace(layer, **rounded)
