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
        """Logits [N, draft ids] of draft step + 1, see `token_ids`."""

    @property
    def token_ids(self) -> Tensor | None:
        """int64 [Vd], ascending: the tokens it can draft, by draft id; None: all."""
        return None

    def follow_tokens(self, counts: Tensor) -> None:
        """Renews a draft vocabulary that may change between two versions, from counts int64 [V] of
        the policy's tokens.
        """

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


class _SoftCrossEntropy(torch.autograd.Function):
    """The cross-entropy of soft_losses with its gradient, computed in one pass over the logits."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, logits: Tensor, ids: Tensor, inside: Tensor, p: Tensor, rest: Tensor
    ) -> tuple[Tensor, Tensor]:
        q = torch.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        taught = q.gather(1, ids) * inside
        q_rest = (1 - taught.sum(-1, keepdim=True)).clamp(min=_LEAST)
        losses = -(p * taught.clamp(min=_LEAST).log()).sum(-1)
        losses -= rest[:, 0] * q_rest.log()[:, 0]
        # d/dx of a taught token is q - p, of another one q (1 - rest / q_rest).
        share = rest / q_rest
        gradient = q.mul_(1 - share).scatter_add_(1, ids, taught * share - p)
        ctx.save_for_backward(gradient.to(logits.dtype))
        ctx.mark_non_differentiable(taught)
        return losses, taught

    @staticmethod
    def backward(ctx, of_losses: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        (gradient,) = ctx.saved_tensors
        return (gradient * of_losses[:, None].to(gradient.dtype), None, None, None, None)


_LEAST = 1e-9


def soft_losses(
    logits: Float[Tensor, "N Vd"],
    row: packed.PackedRow,
    places: Int[Tensor, " N"],
    draft_ids: Int[Tensor, " V"] | None = None,
) -> tuple[Float[Tensor, " N"], Bool[Tensor, " N"], Float[Tensor, " N"]]:
    """From N drafts, the taught row with their targets at `places`, and draft ids by token (-1: not
    draftable; None: token ids): the loss of each draft

        -sum_v p'_v log q_v - r' log(1 - sum_v q_v)

    over the policy's draftable likeliest tokens v, with q = softmax(logits) and p', r' in
    proportion to p_v and to the mass r outside the likeliest tokens, with sum 1; whether the most
    likely draft is the policy's most likely token; and the acceptance sum_v min(p_v, q_v).

    If the likeliest tokens are all tokens, this is EAGLE-3's loss (Li et al. 2025, arXiv
    2503.01840): missing mass can only be rejected and is not taught.
    """
    assert row.top_tokens is not None
    assert row.top_logp is not None
    tokens, p = row.top_tokens[places].long(), row.top_logp[places].exp()
    ids = tokens if draft_ids is None else draft_ids[tokens]
    rest = (1 - p.sum(-1, keepdim=True)).clamp(min=0)
    if row.top_tokens.shape[1] == (logits.shape[1] if draft_ids is None else len(draft_ids)):
        rest = torch.zeros_like(rest)
    inside, ids = ids >= 0, ids.clamp(min=0)
    right = logits.gather(1, ids[:, :1])[:, 0] >= logits.amax(-1)  # argmax is slow in bfloat16
    p = p * inside
    mass = (p.sum(-1, keepdim=True) + rest).clamp(min=_LEAST)
    losses, q = _SoftCrossEntropy.apply(logits, ids, inside, p / mass, rest / mass)
    return losses, right & inside[:, 0], torch.minimum(p, q).sum(-1)


def target_losses(
    logits: Float[Tensor, "M Vd"],
    row: packed.PackedRow,
    places: Int[Tensor, " M"],
    targets: Targets,
    draft_ids: Int[Tensor, " V"] | None = None,
) -> tuple[Float[Tensor, " M"], Bool[Tensor, " M"]]:
    """Cross-entropy of each draft to the target at its place in the taught row, the policy's token
    or its distribution (`soft_losses`); and whether the most likely token is the target's drawn or
    most likely one. A token that cannot be drafted is not taught.
    """
    if targets == "distribution":
        losses, right, _ = soft_losses(logits, row, places, draft_ids)
        assert row.top_tokens is not None
        tokens = row.top_tokens[places, 0].long()
    else:
        log_q, tokens = torch.log_softmax(logits.float(), dim=-1), row.draft_tokens[places]
        ids = tokens if draft_ids is None else draft_ids[tokens]
        losses = -log_q.gather(1, ids.clamp(min=0)[:, None])[:, 0]
        right = log_q.argmax(-1) == ids
    return losses if draft_ids is None else losses * (draft_ids[tokens] >= 0), right


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
