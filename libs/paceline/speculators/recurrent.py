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

import copy
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from paceline.config import Config
from paceline.errors import InvalidInput, WeightsError
from paceline.models import config, decoder
from paceline.models.products import Linear, linear, serve_matrices
from paceline.speculators import base, net, net_drafter, packed

NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class StepWeights:
    """Weights of one draft. A cell has G gates."""

    proj: Tensor
    """[G D, H] for the first draft, [G D, D] for later drafts."""
    embeds: tuple[Tensor, ...]
    """[V, D] for each gate, or a single table for all gates."""
    norms: tuple[tuple[Tensor, Tensor], ...]
    """Weight and bias [D] of the cell's norms."""
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
"""The state after a draft, [N, D] each; the first tensor is the head's input."""


class RecurrentOptions(Config):
    """Settings of a recurrent drafter."""

    n_predict: int = Field(default=5, ge=1)
    """Drafts at most, one head for each."""
    inner_dim: int = Field(default=0, ge=0)
    """Width D of state and embeddings; 0: the target's hidden size."""
    tie_weights: bool = False
    """All drafts share embedding, norm and head, all but the first their projection."""
    scale_input: bool = True
    """Divide the target's state by its root mean square and by √2."""
    targets: net.Targets = "drawn"
    """What a head learns: the policy's token, or the distribution it was drawn from."""


class RecurrentNet(net.DraftNet):
    """A drafter's network without attention: see DraftNet."""

    Options: ClassVar[type[Config]] = RecurrentOptions

    def __init__(self, target: config.ModelConfig, options: RecurrentOptions) -> None:
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

    @classmethod
    def fresh(cls, target: config.ModelConfig, options: RecurrentOptions, seed: int) -> Self:
        """See DraftNet.fresh; matrices are normal(0, spread), and norms only divide by the root
        mean square.
        """
        fresh, generator = cls(target, options), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in fresh.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0, fresh.spread(parameter), generator=generator)
        return fresh

    @classmethod
    def parse(
        cls, raw: Mapping[str, Any], target: config.ModelConfig, options: RecurrentOptions
    ) -> Self:
        """See DraftNet.parse; the shape is the checkpoint's, the learning settings are the
        options'.
        """
        if (name := config.architecture(raw)) not in cls.kind.architectures:
            message = f"architectures is no {cls.kind.name} drafter"
            raise InvalidInput(message, seen=name, allowed=", ".join(cls.kind.architectures))
        return cls(target, options.model_copy(update=cls.read_shape(raw, target)))

    @classmethod
    @abstractmethod
    def read_shape(cls, raw: Mapping[str, Any], target: config.ModelConfig) -> dict[str, Any]:
        """Options that a config.json fixes. Raises InvalidInput with the key that does
        not match.
        """

    @property
    def capture(self) -> base.CaptureSpec:
        """See DraftNet.capture."""
        return base.CaptureSpec()

    def bind(self, embed: Tensor, head: Tensor) -> None:
        """See DraftNet.bind; only lm_head is used, to learn distributions."""
        self.target_head = head.detach()

    def add_heads(self, count: int) -> None:
        """Adds the heads of the drafts, `head.0` and so on."""
        heads = (Linear(self.width, self.target.vocab_size, bias=False) for _ in range(count))
        self.add_module("head", nn.ModuleList(heads))

    def norm_pair(self, name: str) -> tuple[Tensor, Tensor]:
        """Weight and bias of a norm."""
        return self.get_parameter(f"{name}.weight"), self.get_parameter(f"{name}.bias")

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

    def cell(self, sums: Tensor, state: State, weights: StepWeights) -> State:
        """The next state, GELU(ln(sums)); sums [N, G D]: W h + (ew / sw) E(token) of every gate;
        `state`: the previous state.
        """
        return (functional.gelu(biased_norm(sums, *weights.norms[0])),)

    def advance(self, weights: StepWeights, state: State, tokens: Tensor) -> State:
        """The state after reading tokens int64 [N]; see `cell`."""
        embedded = torch.cat(
            [functional.embedding(tokens, table) for table in weights.embeds], dim=-1
        )
        if (gates := weights.proj.shape[0] // embedded.shape[-1]) > 1:
            embedded = embedded.repeat(1, gates)
        sums = torch.addmm(embedded, state[0], weights.proj.t(), beta=self.token_weight)
        return self.cell(sums, state, weights)

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
        }

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
                message = f"tensor {given} is tied to {name}, but the two differ"
                raise WeightsError(message, seen=given, allowed="equal")
        return own


class RecurrentDrafter(net_drafter.NetDrafter[RecurrentNet]):
    """A speculator with a recurrent network (see speculators/base.py for the methods)."""

    def __init__(self, setup: base.SpeculatorSetup) -> None:
        super().__init__(setup)
        self._serve(self._net)

    def _serve(self, net: RecurrentNet) -> None:
        self._net = copy.deepcopy(net).requires_grad_(False).to(self._device, self._dtype)
        serve_matrices(one for one in self._net.parameters() if one.dim() == 2)
        self._weights = self._net.step_weights()

    def bind(self, target: decoder.DecoderWeights) -> None:
        """No effect: it has its own embeddings and heads."""

    def propose(self, batch: base.DraftBatch, shape: base.DraftShape) -> base.Drafts:
        """The most likely chain or tree, at most n_predict levels; see Speculator.propose."""
        shape = replace(shape, steps=min(shape.steps, len(self._weights)))
        slots = torch.tensor(batch.slots, device=self._device)
        last = torch.tensor(batch.lengths, device=self._device) - 1
        # A sequence of one token has no state yet; its drafts use the state at position 0, whatever
        # it is.
        hidden = batch.hidden[
            slots, (last - 1).clamp_(min=0), -self._target.config.hidden_size :
        ].to(self._dtype)
        state = self._net.advance(
            self._weights[0], self._net.start(hidden), batch.token_ids[slots, last]
        )
        if shape.topk > 1:
            return self._tree(len(batch.slots), state, shape)

        def advance(step: int, tokens: Tensor) -> Tensor:
            nonlocal state
            state = self._net.advance(self._weights[step], state, tokens)
            return _logits(self._weights[step], state)

        return self._chain(shape, _logits(self._weights[0], state), advance)

    def _tree(self, count: int, state: State, shape: base.DraftShape) -> base.Drafts:
        """EAGLE-2's tree; every node of a beam has its own state."""
        rows = torch.arange(count, device=self._device)[:, None]

        def expand(beam: net_drafter.Beam) -> Tensor:
            nonlocal state
            weights = self._weights[beam.level]
            sources = (
                part.view(count, -1, part.shape[-1])[rows, beam.sources].flatten(0, 1)
                for part in state
            )
            state = self._net.advance(weights, tuple(sources), beam.tokens.flatten())
            return net_drafter.logprobs(_logits(weights, state)).view(
                count, beam.tokens.shape[1], -1
            )

        return net_drafter.grow_tree(
            net_drafter.logprobs(_logits(self._weights[0], state)), expand, shape
        )


def _logits(weights: StepWeights, state: State) -> Tensor:
    return linear(state[0], weights.head)
