"""Drafts with an EAGLE network in the embedded engine: fused weights under layer/drafter.py."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.models.between import parts_of
from paceline.models.decoder import LayerWeights, project_inputs
from paceline.models.graphs import Graph, compiled
from paceline.models.loading import fuse_layer
from paceline.models.products import added, linear
from paceline.speculators.base import SpeculatorSetup
from paceline.speculators.eagle.graph import NextDraftSpec
from paceline.speculators.eagle.net import EagleNet
from paceline.speculators.layer.drafter import LayerDrafter, NextDraft


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

    def __init__(self, setup: SpeculatorSetup) -> None:
        """See CachedDrafter; raises ConfigError, too, where it is to be compiled: see compiled."""
        self._compile = setup.compile
        self._graphs: dict[NextDraftSpec, Graph | None] = {}
        super().__init__(setup)

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

        self._next = self._compiled_next(net)

    def _compiled_next(self, net: EagleNet) -> NextDraft | None:
        """Compiled at the start alone: a version of another shape, for which engines would wait a
        quarter of a minute, goes without.
        """
        vocab = len(self._target.head)
        spec = NextDraftSpec.of(net.config, self._dtype, input_norm=False, vocab=vocab)
        if self._compile and not self._graphs:
            self._graphs[spec] = compiled(spec)
        graph, state = self._graphs.get(spec), self._state
        if graph is None:
            return None
        own = [self._target.head, state.token_table, state.fc_hidden]
        parts = [*own, *parts_of(state.layer, state.layer)]

        def following(x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            share, token, x, qkv = graph([x, attended, *parts])
            return share, token, x, qkv

        return following

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
