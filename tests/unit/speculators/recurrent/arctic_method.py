"""The published LSTM speculator, written from its method alone.

The module holds its loader's tensors for a config.json, and its computation in float64 on one
position.

Widths that it cannot compute raise torch's RuntimeError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Config = Mapping[str, Any]
GATES = ("forget", "input", "output", "cell")


def chain(config: Config, key: str) -> list[int]:
    return [int(width) for width in str(config[key]).split(".")]


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _stack(name: str, widths: list[int]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for i in range(1, len(widths)):
        found |= _norm(f"{name}.{3 * i - 2}", widths[i])
        found[f"{name}.{3 * i}.weight"] = (widths[i], widths[i - 1])
    return found


def declared_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every parameter by its first name."""
    inner, proj, emb = (chain(config, key) for key in ("inner_dim", "proj_dim", "emb_dim"))
    vocabulary, heads = config["vocab_size"], config["n_predict"]
    own = 1 if config["tie_weights"] else heads
    inputs = [config["input_hidden_dim"], *[inner[-1]] * (heads - 1)]
    found: dict[str, tuple[int, ...]] = {}
    for i in range(own):
        found[f"head.{i}.weight"] = (vocabulary, inner[-1])
    if config["method"] == "sum_lstm":
        for gate in GATES[:1] if config["tie_lstm_embs"] else GATES:
            found[f"{gate}_emb.0.weight"] = (vocabulary, emb[0])
        for gate in GATES:
            for i in range(2):
                found[f"{gate}_proj.{i}.weight"] = (proj[0], inputs[i])
        return found | _norm("cell_ln.0", inner[0]) | _norm("state_ln.0", inner[0])
    for i in range(own):
        found[f"emb.{i}.0.weight"] = (vocabulary, emb[0])
        found |= _stack(f"emb.{i}", emb) | _norm(f"ln.{i}.0", inner[0])
        for k in range(1, len(inner)):
            found[f"ln.{i}.{3 * k - 1}.weight"] = (inner[k], inner[k - 1])
            found |= _norm(f"ln.{i}.{3 * k}", inner[k])
    for i, width in enumerate(inputs[:2] if config["tie_weights"] else inputs):
        found[f"proj.{i}.0.weight"] = (proj[0], width)
        found |= _stack(f"proj.{i}", proj)
    return found


class Published:
    """One checkpoint."""

    def __init__(self, config: Config, tensors: Mapping[str, Tensor]) -> None:
        self.config = config
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}
        kept: float = 0.5 ** (0.5 / config["n_predict"])
        width = chain(config, "inner_dim")[0]
        self.ratio: float = math.sqrt((1 - kept**2) * (width / 2)) / kept

    def logits(self, hidden: Tensor, tokens: list[int]) -> list[Tensor]:
        """Return the logits of every head, from h_t [H] and the tokens t + 1, t + 2, ..."""
        state = hidden.double()
        memory = torch.zeros(chain(self.config, "inner_dim")[-1], dtype=torch.float64)
        if self.config["scale_input"]:
            state = state / (state.square().mean() + 1e-6).sqrt() / math.sqrt(2)
        found = []
        for step, token in enumerate(tokens):
            if self.config["method"] == "sum_lstm":
                state, memory = self._gates(state, memory, min(step, 1), token)
            else:
                state = self._stacks(state, step, token)
            head = 0 if self.config["tie_weights"] else step
            found.append(self.tensors[f"head.{head}.weight"] @ state)
        return found

    def _gates(self, state: Tensor, memory: Tensor, own: int, token: int) -> tuple[Tensor, Tensor]:
        tied = self.config["tie_lstm_embs"]
        sums = torch.cat([self.tensors[f"{gate}_proj.{own}.weight"] @ state for gate in GATES])
        embedded = torch.cat(
            [self.tensors[f"{'forget' if tied else gate}_emb.0.weight"][token] for gate in GATES]
        )
        forget, take, out, candidate = (sums + self.ratio * embedded).chunk(4)
        new = gelu(self._norm("cell_ln.0", candidate)) * take.sigmoid()
        memory = memory * forget.sigmoid() + new
        return gelu(self._norm("state_ln.0", memory)) * out.sigmoid(), memory

    def _stacks(self, state: Tensor, step: int, token: int) -> Tensor:
        tied = self.config["tie_weights"]
        own, proj = (0, min(step, 1)) if tied else (step, step)
        embedded = self._stack(f"emb.{own}", "emb_dim", self.tensors[f"emb.{own}.0.weight"][token])
        sums = self._stack(
            f"proj.{proj}", "proj_dim", self.tensors[f"proj.{proj}.0.weight"] @ state
        )
        # In place, as the loader does: an embedding may be repeated, a projection may not.
        x = self._norm(f"ln.{own}.0", sums.add_(self.ratio * embedded))
        for i in range(1, len(chain(self.config, "inner_dim"))):
            x = self.tensors[f"ln.{own}.{3 * i - 1}.weight"] @ gelu(x)
            x = self._norm(f"ln.{own}.{3 * i}", x)
        return gelu(x)

    def _stack(self, name: str, key: str, x: Tensor) -> Tensor:
        for i in range(1, len(chain(self.config, key))):
            x = self.tensors[f"{name}.{3 * i}.weight"] @ gelu(self._norm(f"{name}.{3 * i - 2}", x))
        return x

    def _norm(self, name: str, x: Tensor) -> Tensor:
        x = x / (x.square().mean() + 1e-6).sqrt()
        return x * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]


def gelu(x: Tensor) -> Tensor:
    cumulative: Tensor = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return x * cumulative
