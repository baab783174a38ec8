"""Runs the drafter's target model over packed rows, sharded and frozen.

The forward is transformers' own. States have the names of CaptureSpec: a number is the input of
that decoder layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from paceline.errors import InvalidInput
from paceline.services.drafter_trainer.learn.heads import load_policy_head
from paceline.services.drafter_trainer.offline.plan import Document
from paceline.services.drafter_trainer.rows.batcher import pack
from paceline.services.drafter_trainer.rows.sample import FeatureSample
from paceline.speculators.base import CaptureSpec
from paceline.speculators.packed import PackedRow


class TargetForward(nn.Module):
    """A causal language model with captured states as the output of its forward."""

    def __init__(self, lm: Any, capture: CaptureSpec) -> None:
        super().__init__()
        layers = len(lm.model.layers)
        if not capture.last or any(not 0 <= i < layers for i in capture.inner):
            raise InvalidInput(
                "this speculator reads layers the model lacks",
                seen=capture.layers,
                allowed=f"0 to {layers - 1}, last",
            )
        self.lm = lm
        self._inner = capture.inner
        self._entering: dict[int, Tensor] = {}
        for index in capture.inner:
            lm.model.layers[index].register_forward_pre_hook(self._keep(index), with_kwargs=True)

    def _keep(self, index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._entering[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """States fp32 [N, W] of documents in a row, one after another.

        token_ids, positions: int64 [N]. A position that does not continue its left neighbour's
        starts a new document; transformers masks attention between documents.
        """
        last = self.lm.model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False
        ).last_hidden_state
        inner = (self._entering.pop(i)[0] for i in self._inner)
        return torch.cat([*inner, last[0]], dim=-1).float()


class TargetModel:
    """The base model sharded by FSDP2: each layer, then the rest."""

    def __init__(
        self, lm: Any, directory: Path, capture: CaptureSpec, mesh: DeviceMesh | None
    ) -> None:
        self._layers = capture.layers
        self._hidden: int = lm.config.hidden_size
        self._module = TargetForward(lm, capture)
        # no dropout, so the states equal the engine's
        self._module.requires_grad_(requires_grad=False).eval()
        self.head = load_policy_head(directory, 0)
        """Whole embed_tokens and lm_head."""
        for part in (*lm.model.layers, self._module):
            fully_shard(part, mesh=mesh)

    @torch.no_grad()
    def forward(self, row: Sequence[Document]) -> Tensor:
        """States [N, W] at all tokens of the row except each document's last token. Collective."""
        inputs, positions = [], []
        for document in row:
            ids, _ = document.tensors
            inputs.append(ids[:-1])
            positions.append(torch.arange(len(ids) - 1))
        states: Tensor = self._module(torch.cat(inputs), torch.cat(positions))
        return states

    def row(self, row: Sequence[Document], states: Tensor) -> PackedRow:
        """The documents' windows from their states [N, W], as a row to learn from."""
        samples, begin = list[FeatureSample](), 0
        for document in row:
            ids, mask = document.tensors
            whole = FeatureSample(
                session="",
                step=0,
                policy_version=0,
                lm_head_hash=self.head.hash,
                hidden=states[begin : begin + len(ids) - 1],
                token_ids=ids,
                generated=mask,
                hidden_size=self._hidden,
                layers=self._layers,
            )
            samples.append(whole.cut(document.start, document.length))
            begin += len(ids) - 1

        return pack(samples, window=max(sample.positions for sample in samples))
