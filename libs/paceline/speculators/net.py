"""A drafter's network, shared by trainer and engine: its inputs, its predictions, its
losses, its storage.
"""

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Int
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from paceline.config import Config
from paceline.errors import ConfigError, InvalidInput, WeightsError
from paceline.models import config, loading
from paceline.plugins import import_object
from paceline.speculators import base, kinds, packed

HEADS = frozenset({"head", "lm_head"})
"""Modules with weights that map states to tokens."""


Targets = Literal["drawn", "distribution"]
"""What a draft learns: the policy's token, or the distribution it was drawn from."""


class Objective(NamedTuple):
    """A loss as sums over positions, so that micro-batches of unequal size weigh every position
    equally.
    """

    loss: Tensor
    """Scalar, differentiable."""
    positions: Tensor
    """Scalar: number of summed positions; the optimiser follows their mean."""
    terms: dict[str, Tensor]
    """Detached scalars by name, summed over the same positions: parts of the loss, and correct
    first drafts ("correct").
    """


class DraftNet(nn.Module, ABC):
    """Network of a speculator with weights. Bind the target's embed_tokens and lm_head before the
    first forward.

    Names and shapes of the state dict are the checkpoint file's.
    """

    kind: ClassVar[kinds.SpeculatorKind]
    """The entry that names this class."""
    Options: ClassVar[type[Config]]
    """Settings of its shape and loss, with the names of a trainer's configuration."""

    def __init__(self) -> None:
        super().__init__()
        # Plain tensors, not parameters or buffers: they belong to the target, and are not trained,
        # sharded or exported.
        self.embed: Tensor = torch.empty(0)
        self.head: Tensor = torch.empty(0)

    # ---- description of a network

    @classmethod
    @abstractmethod
    def fresh(cls, target: config.ModelConfig, options: Any, seed: int) -> Self:
        """An untrained network for a target; `options` are of the class Options."""

    @classmethod
    def read_options(cls, raw: Mapping[str, Any]) -> Config:
        """Its settings from a configuration.

        Raises ConfigError naming the first invalid setting.
        """
        try:
            return cls.Options.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            key, allowed = ".".join(map(str, first["loc"])), ", ".join(cls.Options.model_fields)
            message = f"option {key} of {cls.kind.name}: {first['msg']}"
            raise ConfigError(message, seen=first["input"], allowed=allowed) from error

    @classmethod
    @abstractmethod
    def parse(cls, raw: Mapping[str, Any], target: config.ModelConfig, options: Any) -> Self:
        """A network of the shape in a checkpoint's config.json, without its weights.

        Raises InvalidInput naming the key that does not match the target.
        """

    def twin(self) -> Self:
        """A copy of the network, bound to the same target by reference."""
        of_target = {id(one): one for one in vars(self).values() if isinstance(one, Tensor)}
        return copy.deepcopy(self, of_target)

    @property
    @abstractmethod
    def capture(self) -> base.CaptureSpec:
        """Its inputs from the target."""

    def shards(self) -> tuple[nn.Module, ...]:
        """Parts that FSDP2 gathers one at a time, apart from the rest."""
        return ()

    def matrices(self) -> list[str]:
        """Names of the weights between states. Embeddings and heads are excluded, since their rows
        are tokens.
        """
        return [
            f"{name}.weight"
            for name, module in self.named_modules()
            if isinstance(module, nn.Linear)
            and module.weight.requires_grad
            and not HEADS & set(name.split("."))
        ]

    # ---- learning

    @abstractmethod
    def forward(self, row: packed.PackedRow) -> Objective:
        """Loss over the valid positions of a row. The only entry point while the network is
        sharded.
        """

    @abstractmethod
    def chain_states(
        self, row: packed.PackedRow, steps: int
    ) -> Iterator[tuple[int, slice, Tensor]]:
        """Yields (step, N positions, states [N, S] for `draft_logits`), computed on demand.

        Steps count from 0 and ascend at every position; a network may end before `steps`.
        Teacher-forced on the row's own tokens, which equals the engine's greedy chain as long as
        all earlier drafts were right. Positions with a step outside their document have no meaning.
        """

    @abstractmethod
    def draft_logits(self, step: int, states: Tensor) -> Tensor:
        """Logits [N, V] of draft step + 1, -inf for tokens that it cannot draft."""

    def bind(self, embed: Tensor, head: Tensor) -> None:
        """Uses the target's embed_tokens [V, H] and lm_head [V, H] by reference."""
        self.embed, self.head = embed.detach(), head.detach()

    # ---- checkpoints

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor name of a checkpoint and its shape; the names are those of the published
        loaders.
        """
        return {name: tuple(value.shape) for name, value in self.state_dict().items()}

    @abstractmethod
    def config_json(self) -> dict[str, Any]:
        """config.json of a checkpoint."""

    def own_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A file's tensors under this network's names, without copies of the target's tensors,
        which some exporters write.
        """
        return dict(tensors)

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises WeightsError for tensors, under this network's names, that differ from its own
        set.
        """
        loading.check_tensors(tensors, self.shapes())

    def export_tensors(self) -> dict[str, Tensor]:
        """Tensors to push or save, detached, on the CPU. The network must not be sharded.

        Raises WeightsError for non-finite numbers.
        """
        tensors = {name: value.detach().cpu() for name, value in self.state_dict().items()}
        self.check(tensors)
        return {name: value.contiguous() for name, value in tensors.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies a checkpoint's tensors.

        Raises WeightsError naming a tensor that is missing, extra or misshapen.
        """
        named = self.own_tensors(tensors)
        self.check(named)
        self.load_state_dict(named)

    def save(self, directory: Path) -> None:
        """Writes model.safetensors and config.json."""
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / "model.safetensors"
        save_file(self.export_tensors(), file, metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(self.config_json(), indent=2) + "\n")

    @classmethod
    def read(
        cls, directory: Path, target: config.ModelConfig, options: Config | None = None
    ) -> Self:
        """The network of a checkpoint directory, checked against its target.

        Raises InvalidInput (no checkpoint, or a config.json that does not match), WeightsError or
        DataLoss, each naming the directory.
        """
        raw = config.read_config_json(directory)
        try:
            net = cls.parse(raw, target, options or cls.Options())
            net.load_tensors(loading.read_tensors(directory))
        except (InvalidInput, WeightsError) as error:
            raise error.within(f"drafter {directory}") from error
        return net


