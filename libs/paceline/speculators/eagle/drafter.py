"""Drafts with an EAGLE network in the embedded engine: fused weights under layer/drafter.py."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.models.decoder import LayerWeights, project_inputs
from paceline.models.loading import fuse_layer
from paceline.models.products import added, linear
from paceline.speculators.eagle.net import EagleNet
from paceline.speculators.layer.drafter import LayerDrafter


@dataclass(frozen=True, slots=True)
class EagleState:
    """One version of the drafter's weights, fused for inference."""

    layer: LayerWeights
    fc_hidden: Tensor
    """[H, H]: the half of fc that reads the hidden state."""
    token_table: Tensor
    """[V, H]: fc's other half applied to every embedding, plus its bias."""


class EagleDrafter(LayerDrafter[EagleNet]):
    """The speculator "eagle"."""

    net = EagleNet
    _state: EagleState

    def _fuse(self, net: EagleNet) -> None:
        device, hidden = self._device, self._config.hidden_size
        tensors = {name: value.detach() for name, value in net.state_dict().items()}
        fc = tensors["fc.weight"].to(device, self._dtype)
        bias = net.fc.bias.detach().to(device, self._dtype) if net.fc.bias is not None else None
        self._state = EagleState(
            layer=fuse_layer(net.config, tensors, "layers.0.", self._dtype, device),
            fc_hidden=fc[:, hidden:].contiguous(),
            token_table=linear(self._target.embed, fc[:, :hidden], bias),
        )

    def _true_features(self, hidden: Tensor) -> Tensor:
        return hidden

    def _enter(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        x = added(self._state.token_table.index_select(0, tokens), features, self._state.fc_hidden)
        return x, project_inputs(self._layer, x, self._config.rms_norm_eps)

    @property
    def _layer(self) -> LayerWeights:
        return self._state.layer

    def _logits(self, features: Tensor) -> Tensor:
        return linear(features, self._target.head)
