"""Predicts tokens with a gated cell, whose state is passed from draft to draft:
ArcticLSTMSpeculator of Snowflake (ArcticTraining), method "sum_lstm".

Names and config.json of the checkpoint are from Arctic Inference's plug-in for vLLM. With n drafts
and the width D, a token weighs a = ew / sw, where sw = 0.5^(0.5 / n) and ew = sqrt((1 - sw²) D / 2)
(Wertheimer et al. 2024, arXiv 2404.19124). E is the token's embedding. W is the first projections
for draft 0, and the second projections for all later drafts:

    f, i, o = sigmoid(W h + a E(token)), each with its own W and E
    c = f c + i GELU(cell_ln(W_c h + a E_c(token))), initially c = 0
    h = o GELU(state_ln(c)), logits = head(h)

GELU replaces an LSTM's tanh. Norms and head are the same for all drafts. With tie_lstm_embs all
gates share one E, the only form that the plug-in can serve. forget_proj.0 multiplies c = 0 and is
never trained.

Alignment: the state starts as h_t, the target's last hidden state after the final norm. Draft i
reads token t + 1 + i and the head predicts token t + 2 + i. There is no attention: a position needs
no other position's state.

Tied tensors are stored once, under the first of their names, without a prefix. The loader looks
tensors up among its own parameters, where a shared parameter has its first name only. safetensors
rejects tensors that share storage. The forms of other exporters are read too: all names, if the
copies agree, and a prefix "speculator.".
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from paceline.config import Config
from paceline.errors import InvalidInput, WeightsError
from paceline.models import config
from paceline.models.products import Linear, linear
from paceline.speculators import base, kinds, net, packed
from paceline.speculators.net import check_fit

GATES = ("forget", "input", "output", "cell")
"""The order in which the gates' sums are concatenated."""
KIND = kinds.SPECULATORS["lstm"]
(ARCHITECTURE,) = KIND.architectures
NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class StepWeights:
    """Weights of one draft."""

    proj: Tensor
    """[4 D, H] for the first draft, [4 D, D] for later drafts."""
    embeds: tuple[Tensor, ...]
    """[V, D] for each gate, or a single table for all gates."""
    norms: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
    """Weight and bias [D] of cell_ln and of state_ln."""
    head: Tensor
    """[V, D]"""


class BiasedNorm(nn.Module):
    """Weight and bias of `biased_norm`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))


def biased_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x / sqrt(mean x² + 1e-6) * weight + bias over the last dimension of x [N, D]; no mean is
    subtracted.
    """
    return functional.rms_norm(x, weight.shape, weight, NORM_EPS) + bias


State = tuple[Tensor, ...]
"""The state after a draft, [N, D] each: h, the head's input, and c."""


class LstmOptions(Config):
    """Settings of an LSTM drafter."""

    n_predict: int = Field(default=5, ge=2)
    """Drafts at most."""
    inner_dim: int = Field(default=0, ge=0)
    """Width D of state and embeddings; 0: the target's hidden size."""
    tie_lstm_embs: bool = True
    """All gates share one embedding."""
    scale_input: bool = True
    """Divide the target's state by its root mean square and by √2."""
    targets: net.Targets = "drawn"
    """What a head learns: the policy's token, or the distribution it was drawn from."""


