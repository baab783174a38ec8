"""Predicts tokens from a state that is passed from draft to draft, with one head per draft: the
shared part of "mlp" and "lstm" (Wertheimer et al. 2024, arXiv 2404.19124).

Alignment: the state starts as h_t, the target's last hidden state after the final norm. Draft i
reads token t + 1 + i and its head predicts token t + 2 + i. There is no attention: a position needs
no other position's state.

Tied tensors are stored once, under the first of their names, without a prefix. The loaders of vLLM
and Arctic Inference look tensors up among their own parameters, where a shared parameter has its
first name only. safetensors rejects tensors that share storage. The forms of other exporters are
read too: all names, if the copies agree, and a prefix "speculator.".
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from paceline.config import Config
from paceline.errors import InvalidInput, WeightsError
from paceline.models.config import MAX_COUNT, ModelConfig, architecture
from paceline.models.products import Linear, linear
from paceline.speculators.base import CaptureSpec
from paceline.speculators.net import DraftNet, Objective
from paceline.speculators.packed import PackedRow

NORM_EPS = 1e-6


class NormPair(NamedTuple):
    """Weight and bias of a norm, [width] or [1]."""

    weight: Tensor
    bias: Tensor


class Layer(NamedTuple):
    """A layer of a stack: norm, GELU, then a matrix [out, in]."""

    norm: NormPair
    matrix: Tensor


@dataclass(frozen=True, slots=True)
class StepWeights:
    """Weights of one draft. A cell has G gates of width P, by default D."""

    proj: Tensor
    """[G P, H] for the first draft, [G P, D] for later drafts."""
    embeds: tuple[Tensor, ...]
    """[V, P] for each gate, or a single table for all gates."""
    norms: tuple[NormPair, ...]
    """The cell's norms."""
    head: Tensor
    """[V, D]"""
    embed_stack: tuple[Layer, ...] = ()
    """Layers after the embedding."""
    proj_stack: tuple[Layer, ...] = ()
    """Layers after proj."""
    inner: tuple[Tensor, ...] = ()
    """The cell's matrices between its norms."""


class BiasedNorm(nn.Module):
    """Weight and bias of `biased_norm`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))


def biased_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x / sqrt(mean x² + 1e-6) * weight + bias over the last dimension of x [N, D]; no mean is
    subtracted.

    A single weight applies to all of x. A single x is repeated for every weight, which keeps its
    mean square.
    """
    if x.shape[-1] != len(weight):
        width = max(x.shape[-1], len(weight))
        x, weight = x.expand(-1, width), weight.expand(width)
    return functional.rms_norm(x, weight.shape, weight, NORM_EPS) + bias


def stacked(x: Tensor, layers: Iterable[Layer]) -> Tensor:
    """The output of a stack for x [N, width]."""
    for norm, matrix in layers:
        x = linear(functional.gelu(biased_norm(x, *norm)), matrix)
    return x


Chain = tuple[int, ...]
"""Widths of a stack, from the first to the last."""


def parse_chain(given: object) -> Chain:
    """Widths of a number or of a text such as "4096.2048". Raises ValueError for another value."""
    parts = str(given).split(".") if type(given) in (int, str) else [""]
    chain = tuple(int(part) if part.isascii() and part.isdigit() else 0 for part in parts)
    if not all(1 <= width <= MAX_COUNT for width in chain):
        raise ValueError('a width or a chain of them: "4096" or "4096.2048", each at least 1')
    return chain


def read_chain(raw: Mapping[str, Any], key: str) -> str:
    """A chain of widths from a config.json, as text. Raises InvalidInput with the key."""
    try:
        return chain_text(parse_chain(raw.get(key)))
    except ValueError as error:
        raise InvalidInput(
            f"{key} is no width", seen=raw.get(key, "(none)"), allowed=str(error)
        ) from error


def chain_text(chain: Chain) -> str:
    """The chain as text for `parse_chain`."""
    return ".".join(map(str, chain))


@dataclass(frozen=True, slots=True)
class Widths:
    """The three chains of a drafter."""

    inner: Chain
    """Widths of the state: first the width of a gate's or draft's sum, last the head's input width.
    """
    proj: Chain
    """Widths of the projected state."""
    emb: Chain
    """Widths of embeddings; the tables have the first width."""

    def check(self, method: str) -> None:
        """Raises InvalidInput with the first pair of widths that does not fit."""
        for (name, width), (other, into), single in _meetings(self, method):
            if width != into and not (single and width == 1):
                raise InvalidInput(
                    f"{name} does not fit {other} in an LSTM drafter of {method}",
                    seen=width,
                    allowed=f"{into} or 1" if single else into,
                )


Named = tuple[str, int]


