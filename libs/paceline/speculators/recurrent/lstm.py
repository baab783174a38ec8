"""Predicts tokens with a gated cell, or with stacks of matrices: ArcticLSTMSpeculator of Snowflake
(ArcticTraining), methods "sum_lstm" and "sum_rnn".

Names and config.json of the checkpoint are from Arctic Inference's plug-in for vLLM. net.py
describes the parts outside the cell and the valid widths. a is the token's weight ew / sw (as in
mlp.py, with the first width of inner_dim as D) and E the token's embedding. In sum_lstm, W is the
first projections for draft 0, and the second projections for all later drafts:

    f, i, o = sigmoid(W h + a E(token)), each with its own W and E
    c = f c + i GELU(cell_ln(W_c h + a E_c(token))), initially c = 0
    h = o GELU(state_ln(c)), logits = head(h)

GELU replaces an LSTM's tanh. Norms and head are the same for all drafts. With tie_lstm_embs all
gates share one E, the only form that the plug-in can serve. forget_proj.0 multiplies c = 0 and is
never trained. The first of proj_dim and emb_dim is each gate's width; cell and norms have the
widths of inner_dim.

Draft i of sum_rnn, with one more layer for every further width of a chain:

    p = proj_i(h), then p = M GELU(norm(p)) for each further width of proj_dim
    e = emb_i(token), then likewise for emb_dim
    h = GELU(norm(p + a e)), then h = GELU(norm(M h)) of inner_dim, logits = head_i(h)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import torch
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from paceline.config import Config
from paceline.errors import InvalidInput
from paceline.models.config import ModelConfig, read_count, read_flag
from paceline.models.products import Linear, linear
from paceline.speculators.kinds import SPECULATORS, SpeculatorKind
from paceline.speculators.net import check_fit
from paceline.speculators.recurrent.net import (
    BiasedNorm,
    Chain,
    Layer,
    RecurrentNet,
    RecurrentOptions,
    State,
    StepWeights,
    Widths,
    biased_norm,
    chain_text,
    parse_chain,
    read_chain,
)

GATES = ("forget", "input", "output", "cell")
"""The order in which the gates' sums are concatenated."""
Method = Literal["sum_lstm", "sum_rnn"]

KIND = SPECULATORS["lstm"]
(ARCHITECTURE,) = KIND.architectures


def _chain_or_none(given: int | str) -> int | str:
    return given if given == 0 else chain_text(parse_chain(given))


GivenWidths = Annotated[int | str, AfterValidator(_chain_or_none)]
"""A chain of widths, or 0 for the value of another setting."""


class LstmOptions(RecurrentOptions):
    """Settings of an LSTM drafter."""

    n_predict: int = Field(default=5, ge=1, description="drafts at most; sum_lstm: 2 or more")
    method: Method = Field(default="sum_lstm", description="a gated cell, or stacks of matrices")
    inner_dim: GivenWidths = Field(
        default=0, description='width of the state, or a chain "A.B" of them; 0: the target\'s'
    )
    proj_dim: GivenWidths = Field(
        default=0, description="widths of the projected state; 0: the first of inner_dim"
    )
    emb_dim: GivenWidths = Field(
        default=0, description="widths of embeddings; 0: the first of inner_dim"
    )
    tie_weights: bool = Field(
        default=True,
        description="all drafts share their weights, but the first's projection; always so in "
        "sum_lstm",
    )
    tie_lstm_embs: bool = Field(default=True, description="all gates share one embedding")

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        if self.method == "sum_lstm" and (self.n_predict < 2 or not self.tie_weights):
            raise ValueError("sum_lstm wants n_predict >= 2, tie_weights = true")
        return self

    def inner_chain(self, hidden_size: int) -> Chain:
        """See RecurrentOptions.inner_chain."""
        return parse_chain(self.inner_dim or hidden_size)

    def widths(self, hidden_size: int) -> Widths:
        """The widths of these settings for a target."""
        inner = self.inner_chain(hidden_size)
        proj, emb = (parse_chain(given or inner[0]) for given in (self.proj_dim, self.emb_dim))
        return Widths(inner, proj, emb)


