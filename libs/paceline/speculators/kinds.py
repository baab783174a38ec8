"""Lists the speculators: names, arms, architectures, input layers, and support by engines.

A target layer is named by the residual stream that enters it (base.py, CaptureSpec). A checkpoint's
config.json names the layer before, one less.

Imports no torch, so that the command line and the gateway's front can read it. Networks and
drafters are given by import path, and loading.py loads them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from paceline.arm_names import OFF
from paceline.errors import ConfigError, InvalidInput
from paceline.models.config import ARCHITECTURES, architecture, read_config_json
from paceline.plugins import find_variant

INNER_STATES = 3
"""States that an EAGLE-3 drafter reads besides the last."""
SHALLOWEST = INNER_STATES + 1
"""Least number of target layers, since nothing is read before the first one."""

InnerLayers = Callable[[Mapping[str, Any], int], tuple[int, ...]]
"""Function of (config.json of a drafter, empty for a new drafter; number of its target's layers).
Returns the target layers with inputs that the drafter reads, besides the last state.
"""


def last_state_only(config_json: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Returns no inner layer."""
    return ()


def default_inner_layers(num_layers: int, drafter: str = "EAGLE-3") -> tuple[int, int, int]:
    """Layers 2, L // 2 and L - 3 (Li et al. 2025, arXiv 2503.01840, as released: low, middle and
    high).

    Below seven layers these do not ascend, and the nearest three ascending layers of 1 .. L - 1 are
    used. Raises ConfigError naming the drafter for fewer than four layers.
    """
    if num_layers < SHALLOWEST:
        message = f"the target is too shallow for {drafter}"
        raise ConfigError(message, seen=num_layers, allowed=f">= {SHALLOWEST} layers")

    low, middle, high = 2, num_layers // 2, num_layers - 3
    if low < middle < high:
        return low, middle, high
    triples = combinations(range(1, num_layers), 3)
    return min(
        triples, key=lambda one: abs(one[0] - low) + abs(one[1] - middle) + abs(one[2] - high)
    )


def check_inner_layers(layers: tuple[int, ...], num_layers: int) -> None:
    """Raises ConfigError unless the layers ascend within 1 .. num_layers - 1."""
    if layers != tuple(sorted(set(layers))) or (
        layers and not 0 < layers[0] <= layers[-1] < num_layers
    ):
        allowed = f"ascending layers of 1 to {num_layers - 1}"
        raise ConfigError("inner states", seen=layers, allowed=allowed)


def inner_layers(
    num_layers: int, chosen: tuple[int, ...] = (), drafter: str = "EAGLE-3"
) -> tuple[int, ...]:
    """Layers that a drafter reads, ascending: the chosen layers, else EAGLE-3's rule, so that both
    kinds learn from the same rows.

    Raises ConfigError below four layers, and unless the choice is ascending layers of the target,
    for EAGLE-3 three of them.
    """
    if not chosen:
        return default_inner_layers(num_layers, drafter)
    if drafter == "EAGLE-3" and len(chosen) != INNER_STATES:
        raise ConfigError("inner states of EAGLE-3", seen=chosen, allowed=f"{INNER_STATES} layers")
    check_inner_layers(chosen, num_layers)
    return chosen


def eagle3_inner_layers(config_json: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Layers of a target with `num_layers` that the EAGLE-3 drafter of a config.json reads.

    Raises ConfigError as `inner_layers`, and for a value that is no list of layers.
    """
    left = (config_json.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return inner_layers(num_layers, _entered(left, "EAGLE-3") if left else ())


def dflash_inner_layers(config_json: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Layers of a target with `num_layers` that the DFlash drafter of a config.json reads.

    Raises ConfigError as `inner_layers`, and for a value that is no list of layers.
    """
    inside = config_json.get("dflash_config") or {}
    left = inside.get("target_layer_ids", config_json.get("target_layer_ids"))
    return inner_layers(num_layers, () if left is None else _entered(left, "DFlash"), "DFlash")


def _entered(left: Any, drafter: str) -> tuple[int, ...]:
    """The layers after those of a checkpoint, which names the layer that outputs a state."""
    if not isinstance(left, list) or not left or any(type(one) is not int for one in left):
        raise ConfigError(f"inner states of {drafter}", seen=left, allowed="a list of layers")
    return tuple(layer + 1 for layer in left)


@dataclass(frozen=True, slots=True)
class SGLangSupport:
    """SGLang's support of a kind."""

    algorithm: str
    """Value for --speculative-algorithm."""
    shapes: tuple[str, ...]
    """As SpeculatorKind.shapes."""
    architecture_ending: str = ""
    """Suffix of the architectures that SGLang loads as this kind; empty: none."""
    trees: bool = True
    """False: its tree has no width, so arms are chains."""
    fc_bias: bool = False
    """Whether its module has an fc.bias, drawn at random if the checkpoint has none."""
    shared_with_target: tuple[str, ...] = ()
    """Tensors shared with the target by reference: loading them would overwrite the
    policy's own.
    """


@dataclass(frozen=True, slots=True)
class SpeculatorKind:
    """One kind of speculator. A network's class points back to it by `kind`."""

    name: str
    """Name in arms, settings, metrics and the journal: lower-case letters and digits."""
    drafter: str | Callable[..., Any]
    """The embedded engine's drafter: SpeculatorSetup -> Speculator, or its import path."""
    net: str = ""
    """Import path of its DraftNet; empty: it has no weights and is not trained."""
    architectures: tuple[str, ...] = ()
    """Architectures in config.json of the checkpoints that the network reads."""
    shapes: tuple[str, ...] = ("3_1_4", "5_1_6")
    """Default drafts of the embedded engine: steps, topk, draft tokens."""
    inner_layers: InnerLayers = last_state_only
    trees: bool = True
    """False: the embedded engine drafts chains only."""
    sglang: SGLangSupport | None = None
    """None: SGLang cannot serve it."""

    @property
    def trained(self) -> bool:
        """Whether it has weights."""
        return bool(self.net)

    @property
    def arms(self) -> tuple[str, ...]:
        """Default arms of the embedded engine."""
        return tuple(f"{self.name}:{shape}" for shape in self.shapes)


_SGLANG_SHAPES = ("3_1_4", "5_1_6", "3_2_8")

_KINDS = (
    SpeculatorKind(
        "eagle",
        "paceline.speculators.eagle:EagleDrafter",
        "paceline.speculators.eagle:EagleNet",
        tuple(f"{target}Eagle" for target in ARCHITECTURES),
        shapes=("3_1_4", "5_1_6", "7_1_8"),
        sglang=SGLangSupport(
            "EAGLE",
            _SGLANG_SHAPES,
            architecture_ending="Eagle",
            fc_bias=True,
            shared_with_target=("embed_tokens.weight", "lm_head.weight"),
        ),
    ),
    SpeculatorKind(
        "eagle3",
        "paceline.speculators.eagle3:Eagle3Drafter",
        "paceline.speculators.eagle3:Eagle3Net",
        ("LlamaForCausalLMEagle3",),
        shapes=("3_1_4", "5_1_6", "7_1_8"),
        inner_layers=eagle3_inner_layers,
        sglang=SGLangSupport(
            "EAGLE3",
            _SGLANG_SHAPES,
            architecture_ending="Eagle3",
            shared_with_target=("embed_tokens.weight",),
        ),
    ),
    SpeculatorKind(
        "dflash",
        "paceline.speculators.dflash:DflashDrafter",
        "paceline.speculators.dflash:DflashNet",
        ("DFlashDraftModel",),
        shapes=("3_1_4", "5_1_6", "7_1_8"),
        inner_layers=dflash_inner_layers,
    ),
    SpeculatorKind(
        "lstm",
        "paceline.speculators.lstm_drafter:LstmDrafter",
        "paceline.speculators.lstm:LstmNet",
        ("ArcticLSTMSpeculatorPreTrainedModel",),
    ),
    SpeculatorKind(
        "ngram",
        "paceline.speculators.ngram:NgramSpeculator",
        shapes=("4_1_5",),
        sglang=SGLangSupport("NGRAM", ("4_1_5",), trees=False),
    ),
    SpeculatorKind(
        "self",
        "paceline.speculators.own_weights:SelfDrafter",
        shapes=("2_1_3", "4_1_5"),
        trees=False,
    ),
)
SPECULATORS = {kind.name: kind for kind in _KINDS}
SGLANG = {kind.name: kind.sglang for kind in _KINDS if kind.sglang is not None}
"""SGLang's support by name, for the kinds that it serves."""


def find_kind(name: str) -> SpeculatorKind:
    """The speculator of a name or an import path. Raises ConfigError."""
    kind = find_variant(name, SPECULATORS, "speculator")
    if not isinstance(kind, SpeculatorKind):
        raise ConfigError("no speculator", seen=name, allowed="a SpeculatorKind")
    return kind


def drafter_directory(drafter: str) -> Path | None:
    """The checkpoint directory in a drafter's setting; None for `off`, a name or an import path.

    A path with a slash is a directory, existing or not, unless it is "file.py:KIND"; the name of a
    kind never is.
    """
    if ".py:" in drafter or drafter in (OFF, *SPECULATORS):
        return None
    return Path(drafter) if "/" in drafter or Path(drafter).is_dir() else None


def kind_of_checkpoint(directory: Path, kinds: Iterable[SpeculatorKind]) -> SpeculatorKind:
    """The kind that wrote a checkpoint directory.

    Raises InvalidInput naming the directory if there is none.
    """
    kinds = list(kinds)
    try:
        name = architecture(read_config_json(directory))
    except InvalidInput as error:
        raise error.within(f"drafter {directory}") from error
    for kind in kinds:
        if name in kind.architectures:
            return kind
    message = f"drafter {directory}: architectures names no speculator here"
    allowed = ", ".join(sorted(one for kind in kinds for one in kind.architectures))
    raise InvalidInput(message, seen=name, allowed=allowed)


def inner_layers_read(drafters: Iterable[str], num_layers: int) -> tuple[int, ...]:
    """Ascending target layers with inputs that the drafters read, besides the last state. Drafters
    are given by name or directory, the target by its number of layers. Raises ConfigError for a
    drafter that does not exist.
    """
    found = [(name, drafter_directory(name)) for name in drafters if name != OFF]
    kinds = [find_kind(name) for name, directory in found if directory is None]
    read = {layer for kind in kinds for layer in kind.inner_layers({}, num_layers)}
    for directory in (one for _, one in found if one is not None):
        kind = kind_of_checkpoint(directory, [*SPECULATORS.values(), *kinds])
        read.update(kind.inner_layers(read_config_json(directory), num_layers))
    return tuple(sorted(read))
