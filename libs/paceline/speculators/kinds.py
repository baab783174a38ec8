"""Lists the speculators: names, arms, architectures, input layers, and support by engines.

Imports no torch, so that the command line and the gateway's front can read it. Networks and
drafters are given by import path, and loading.py loads them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.arm_names import OFF
from paceline.errors import ConfigError, InvalidInput
from paceline.models.config import ARCHITECTURES, architecture, read_config_json
from paceline.models.inner_layers import dflash_inner_layers, eagle3_inner_layers
from paceline.plugins import find_variant

InnerLayers = Callable[[Mapping[str, Any], int], tuple[int, ...]]
"""Function of (config.json of a drafter, empty for a new drafter; number of its target's layers).
Returns the target layers with inputs that the drafter reads, besides the last state.
"""


def last_state_only(config_json: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Returns no inner layer."""
    return ()


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
        "paceline.speculators.dflash_drafter:DflashDrafter",
        "paceline.speculators.dflash:DflashNet",
        ("DFlashDraftModel",),
        shapes=("3_1_4", "5_1_6", "7_1_8"),
        inner_layers=dflash_inner_layers,
    ),
    SpeculatorKind(
        "lstm",
        "paceline.speculators.lstm:LstmDrafter",
        "paceline.speculators.lstm:LstmNet",
        ("ArcticLSTMSpeculatorPreTrainedModel",),
    ),
    SpeculatorKind(
        "mlp",
        "paceline.speculators.mlp:MlpDrafter",
        "paceline.speculators.mlp:MlpNet",
        ("MLPSpeculatorPreTrainedModel",),
    ),
    SpeculatorKind(
        "ngram",
        "paceline.speculators.ngram:NgramSpeculator",
        shapes=("4_1_5",),
        sglang=SGLangSupport("NGRAM", ("4_1_5",), trees=False),
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