class LstmNet(RecurrentNet):
    """The drafter's network, of either method: see DraftNet."""

    kind: ClassVar[SpeculatorKind] = KIND
    Options: ClassVar[type[Config]] = LstmOptions
    options: LstmOptions

    def __init__(self, target: ModelConfig, options: LstmOptions) -> None:
        """Raises InvalidInput for widths that do not match."""
        super().__init__(target, options)
        self.widths = options.widths(target.hidden_size)
        self.widths.check(options.method)

    @classmethod
    def build(cls, target: ModelConfig, options: RecurrentOptions) -> Self:
        """See RecurrentNet.build."""
        assert isinstance(options, LstmOptions)
        net = (GatedNet if options.method == "sum_lstm" else StackedNet)(target, options)
        assert isinstance(net, cls)
        return net

    def spread(self, parameter: Tensor) -> float:
        """See RecurrentNet.spread: 1 / sqrt(the smaller side)."""
        return 1 / math.sqrt(min(parameter.shape))

    @classmethod
    def read_shape(cls, raw: Mapping[str, Any], target: ModelConfig) -> dict[str, Any]:
        """See RecurrentNet.read_shape."""
        check_fit(raw, {"vocab_size": target.vocab_size, "input_hidden_dim": target.hidden_size})
        method = raw.get("method", "sum_rnn")
        tie_weights = read_flag(raw, "tie_weights")
        gated = method == "sum_lstm"
        if method not in get_args(Method):
            raise InvalidInput("method is no LSTM drafter's", seen=method, allowed=get_args(Method))
        if gated and not tie_weights:
            raise InvalidInput(
                "tie_weights is always on in an LSTM drafter of sum_lstm",
                seen=raw.get("tie_weights", "(none)"),
                allowed=True,
            )
        return {
            "method": method,
            "n_predict": read_count(raw, "n_predict", least=2 if gated else 1),
            **{key: read_chain(raw, key) for key in ("inner_dim", "proj_dim", "emb_dim")},
            "tie_weights": tie_weights,
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
            "inner_dim": chain_text(self.widths.inner),
            "proj_dim": chain_text(self.widths.proj),
            "emb_dim": chain_text(self.widths.emb),
            "n_predict": self.options.n_predict,
            "top_k_tokens_per_head": [1] * self.options.n_predict,
            "n_candidates": self.options.n_predict,
            "method": self.options.method,
            "tie_weights": self.options.tie_weights,
            "tie_lstm_embs": self.options.tie_lstm_embs,
            "scale_input": self.options.scale_input,
            "torch_dtype": "bfloat16",
        }

    def aliases(self) -> dict[str, str]:
        """See RecurrentNet.aliases."""
        later = range(1, self.options.n_predict if self.options.tie_weights else 1)
        return {f"head.{step}.weight": "head.0.weight" for step in later}


class GatedNet(LstmNet):
    """Method sum_lstm."""

    def __init__(self, target: ModelConfig, options: LstmOptions) -> None:
        super().__init__(target, options)
        self.embedded = GATES[:1] if options.tie_lstm_embs else GATES
        self.gate_width, embedded = self.widths.proj[0], self.widths.emb[0]
        for gate in self.embedded:
            table = nn.Embedding(target.vocab_size, embedded)
            self.add_module(f"{gate}_emb", nn.ModuleList([table]))
        for gate in GATES:
            self.add_module(
                f"{gate}_proj",
                nn.ModuleList(
                    Linear(size, self.gate_width, bias=False)
                    for size in (target.hidden_size, self.width)
                ),
            )
        self.cell_ln = nn.ModuleList([BiasedNorm(self.widths.inner[0])])
        self.state_ln = nn.ModuleList([BiasedNorm(self.widths.inner[0])])
        self.add_heads(1)

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
        gates, candidate = sums.split((3 * self.gate_width, self.gate_width), dim=-1)
        forget, take, out = torch.sigmoid(gates).chunk(3, dim=-1)
        cell_norm, state_norm = weights.norms
        memory = forget * state[1] + take * functional.gelu(biased_norm(candidate, *cell_norm))
        return out * functional.gelu(biased_norm(memory, *state_norm)), memory

    def aliases(self) -> dict[str, str]:
        """See RecurrentNet.aliases."""
        tied = super().aliases()
        if self.options.tie_lstm_embs:
            tied |= {f"{gate}_emb.0.weight": "forget_emb.0.weight" for gate in GATES[1:]}
        return tied


