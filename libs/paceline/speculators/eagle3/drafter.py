"""Drafts with an EAGLE-3 network in the embedded engine: fused weights under layer/drafter.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.models.decoder import LayerWeights, project
from paceline.models.loading import fuse_layer
from paceline.models.products import linear
from paceline.speculators.eagle3.net import Eagle3Net, over_tokens
from paceline.speculators.layer.drafter import LayerDrafter


@dataclass(frozen=True, slots=True)
class Eagle3State:
    """One version of the drafter's weights, fused for inference."""

    layer: LayerWeights
    """The layer; its input_norm is the embedding's norm."""
    fc: Tensor
    """[H, 3 H]"""
    hidden_norm: Tensor
    """[H]"""
    norm: Tensor
    """[H]"""
    head: Tensor
    """[Vd, H]"""
    norm_before_residual: bool
    token_ids: Tensor | None
    """int64 [Vd]: tokens of draft ids; None: the draft vocabulary is the target's."""


class Eagle3Drafter(LayerDrafter[Eagle3Net]):
    """The speculator "eagle3"."""

    net = Eagle3Net
    _state: Eagle3State

    def _fuse(self, net: Eagle3Net) -> None:
        tensors = {name: value.detach() for name, value in net.state_dict().items()}
        fc, hidden_norm, norm, head = (
            tensors[f"{name}.weight"].to(self._device, self._dtype)
            for name in ("fc", "midlayer.hidden_norm", "norm", "lm_head")
        )
        self._state = Eagle3State(
            layer=fuse_layer(net.config, tensors, "midlayer.", self._dtype, self._device),
            fc=fc,
            hidden_norm=hidden_norm,
            norm=norm,
            head=head,
            norm_before_residual=net.options.norm_before_residual,
            token_ids=None if net.t2d.all() else net.token_ids.to(self._device),
        )

    def _true_features(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self._state.fc)

    @property
    def _layer(self) -> LayerWeights:
        return self._state.layer

    def _enter(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        state = self._state
        assert state.layer.input_norm is not None
        embedded = self._normed(
            functional.embedding(tokens, self._target.embed), state.layer.input_norm
        )
        normed = self._normed(features, state.hidden_norm)
        residual = normed if state.norm_before_residual else features
        inputs = torch.cat((embedded, normed), dim=-1)
        return residual, project(inputs, state.layer.qkv, state.layer.qkv_bias)

    def _logits(self, features: Tensor) -> Tensor:
        return linear(self._normed(features, self._state.norm), self._state.head)

    def _token_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self._state.token_ids is None else self._state.token_ids[draft_ids]

    def _over_tokens(self, logits: Tensor) -> Tensor:
        ids = self._state.token_ids
        return logits if ids is None else over_tokens(logits, ids, self._config.vocab_size)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)