def _meetings(widths: Widths, method: str) -> Iterator[tuple[Named, Named, bool]]:
    """Yields pairs of widths that must agree, and whether the first may also be 1."""
    summed, state = ("inner_dim[0]", widths.inner[0]), ("inner_dim[-1]", widths.inner[-1])
    if method == "sum_lstm":
        # sum_lstm has no stacks, so only first and last widths are read. The embedding is repeated
        # for the gates with adjacent sums: with width 1 it would not have a number per gate.
        proj = ("proj_dim[0]", widths.proj[0])
        yield ("emb_dim[0]", widths.emb[0]), proj, False
        yield proj, state, True
        yield summed, state, True
        return
    for key, chain in (("emb_dim", widths.emb), ("proj_dim", widths.proj)):
        for place, (before, behind) in enumerate(pairwise(chain)):
            yield (f"{key}[{place + 1}]", behind), (f"{key}[{place}]", before), True
    proj = ("proj_dim[-1]", widths.proj[-1])
    yield ("emb_dim[-1]", widths.emb[-1]), proj, True
    yield proj, summed, True


State = tuple[Tensor, ...]
"""The state after a draft, [N, D] each; the first tensor is the head's input."""


class RecurrentOptions(Config):
    """Settings of a recurrent drafter."""

    n_predict: int = Field(default=5, ge=1, description="drafts at most, one head for each")
    scale_input: bool = Field(
        default=True, description="divide the target's state by its root mean square and by √2"
    )
    targets: Literal["drawn", "distribution"] = Field(
        default="drawn",
        description="what a head learns: the policy's token, or the distribution it was drawn from",
    )

    @abstractmethod
    def inner_chain(self, hidden_size: int) -> Chain:
        """Widths from the cell's sum to the state that the head reads, D; often a single width."""