def eagle_loss(
    predicted: Float[Tensor, "T H"],
    target: Float[Tensor, "T H"],
    lm_head: Float[Tensor, "V H"],
    valid: Bool[Tensor, " T"],
    *,
    feature_weight: float = 1.0,
    token_weight: float = 0.1,
) -> Objective:
    """EAGLE-1 objective (Li et al. 2024, section 3.3), summed over the valid positions.

    loss_t = feature_weight * mean_H SmoothL1(f_t - h_{t+1})
           + token_weight * CE(softmax(W h_{t+1}), log_softmax(W f_t))

    Row t of `predicted` is f_t, row t of `target` is h_{t+1}, both states that W = lm_head turns
    into logits of token t+2. The head is not trained.
    """
    predicted, target = predicted[valid], target[valid]
    feature = functional.smooth_l1_loss(predicted, target, reduction="none").mean(dim=-1).sum()
    predicted_logits, target_logits = predicted @ lm_head.T, target @ lm_head.T
    log_q = torch.log_softmax(predicted_logits.float(), dim=-1)
    token = -(torch.softmax(target_logits.float(), dim=-1) * log_q).sum()
    correct = (predicted_logits.argmax(-1) == target_logits.argmax(-1)).sum()
    return Objective(
        loss=feature_weight * feature + token_weight * token,
        positions=valid.sum(),
        terms={"feature": feature.detach(), "token": token.detach(), "correct": correct},
    )