class StackedNet(LstmNet):
    """Method sum_rnn."""

    def __init__(self, target: ModelConfig, options: LstmOptions) -> None:
        super().__init__(target, options)
        inner, proj, emb = self.widths.inner, self.widths.proj, self.widths.emb
        tied, heads = options.tie_weights, options.n_predict
        inputs = [target.hidden_size] + [self.width] * ((min(2, heads) if tied else heads) - 1)
        apart = range(1 if tied else heads)
        self.emb = nn.ModuleList(
            nn.Sequential(nn.Embedding(target.vocab_size, emb[0]), *_stack(emb)) for _ in apart
        )
        self.proj = nn.ModuleList(
            nn.Sequential(Linear(size, proj[0], bias=False), *_stack(proj)) for size in inputs
        )
        self.ln = nn.ModuleList(nn.Sequential(*_norms(inner)) for _ in apart)
        self.add_heads(len(apart))

    def step_weights(self) -> list[StepWeights]:
        """See RecurrentNet.step_weights."""
        last = len(self.proj) - 1
        return [
            self._weights(0 if self.options.tie_weights else step, min(step, last))
            for step in range(self.options.n_predict)
        ]

    def _weights(self, own: int, proj: int) -> StepWeights:
        count = len(self.widths.inner)
        return StepWeights(
            self.get_parameter(f"proj.{proj}.0.weight"),
            (self.get_parameter(f"emb.{own}.0.weight"),),
            tuple(self.norm_pair(f"ln.{own}.{3 * place}") for place in range(count)),
            self.get_parameter(f"head.{own}.weight"),
            self._layers(f"emb.{own}", self.widths.emb),
            self._layers(f"proj.{proj}", self.widths.proj),
            tuple(self.get_parameter(f"ln.{own}.{3 * i - 1}.weight") for i in range(1, count)),
        )

    def _layers(self, name: str, chain: Chain) -> tuple[Layer, ...]:
        return tuple(
            Layer(
                self.norm_pair(f"{name}.{place}"), self.get_parameter(f"{name}.{place + 2}.weight")
            )
            for place in range(1, 3 * len(chain) - 2, 3)
        )

    def cell(self, sums: Tensor, state: State, weights: StepWeights) -> State:
        """See RecurrentNet.cell."""
        first, *others = weights.norms
        x = functional.gelu(biased_norm(sums, *first))
        for matrix, norm in zip(weights.inner, others, strict=True):
            x = functional.gelu(biased_norm(linear(x, matrix), *norm))
        return (x,)


def _stack(chain: Chain) -> Iterator[nn.Module]:
    """The modules after a table or projection, in the published order. Each norm has the output
    width of the matrix that follows it. GELU only has a place in the names.
    """
    for before, behind in pairwise(chain):
        yield from (BiasedNorm(behind), nn.GELU(), Linear(before, behind, bias=False))


def _norms(chain: Chain) -> Iterator[nn.Module]:
    """The cell's norms and the matrices between them."""
    yield BiasedNorm(chain[0])
    for before, behind in pairwise(chain):
        yield from (nn.GELU(), Linear(before, behind, bias=False), BiasedNorm(behind))