class RecurrentNet(DraftNet):
    """A drafter's network without attention: see DraftNet."""

    Options: ClassVar[type[Config]] = RecurrentOptions

    def __init__(self, target: ModelConfig, options: RecurrentOptions) -> None:
        super().__init__()
        # In these checkpoints `head` is a list of the drafter's own heads. The target's head is
        # therefore stored as target_head.
        del self.head
        self.target_head: Tensor = torch.empty(0)
        self.target, self.options = target, options
        summed, self.width = (chain := options.inner_chain(target.hidden_size))[0], chain[-1]
        # Chosen in the paper so that h_t contributes half of the last head's state.
        kept = 0.5 ** (0.5 / options.n_predict)
        self.token_weight = math.sqrt((1 - kept**2) * summed / 2) / kept

    @classmethod
    def build(cls, target: ModelConfig, options: RecurrentOptions) -> Self:
        """The network with these options; its weights are unspecified."""
        return cls(target, options)

    @classmethod
    def fresh(cls, target: ModelConfig, options: Config, seed: int) -> Self:
        """See DraftNet.fresh; matrices are normal(0, spread), and norms only divide by the root
        mean square.
        """
        assert isinstance(options, RecurrentOptions)
        net, generator = cls.build(target, options), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0, net.spread(parameter), generator=generator)
        return net

    @classmethod
    def parse(cls, raw: Mapping[str, Any], target: ModelConfig, options: Config) -> Self:
        """See DraftNet.parse; the shape is the checkpoint's, the learning settings are the
        options'.
        """
        assert isinstance(options, RecurrentOptions)
        if (name := architecture(raw)) not in cls.kind.architectures:
            raise InvalidInput(
                f"architectures is no {cls.kind.name} drafter",
                seen=name,
                allowed=", ".join(cls.kind.architectures),
            )
        return cls.build(target, options.model_copy(update=cls.read_shape(raw, target)))

    @classmethod
    @abstractmethod
    def read_shape(cls, raw: Mapping[str, Any], target: ModelConfig) -> dict[str, Any]:
        """Options that a config.json fixes. Raises InvalidInput with the key that does
        not match.
        """

    def twin(self) -> Self:
        """See DraftNet.twin."""
        return type(self)(self.target, self.options)

    @property
    def capture(self) -> CaptureSpec:
        """See DraftNet.capture."""
        return CaptureSpec()

    def bind(self, embed: Tensor, head: Tensor) -> None:
        """See DraftNet.bind; only lm_head is used, to learn distributions."""
        self.target_head = head.detach()

    def add_heads(self, count: int) -> None:
        """Adds the heads of the drafts, `head.0` and so on."""
        heads = (Linear(self.width, self.target.vocab_size, bias=False) for _ in range(count))
        self.add_module("head", nn.ModuleList(heads))

    def norm_pair(self, name: str) -> NormPair:
        """Weight and bias of a norm."""
        return NormPair(self.get_parameter(f"{name}.weight"), self.get_parameter(f"{name}.bias"))

    # ---- the cell

    @abstractmethod
    def spread(self, parameter: Tensor) -> float:
        """Standard deviation of a fresh matrix."""

    @abstractmethod
    def step_weights(self) -> list[StepWeights]:
        """Weights of draft 0, 1, ...; tied weights are the same tensor."""

    def start(self, hidden: Tensor) -> State:
        """The state before the first draft, from the target's hidden states [N, H]."""
        if self.options.scale_input:
            hidden = functional.rms_norm(hidden, hidden.shape[-1:], eps=NORM_EPS) / math.sqrt(2)
        return (hidden,)

    @abstractmethod
    def cell(self, sums: Tensor, state: State, weights: StepWeights) -> State:
        """The next state; sums [N, G P]: W h + (ew / sw) E(token) of every gate; `state`: the
        previous state.
        """

    def advance(self, weights: StepWeights, state: State, tokens: Tensor) -> State:
        """The state after reading tokens int64 [N]; see `cell`."""
        embedded = torch.cat(
            [functional.embedding(tokens, table) for table in weights.embeds], dim=-1
        )
        if weights.embed_stack or weights.proj_stack:
            embedded = stacked(embedded, weights.embed_stack)
            projected = stacked(linear(state[0], weights.proj), weights.proj_stack)
            sums = torch.add(projected, embedded, alpha=self.token_weight)
            return self.cell(sums, state, weights)

        if (gates := weights.proj.shape[0] // embedded.shape[-1]) > 1:
            embedded = embedded.repeat(1, gates)
        sums = torch.addmm(embedded, state[0], weights.proj.t(), beta=self.token_weight)
        return self.cell(sums, state, weights)

    # ---- learning

    def forward(self, row: PackedRow) -> Objective:
        """See DraftNet.forward: the sum of the drafts' cross-entropies, each at positions with a
        token drawn by the policy.

        A chain ends for all later drafts when it leaves its document or reaches tokens that the
        policy did not draw. With `targets` "distribution", softmax(lm_head h_{t+1}) is learned.
        Terms: loss_0, loss_1, ..., and the number of correct first drafts.
        """
        soft = row.valid & (self.options.targets == "distribution")
        teacher = torch.softmax((row.next_states[soft] @ self.target_head.t()).float(), dim=-1)
        place = soft.cumsum(0) - 1
        index = row.valid.nonzero()[:, 0]
        state = self.start(self._last(row)[index])
        terms: dict[str, Tensor] = {}
        total = teacher.new_zeros(())
        # Steps without positions are also computed: all ranks of FSDP2 must have the same
        # gradients.
        for step, weights in enumerate(self.step_weights()):
            there, inside = row.ahead(step)
            kept = inside[index] & row.valid[there[index]]
            index = index[kept]
            at = there[index]
            state = self.advance(weights, tuple(part[kept] for part in state), row.next_tokens[at])
            log_q = torch.log_softmax(linear(state[0], weights.head).float(), dim=-1)
            by_soft, drawn = soft[at], row.draft_tokens[at]
            p = teacher[place[at[by_soft]]]
            loss = (
                functional.nll_loss(log_q[~by_soft], drawn[~by_soft], reduction="sum")
                - (p * log_q[by_soft]).sum()
            )
            total = total + loss
            terms[f"loss_{step}"] = loss.detach()
            if step == 0:
                terms["correct"] = (
                    log_q.argmax(-1) == drawn.index_put((by_soft,), p.argmax(-1))
                ).sum()

        return Objective(total, row.valid.sum(), terms)

    def chain_states(self, row: PackedRow, steps: int) -> Iterator[tuple[int, slice, Tensor]]:
        """See DraftNet.chain_states; at most n_predict steps."""
        state = self.start(self._last(row))
        for step, weights in enumerate(self.step_weights()[:steps]):
            there, _ = row.ahead(step)
            state = self.advance(weights, state, row.next_tokens[there])
            yield step, slice(0, len(row)), state[0]

    def draft_logits(self, step: int, states: Tensor) -> Tensor:
        """See DraftNet.draft_logits."""
        return linear(states, self.step_weights()[step].head)

    def _last(self, row: PackedRow) -> Tensor:
        """The last hidden states [T, H] of captured rows."""
        return row.states[:, -self.target.hidden_size :]

    # ---- checkpoints

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See DraftNet.shapes."""
        return {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}

    @abstractmethod
    def aliases(self) -> dict[str, str]:
        """Aliases of tied tensors -> their stored names."""

    def own_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See DraftNet.own_tensors. Raises WeightsError when the copies of a tied tensor differ."""
        aliases, own = self.aliases(), dict[str, Tensor]()
        for given, value in tensors.items():
            name = given.removeprefix("speculator.")
            name = aliases.get(name, name)
            known = own.setdefault(name, value)
            if known is not value and (known.dtype != value.dtype or not torch.equal(known, value)):
                raise WeightsError(
                    f"tensor {given} is tied to {name}, but the two differ",
                    seen=given,
                    allowed="equal",
                )
        return own
