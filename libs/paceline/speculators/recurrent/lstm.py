"""Predicts tokens with a gated cell: ArcticLSTMSpeculator of Snowflake (ArcticTraining), method
"sum_lstm".

Names and config.json of the checkpoint are those of Arctic Inference's plug-in for vLLM; see net.py
for what is not the cell's. With W the first projections for draft 0 and the
second ones for all others, and a, E, D the token's weight ew / sw (as in mlp.py), its embedding and
the width:

    f, i, o = sigmoid(W h + a E(token)), each with a W and an E of its own
    c = f c + i GELU(cell_ln(W_c h + a E_c(token))), at first c = 0
    h = o GELU(state_ln(c)), logits = head(h)

GELU stands where an LSTM has tanh. Norms and head are the same for all drafts; tie_lstm_embs: one E
for all gates, all that the plug-in can serve. forget_proj.0 multiplies c = 0 and is never trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from paceline.config import Config
from paceline.errors import InvalidInput
from paceline.models.config import ModelConfig, read_count, read_flag
from paceline.models.products import Linear
from paceline.speculators.kinds import SPECULATORS, SpeculatorKind
from paceline.speculators.net import check_fit
from paceline.speculators.recurrent.net import (
    BiasedNorm,
    RecurrentNet,
    RecurrentOptions,
    State,
    StepWeights,
    biased_norm,
)

GATES = ("forget", "input", "output", "cell")
"""In the order in which their sums stand beside each other."""


KIND = SPECULATORS["lstm"]
(ARCHITECTURE,) = KIND.architectures


class LstmOptions(RecurrentOptions):
    """Settings of an LSTM drafter."""

    n_predict: int = Field(default=5, ge=2, description="drafts at most")
    tie_lstm_embs: bool = Field(default=True, description="all gates share one embedding")


class LstmNet(RecurrentNet):
    """The drafter's network: see DraftNet."""

    kind: ClassVar[SpeculatorKind] = KIND
    Options: ClassVar[type[Config]] = LstmOptions
    options: LstmOptions

    def __init__(self, target: ModelConfig, options: LstmOptions) -> None:
        super().__init__(target, options)
        self.embedded = GATES[:1] if options.tie_lstm_embs else GATES
        width, vocab = self.width, target.vocab_size
        for gate in self.embedded:
            self.add_module(f"{gate}_emb", nn.ModuleList([nn.Embedding(vocab, width)]))
        for gate in GATES:
            inputs = (target.hidden_size, width)
            self.add_module(
                f"{gate}_proj", nn.ModuleList(Linear(size, width, bias=False) for size in inputs)
            )
        self.cell_ln = nn.ModuleList([BiasedNorm(width)])
        self.state_ln = nn.ModuleList([BiasedNorm(width)])
        self.add_heads(1)

    def spread(self, parameter: Tensor) -> float:
        """See RecurrentNet.spread: 1 / sqrt(the smaller side)."""
        return 1 / math.sqrt(min(parameter.shape))

    def step_weights(self) -> list[StepWeights]:
        """See RecurrentNet.step_weights; the gates' projections are stacked."""
        embeds = tuple(self.get_parameter(f"{gate}_emb.0.weight") for gate in self.embedded)
        norms = (self.norm_pair("cell_ln.0"), self.norm_pair("state_ln.0"))
        head = self.get_parameter("head.0.weight")
        first, later = (
            torch.cat([self.get_parameter(f"{gate}_proj.{own}.weight") for gate in GATES])
            for own in range(2)
        )
        return [
            StepWeights(later if step else first, embeds, norms, head)
            for step in range(self.options.n_predict)
        ]

    def start(self, hidden: Tensor) -> State:
        """See RecurrentNet.start; the second part is c."""
        return (*super().start(hidden), hidden.new_zeros(len(hidden), self.width))

    def cell(self, sums: Tensor, state: State, weights: StepWeights) -> State:
        """See RecurrentNet.cell."""
        gates, candidate = sums.split((3 * self.width, self.width), dim=-1)
        forget, take, out = torch.sigmoid(gates).chunk(3, dim=-1)
        cell_norm, state_norm = weights.norms
        memory = forget * state[1] + take * functional.gelu(biased_norm(candidate, *cell_norm))
        return out * functional.gelu(biased_norm(memory, *state_norm)), memory

    @classmethod
    def read_shape(cls, raw: Mapping[str, Any], target: ModelConfig) -> dict[str, Any]:
        """See RecurrentNet.read_shape."""
        check_fit(raw, {"vocab_size": target.vocab_size, "input_hidden_dim": target.hidden_size})
        for key, value in (("method", "sum_lstm"), ("tie_weights", True)):
            if raw.get(key) != value:
                raise InvalidInput(
                    f"{key} is not supported in an LSTM drafter", seen=raw.get(key), allowed=value
                )

        widths = {key: _width(raw, key) for key in ("inner_dim", "proj_dim", "emb_dim")}
        if len(set(widths.values())) > 1:
            raise InvalidInput(
                "inner_dim, proj_dim and emb_dim must be equal", seen=widths, allowed="one width"
            )

        return {
            "n_predict": read_count(raw, "n_predict", least=2),
            "inner_dim": widths["inner_dim"],
            "tie_lstm_embs": read_flag(raw, "tie_lstm_embs"),
            "scale_input": read_flag(raw, "scale_input"),
        }

    def config_json(self) -> dict[str, Any]:
        """See DraftNet.config_json; widths are text there."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "mlp_speculator",
            "base_model_name_or_path": "",
            "vocab_size": self.target.vocab_size,
            "input_hidden_dim": self.target.hidden_size,
            "inner_dim": str(self.width),
            "proj_dim": str(self.width),
            "emb_dim": str(self.width),
            "n_predict": self.options.n_predict,
            "top_k_tokens_per_head": [1] * self.options.n_predict,
            "n_candidates": self.options.n_predict,
            "method": "sum_lstm",
            "tie_weights": True,
            "tie_lstm_embs": self.options.tie_lstm_embs,
            "scale_input": self.options.scale_input,
            "torch_dtype": "bfloat16",
        }

    def aliases(self) -> dict[str, str]:
        """See RecurrentNet.aliases."""
        tied = {f"head.{step}.weight": "head.0.weight" for step in range(1, self.options.n_predict)}
        if self.options.tie_lstm_embs:
            tied |= {f"{gate}_emb.0.weight": "forget_emb.0.weight" for gate in GATES[1:]}
        return tied


def _width(raw: Mapping[str, Any], key: str) -> int:
    """One width, as a number or as text; stacks ("4096.2048") belong to the method sum_rnn."""
    text = str(raw.get(key, "(none)"))
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise InvalidInput(f"{key} must be one width", seen=text, allowed='">= 1", as text')
    return int(text)
