"""Predicts tokens with a gated cell: ArcticLSTMSpeculator of Snowflake (ArcticTraining), method
"sum_lstm". The method "sum_rnn" computes as the MLP speculator (mlp.py) and is not read.

Names and config.json of the checkpoint are from Arctic Inference's plug-in for vLLM. recurrent.py
describes the parts outside the cell. a is the token's weight ew / sw (as in mlp.py) and E the
token's embedding. W is the first projections for draft 0, and the second projections
for all later drafts:

    f, i, o = sigmoid(W h + a E(token)), each with its own W and E
    c = f c + i GELU(cell_ln(W_c h + a E_c(token))), initially c = 0
    h = o GELU(state_ln(c)), logits = head(h)

GELU replaces an LSTM's tanh. Norms and head are the same for all drafts. With tie_lstm_embs all
gates share one E, the only form that the plug-in can serve. forget_proj.0 multiplies c = 0 and is
never trained.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from paceline.config import Config
from paceline.errors import InvalidInput
from paceline.models import config, products
from paceline.speculators import kinds, recurrent
from paceline.speculators.net import check_fit

GATES = ("forget", "input", "output", "cell")
"""The order in which the gates' sums are concatenated."""
KIND = kinds.SPECULATORS["lstm"]
(ARCHITECTURE,) = KIND.architectures


class LstmOptions(recurrent.RecurrentOptions):
    """Settings of an LSTM drafter."""

    n_predict: int = Field(default=5, ge=2)
    """Drafts at most."""
    tie_weights: Literal[True] = True
    """All drafts share their weights, but the first's projection."""
    tie_lstm_embs: bool = True
    """All gates share one embedding."""


class LstmNet(recurrent.RecurrentNet):
    """The drafter's network: see DraftNet."""

    kind: ClassVar[kinds.SpeculatorKind] = KIND
    Options: ClassVar[type[Config]] = LstmOptions
    options: LstmOptions

    def __init__(self, target: config.ModelConfig, options: LstmOptions) -> None:
        super().__init__(target, options)
        self.embedded = GATES[:1] if options.tie_lstm_embs else GATES
        for gate in self.embedded:
            table = nn.Embedding(target.vocab_size, self.width)
            self.add_module(f"{gate}_emb", nn.ModuleList([table]))
        for gate in GATES:
            self.add_module(
                f"{gate}_proj",
                nn.ModuleList(
                    products.Linear(size, self.width, bias=False)
                    for size in (target.hidden_size, self.width)
                ),
            )
        self.cell_ln = nn.ModuleList([recurrent.BiasedNorm(self.width)])
        self.state_ln = nn.ModuleList([recurrent.BiasedNorm(self.width)])
        self.add_heads(1)

    def spread(self, parameter: Tensor) -> float:
        """See RecurrentNet.spread: 1 / sqrt(the smaller side)."""
        return 1 / math.sqrt(min(parameter.shape))

    @classmethod
    def read_shape(cls, raw: Mapping[str, Any], target: config.ModelConfig) -> dict[str, Any]:
        """See RecurrentNet.read_shape."""
        check_fit(raw, {"vocab_size": target.vocab_size, "input_hidden_dim": target.hidden_size})
        for key, allowed in (("method", "sum_lstm"), ("tie_weights", True)):
            if (seen := raw.get(key, "(none)")) != allowed:
                message = f"{key} does not fit an LSTM drafter"
                raise InvalidInput(message, seen=seen, allowed=allowed)
        return {
            "n_predict": config.read_count(raw, "n_predict", least=2),
            "inner_dim": _width(raw),
            "tie_lstm_embs": config.read_flag(raw, "tie_lstm_embs"),
            "scale_input": config.read_flag(raw, "scale_input"),
        }

    def config_json(self) -> dict[str, Any]:
        """See DraftNet.config_json; widths are text there."""
        return super().config_json() | {
            "base_model_name_or_path": "",
            "input_hidden_dim": self.target.hidden_size,
            "inner_dim": str(self.width),
            "proj_dim": str(self.width),
            "emb_dim": str(self.width),
            "method": "sum_lstm",
            "tie_weights": True,
            "tie_lstm_embs": self.options.tie_lstm_embs,
            "torch_dtype": "bfloat16",
        }

    def aliases(self) -> dict[str, str]:
        """See RecurrentNet.aliases."""
        tied = {f"head.{step}.weight": "head.0.weight" for step in range(1, self.options.n_predict)}
        if self.options.tie_lstm_embs:
            tied |= {f"{gate}_emb.0.weight": "forget_emb.0.weight" for gate in GATES[1:]}
        return tied

    def step_weights(self) -> list[recurrent.StepWeights]:
        """See RecurrentNet.step_weights; the gates' projections are stacked."""
        embeds = tuple(self.get_parameter(f"{gate}_emb.0.weight") for gate in self.embedded)
        norms = (self.norm_pair("cell_ln.0"), self.norm_pair("state_ln.0"))
        head = self.get_parameter("head.0.weight")
        first, later = (
            torch.cat([self.get_parameter(f"{gate}_proj.{own}.weight") for gate in GATES])
            for own in range(2)
        )
        return [
            recurrent.StepWeights(later if step else first, embeds, norms, head)
            for step in range(self.options.n_predict)
        ]

    def start(self, hidden: Tensor) -> recurrent.State:
        """See RecurrentNet.start; the second part is c."""
        return (*super().start(hidden), hidden.new_zeros(len(hidden), self.width))

    def cell(
        self, sums: Tensor, state: recurrent.State, weights: recurrent.StepWeights
    ) -> recurrent.State:
        """See RecurrentNet.cell."""
        gates, candidate = sums.split((3 * self.width, self.width), dim=-1)
        forget, take, out = torch.sigmoid(gates).chunk(3, dim=-1)
        cell_norm, state_norm = weights.norms
        memory = forget * state[1] + take * functional.gelu(
            recurrent.biased_norm(candidate, *cell_norm)
        )
        return out * functional.gelu(recurrent.biased_norm(memory, *state_norm)), memory


def _width(raw: Mapping[str, Any]) -> int:
    """The width in a config.json, a number or its text. Raises InvalidInput for no width, and for
    unequal widths.
    """
    given = raw.get("inner_dim", "(none)")
    text = str(given) if type(given) in (int, str) else ""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= config.MAX_COUNT):
        raise InvalidInput("inner_dim is no width", seen=given, allowed=f"1 to {config.MAX_COUNT}")
    for key in ("proj_dim", "emb_dim"):
        other = raw.get(key, "(none)")
        if type(other) not in (int, str) or str(other) != text:
            raise InvalidInput(f"{key} is not inner_dim", seen=other, allowed=text)
    return int(text)


class LstmDrafter(recurrent.RecurrentDrafter):
    """The speculator "lstm"."""

    net = LstmNet