class LstmNet(net.DraftNet):
    """A drafter's network without attention: see DraftNet."""

    kind: ClassVar[kinds.SpeculatorKind] = KIND
    Options: ClassVar[type[Config]] = LstmOptions

    def __init__(self, target: config.ModelConfig, options: LstmOptions) -> None:
        super().__init__()
        # In these checkpoints `head` is a list of the drafter's own heads. The target's head is
        # therefore stored as target_head.
        del self.head
        self.target_head: Tensor = torch.empty(0)
        self.target, self.options = target, options
        self.width = options.inner_dim or target.hidden_size
        # Chosen in the paper so that h_t contributes half of the last head's state.
        kept = 0.5 ** (0.5 / options.n_predict)
        self.token_weight = math.sqrt((1 - kept**2) * self.width / 2) / kept
        self.embedded = GATES[:1] if options.tie_lstm_embs else GATES
        for gate in self.embedded:
            table = nn.Embedding(target.vocab_size, self.width)
            self.add_module(f"{gate}_emb", nn.ModuleList([table]))
        for gate in GATES:
            self.add_module(
                f"{gate}_proj",
                nn.ModuleList(
                    Linear(size, self.width, bias=False)
                    for size in (target.hidden_size, self.width)
                ),
            )
        self.cell_ln = nn.ModuleList([BiasedNorm(self.width)])
        self.state_ln = nn.ModuleList([BiasedNorm(self.width)])
        head = Linear(self.width, target.vocab_size, bias=False)
        self.add_module("head", nn.ModuleList([head]))

    @classmethod
    def fresh(cls, target: config.ModelConfig, options: LstmOptions, seed: int) -> Self:
        """See DraftNet.fresh; matrices are normal(0, 1 / sqrt(the smaller side)), and norms only
        divide by the root mean square.
        """
        fresh, generator = cls(target, options), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in fresh.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0, min(parameter.shape) ** -0.5, generator=generator)
        return fresh

    @classmethod
    def parse(
        cls, raw: Mapping[str, Any], target: config.ModelConfig, options: LstmOptions
    ) -> Self:
        """See DraftNet.parse; the shape is the checkpoint's, the learning settings are the
        options'.
        """
        if (name := config.architecture(raw)) not in cls.kind.architectures:
            message = f"architectures is no {cls.kind.name} drafter"
            raise InvalidInput(message, seen=name, allowed=", ".join(cls.kind.architectures))
        check_fit(raw, {"vocab_size": target.vocab_size, "input_hidden_dim": target.hidden_size})
        for key, allowed in (("method", "sum_lstm"), ("tie_weights", True)):
            if (seen := raw.get(key, "(none)")) != allowed:
                message = f"{key} does not fit an LSTM drafter"
                raise InvalidInput(message, seen=seen, allowed=allowed)
        shape = {
            "n_predict": config.read_count(raw, "n_predict", least=2),
            "inner_dim": _width(raw),
            "tie_lstm_embs": config.read_flag(raw, "tie_lstm_embs"),
            "scale_input": config.read_flag(raw, "scale_input"),
        }
        return cls(target, options.model_copy(update=shape))

    @property
    def capture(self) -> base.CaptureSpec:
        """See DraftNet.capture."""
        return base.CaptureSpec()

    def bind(self, embed: Tensor, head: Tensor) -> None:
        """See DraftNet.bind; only lm_head is used, to learn distributions."""
        self.target_head = head.detach()

    def norm_pair(self, name: str) -> tuple[Tensor, Tensor]:
        """Weight and bias of a norm."""
        return self.get_parameter(f"{name}.weight"), self.get_parameter(f"{name}.bias")

    # ---- the cell

    def step_weights(self) -> list[StepWeights]:
        """Weights of draft 0, 1, ..., with stacked projections of the gates."""
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
        """The state before the first draft, from the target's hidden states [N, H]."""
        if self.options.scale_input:
            hidden = functional.rms_norm(hidden, hidden.shape[-1:], eps=NORM_EPS) / math.sqrt(2)
        return hidden, hidden.new_zeros(len(hidden), self.width)

    def advance(self, weights: StepWeights, state: State, tokens: Tensor) -> State:
        """The state after reading tokens int64 [N]."""
        embedded = torch.cat(
            [functional.embedding(tokens, table) for table in weights.embeds], dim=-1
        )
        if len(weights.embeds) == 1:
            embedded = embedded.repeat(1, len(GATES))
        sums = torch.addmm(embedded, state[0], weights.proj.t(), beta=self.token_weight)
        gates, candidate = sums.split((3 * self.width, self.width), dim=-1)
        forget, take, out = torch.sigmoid(gates).chunk(3, dim=-1)
        cell_norm, state_norm = weights.norms
        memory = forget * state[1] + take * functional.gelu(biased_norm(candidate, *cell_norm))
        return out * functional.gelu(biased_norm(memory, *state_norm)), memory

    # ---- learning

    def forward(self, row: packed.PackedRow) -> net.Objective:
        """See DraftNet.forward: the sum of the drafts' cross-entropies, each at positions with a
        token drawn by the policy.

        A chain ends for all later drafts when it leaves its document or reaches tokens that the
        policy did not draw. With `targets` "distribution", softmax(lm_head h_{t+1}) is learned.
        Terms: loss_0, loss_1, ..., and the number of correct first drafts.
        """
        row = row.taught(self.target_head)
        index = row.valid.nonzero()[:, 0]
        state = self.start(self._last(row)[index])
        terms: dict[str, Tensor] = {}
        total = row.next_states.new_zeros(())
        # Steps without positions are also computed: all ranks of FSDP2 must have the same
        # gradients.
        for step, weights in enumerate(self.step_weights()):
            there, inside = row.ahead(step)
            kept = inside[index] & row.valid[there[index]]
            index = index[kept]
            at = there[index]
            state = self.advance(weights, tuple(part[kept] for part in state), row.next_tokens[at])
            losses, right = net.target_losses(
                linear(state[0], weights.head), row, at, self.options.targets
            )
            total = total + losses.sum()
            terms[f"loss_{step}"] = losses.detach().sum()
            if step == 0:
                terms["correct"] = right.sum()

        return net.Objective(total, row.valid.sum(), terms)

    def chain_states(
        self, row: packed.PackedRow, steps: int
    ) -> Iterator[tuple[int, slice, Tensor]]:
        """See DraftNet.chain_states; at most n_predict steps."""
        state = self.start(self._last(row))
        for step, weights in enumerate(self.step_weights()[:steps]):
            there, _ = row.ahead(step)
            state = self.advance(weights, state, row.next_tokens[there])
            yield step, slice(0, len(row)), state[0]

    def draft_logits(self, step: int, states: Tensor) -> Tensor:
        """See DraftNet.draft_logits."""
        return linear(states, self.step_weights()[step].head)

    def _last(self, row: packed.PackedRow) -> Tensor:
        """The last hidden states [T, H] of captured rows."""
        return row.states[:, -self.target.hidden_size :]

    # ---- checkpoints

    def config_json(self) -> dict[str, Any]:
        """See DraftNet.config_json."""
        return {
            "architectures": [*self.kind.architectures],
            "model_type": "mlp_speculator",
            "vocab_size": self.target.vocab_size,
            "n_predict": self.options.n_predict,
            "top_k_tokens_per_head": [1] * self.options.n_predict,
            "n_candidates": self.options.n_predict,
            "scale_input": self.options.scale_input,
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
        """Aliases of tied tensors -> their stored names."""
        tied = {f"head.{step}.weight": "head.0.weight" for step in range(1, self.options.n_predict)}
        if self.options.tie_lstm_embs:
            tied |= {f"{gate}_emb.0.weight": "forget_emb.0.weight" for gate in GATES[1:]}
        return tied

    def own_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See DraftNet.own_tensors. Raises WeightsError when the copies of a tied tensor differ."""
        aliases, own = self.aliases(), dict[str, Tensor]()
        for given, value in tensors.items():
            name = given.removeprefix("speculator.")
            name = aliases.get(name, name)
            known = own.setdefault(name, value)
            if known is not value and (known.dtype != value.dtype or not torch.equal(known, value)):
                message = f"tensor {given} is tied to {name}, but the two differ"
                raise WeightsError(message, seen=given, allowed="equal")
        return own


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
