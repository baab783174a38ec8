"""What is between two drafts of an EAGLE chain, but for the attention, as one compiled graph: the
layer's end, its most likely token, and what the layer reads of that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.models.between import LayerSpec
from paceline.models.decoder import finish_layer, project_inputs
from paceline.models.products import added, linear


@dataclass(frozen=True, slots=True)
class NextDraftSpec(LayerSpec):
    """Shape of a drafter."""

    vocab: int

    def module(self) -> nn.Module:
        """See GraphSpec.module."""
        return _NextDraft(self)

    def example(self) -> tuple[list[Tensor], list[Tensor]]:
        """See GraphSpec.example; its own parts are the head, the table of tokens and fc's half."""
        wide, square = (self.vocab, self.hidden), (self.hidden, self.hidden)
        return self.rows(), [self.ones(*wide), self.ones(*wide), self.ones(*square), *self.parts()]


class _NextDraft(nn.Module):
    def __init__(self, spec: NextDraftSpec) -> None:
        super().__init__()
        self._spec = spec

    def forward(
        self, x: Tensor, attended: Tensor, parts: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See layer/drafter.py, NextDraft."""
        head, token_table, fc_hidden, *of_layer = parts
        layer, eps = self._spec.layer(of_layer), self._spec.eps
        features = finish_layer(layer, x, attended, eps)
        share, token = torch.softmax(linear(features, head), dim=-1).max(dim=-1)
        x = added(token_table.index_select(0, token), features, fc_hidden)
        return share, token, x, project_inputs(layer, x, eps)
