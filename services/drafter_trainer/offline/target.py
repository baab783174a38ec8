"""Runs the model a drafter drafts for over packed rows: sharded, frozen or trained along.

Its forward is transformers', the states are named as in CaptureSpec: a number is what enters that
decoder layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from paceline.config import OptimizerConfig
from paceline.errors import InvalidInput
from paceline.services.drafter_trainer.learn.heads import PolicyHead, load_policy_head
from paceline.services.drafter_trainer.offline.plan import Document
from paceline.services.drafter_trainer.rows.batcher import pack
from paceline.services.drafter_trainer.rows.sample import FeatureSample
from paceline.speculators.base import CaptureSpec
from paceline.speculators.packed import PackedRow
from paceline.training.hugging_face import write_causal_lm
from paceline.training.optimizer import NamedOptimizer


class TargetForward(nn.Module):
    """A causal language model whose forward ends in captured states and the cross-entropy of given
    tokens.
    """

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

    def forward(
        self, token_ids: Tensor, positions: Tensor, said_at: Tensor, said: Tensor
    ) -> tuple[Tensor, Tensor]:
        """States fp32 [N, W], and the summed cross-entropy of the tokens said [M] that follow
        positions said_at [M].

        token_ids, positions int64 [N]: documents one after another; a position that does not follow
        its left neighbour begins a document, across which transformers masks attention.
        """
        last = self.lm.model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False
        ).last_hidden_state
        states = torch.cat(
            [*(self._entering.pop(i)[0] for i in self._inner), last[0]], dim=-1
        ).float()
        if not len(said):
            return states, states.new_zeros(())
        logits = self.lm.lm_head(last[0, said_at]).float()
        return states, functional.cross_entropy(logits, said, reduction="sum")


class TargetModel:
    """The base model sharded by FSDP2 (each layer, then the rest), with an optimiser when it is
    trained along.
    """

    def __init__(
        self,
        lm: Any,
        directory: Path,
        capture: CaptureSpec,
        mesh: DeviceMesh | None,
        *,
        lr: float | None,
    ) -> None:
        self._directory, self._layers = directory, capture.layers
        self._hidden: int = lm.config.hidden_size
        self._tied = bool(lm.config.tie_word_embeddings)
        self._module = TargetForward(lm, capture)
        # no dropout: states are those the engine computes
        self._module.requires_grad_(lr is not None).eval()
        self._head: PolicyHead | None = load_policy_head(directory, 0)
        for part in (*lm.model.layers, self._module):
            fully_shard(part, mesh=mesh)
        self._mesh = mesh
        self._optimizer: NamedOptimizer | None = None
        if lr is not None:
            self._optimizer = NamedOptimizer(
                dict(self._module.named_parameters()), OptimizerConfig(lr=lr)
            )

    @property
    def trained(self) -> bool:
        """It learns along with the speculator."""
        return self._optimizer is not None

    def forward(self, row: Sequence[Document]) -> tuple[Tensor, Tensor]:
        """States [N, W] at all tokens of the row but each document's last, and the summed
        cross-entropy of the tokens the model said, both with a graph when the model is trained. A
        collective.
        """
        inputs, positions, said_at, said = [], [], [], []
        begin = 0
        for document in row:
            ids, mask = document.tensors
            inputs.append(ids[:-1])
            positions.append(torch.arange(len(ids) - 1))
            if self.trained:
                at = mask[1:].nonzero()[:, 0]
                said_at.append(at + begin)
                said.append(ids[1:][at])
            begin += len(ids) - 1

        none = torch.zeros(0, dtype=torch.int64)
        with torch.set_grad_enabled(self.trained and torch.is_grad_enabled()):
            result: tuple[Tensor, Tensor] = self._module(
                torch.cat(inputs),
                torch.cat(positions),
                torch.cat([none, *said_at]),
                torch.cat([none, *said]),
            )

        return result

    def head(self) -> PolicyHead:
        """embed_tokens and lm_head as they are now, whole. A collective."""
        if self._head is None:
            self._reshard()  # a forward without backward leaves them gathered
            lm = self._module.lm
            embed, head = (_whole(part.weight) for part in (lm.model.embed_tokens, lm.lm_head))
            self._head = PolicyHead("0" * 16, 0, embed, embed if self._tied else head)
        return self._head

    def row(self, row: Sequence[Document], states: Tensor) -> PackedRow:
        """What the drafter learns from: the documents' windows out of their states [N, W].

        Gradients flow into `states` of the row.
        """
        samples, begin = list[FeatureSample](), 0
        for document in row:
            ids, mask = document.tensors
            whole = FeatureSample(
                session="",
                step=0,
                policy_version=0,
                lm_head_hash=self.head().hash,
                hidden=states[begin : begin + len(ids) - 1],
                token_ids=ids,
                generated=mask,
                hidden_size=self._hidden,
                layers=self._layers,
            )
            samples.append(whole.cut(document.start, document.length))
            begin += len(ids) - 1

        return pack(samples, window=max(sample.positions for sample in samples))

    def _reshard(self) -> None:
        assert isinstance(self._module, FSDPModule)
        self._module.reshard()

    def step(self, number: int) -> None:
        """Step `number` of the base model's optimiser along the gradient gathered since the last.

        A collective.
        """
        assert self._optimizer is not None
        self._reshard()
        self._optimizer.step(number)
        self._head = None

    def state(self) -> dict[str, Any]:
        """Copies of weights and moments, sharded as they are here; empty of a frozen model."""
        if self._optimizer is None:
            return {}
        self._reshard()
        return self._optimizer.state(self._mesh)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state` of as many ranks."""
        assert self._optimizer is not None
        self._reshard()
        self._optimizer.load_state(state)
        self._head = None

    def write(self, weights: Mapping[str, Tensor], directory: Path) -> None:
        """A state's whole weights as a Hugging Face directory."""
        tensors = {name.removeprefix("lm."): tensor for name, tensor in weights.items()}
        if self._tied:
            tensors.pop("lm_head.weight", None)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        write_causal_lm(tensors.items(), shapes, self._directory, directory)


def _whole(parameter: Tensor) -> Tensor:
    full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return full.detach().float().clone()