@torch.no_grad()
def teacher_of(
    states: Float[Tensor, "T H"], lm_head: Float[Tensor, "V H"], t2d: Bool[Tensor, " V"]
) -> tuple[Float[Tensor, "T Vd"], Bool[Tensor, " T"]]:
    """From the target's last hidden states: its log p of the Vd draftable tokens (mask t2d), and
    whether its most likely token is draftable. p is not renormalised: the missing mass can only be
    rejected.
    """
    log_p = torch.log_softmax((states @ lm_head.T.to(states.dtype)).float(), dim=-1)
    return log_p[:, t2d], t2d[log_p.argmax(-1)]


def draft_losses(
    logits: Float[Tensor, "N Vd"], log_p: Float[Tensor, "N Vd"]
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Loss -sum_v p'_v log q_v of each position (EAGLE-3, Li et al. 2025, arXiv 2503.01840), and
    its acceptance sum_v min(p_v, q_v), without gradient.

    q = softmax(logits); p as in teacher_of; p' = p / sum_v p_v over the draftable tokens v.
    """
    log_q = torch.log_softmax(logits.float(), dim=-1)
    alpha = torch.minimum(log_p, log_q.detach()).exp().sum(-1)
    return -(torch.softmax(log_p, dim=-1) * log_q).sum(-1), alpha


def target_losses(
    logits: Float[Tensor, "M V"],
    row: packed.PackedRow,
    head: Float[Tensor, "V H"],
    places: Int[Tensor, " M"],
    targets: Targets,
) -> tuple[Float[Tensor, " M"], Bool[Tensor, " M"]]:
    """Cross-entropy of each draft to the target at its place in the row, the policy's token or its
    distribution softmax(head h); and whether the most likely token is the target's drawn or most
    likely one.
    """
    log_q = torch.log_softmax(logits.float(), dim=-1)
    if targets == "drawn":
        tokens = row.draft_tokens[places]
        return -log_q.gather(1, tokens[:, None])[:, 0], log_q.argmax(-1) == tokens
    # Each distribution is computed once, even if several blocks draft the same token.
    needed, which = places.unique(return_inverse=True)
    states = row.next_states[needed]
    p = torch.softmax((states @ head.T.to(states.dtype)).float(), dim=-1)[which]
    return -(p * log_q).sum(-1), log_q.argmax(-1) == p.argmax(-1)


def check_fit(raw: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises InvalidInput naming the first key of a drafter's config.json that does not match its
    target.
    """
    for key, value in expected.items():
        if raw.get(key) != value:
            raise InvalidInput(
                f"{key} of drafter and target differ", seen=raw.get(key, "(none)"), allowed=value
            )


def net_of(kind: kinds.SpeculatorKind) -> type[DraftNet]:
    """The network of a kind.

    Raises ConfigError for a kind without weights, and for a network of another kind.
    """
    if not kind.trained:
        raise ConfigError(
            "a speculator without weights is not trained",
            seen=kind.name,
            allowed="one with weights",
        )
    net: type[DraftNet] = import_object(kind.net)
    if net.kind is not kind:
        raise ConfigError("a network names another kind", seen=net.kind.name, allowed=kind.name)
    return net


def trained_net(name: str) -> type[DraftNet]:
    """The network of a speculator, named as in `find_kind`.

    Raises ConfigError for a speculator without weights.
    """
    return net_of(kinds.find_kind(name))


def build_drafter(kind: kinds.SpeculatorKind, setup: base.SpeculatorSetup) -> base.Speculator:
    """The embedded engine's drafter. Raises the errors of the drafter's class."""
    drafter = import_object(kind.drafter) if isinstance(kind.drafter, str) else kind.drafter
    built: base.Speculator = drafter(setup)
    return built


def read_drafter(
    directory: Path, target: config.ModelConfig, own: Iterable[kinds.SpeculatorKind] = ()
) -> DraftNet:
    """The network of a checkpoint directory, of any kind; `own`: kinds besides the table's.

    Raises InvalidInput, WeightsError or DataLoss, each naming the directory.
    """
    kind = kinds.kind_of_checkpoint(directory, [*kinds.SPECULATORS.values(), *own])
    return net_of(kind).read(directory, target)
