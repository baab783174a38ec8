"""The speculators there are, and which of them a name, an import path or a checkpoint means."""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.errors import ConfigError, InvalidInput
from paceline.models.config import ModelConfig, architecture, read_config_json
from paceline.speculators.base import Speculator, SpeculatorSetup
from paceline.speculators.eagle.drafter import EagleDrafter
from paceline.speculators.eagle.net import EagleNet
from paceline.speculators.eagle3.drafter import Eagle3Drafter
from paceline.speculators.eagle3.net import Eagle3Net
from paceline.speculators.net import DraftNet
from paceline.speculators.ngram import NgramSpeculator
from paceline.speculators.recurrent.drafter import RecurrentDrafter
from paceline.speculators.recurrent.lstm import LstmNet
from paceline.speculators.recurrent.mlp import MlpNet


@dataclass(frozen=True, slots=True)
class SpeculatorKind:
    """One speculator: what the engine drafts with and, if it has weights, what the trainer
    trains.
    """

    drafter: Callable[[SpeculatorSetup], Speculator]
    net: type[DraftNet] | None = None


SPECULATORS: dict[str, SpeculatorKind] = {
    "eagle": SpeculatorKind(EagleDrafter, EagleNet),
    "eagle3": SpeculatorKind(Eagle3Drafter, Eagle3Net),
    "lstm": SpeculatorKind(partial(RecurrentDrafter, LstmNet), LstmNet),
    "mlp": SpeculatorKind(partial(RecurrentDrafter, MlpNet), MlpNet),
    "ngram": SpeculatorKind(NgramSpeculator),
}


def find_kind(name: str) -> SpeculatorKind:
    """The speculator of a name, or a user's own: package.module:KIND or path/to/file.py:KIND.

    Raises ConfigError.
    """
    if (known := SPECULATORS.get(name)) is not None:
        return known
    try:
        kind = _imported(name) if ":" in name else None
    except (ImportError, AttributeError, ValueError, OSError) as error:
        raise ConfigError("a speculator cannot be imported", seen=f"{name}: {error}") from error
    if not isinstance(kind, SpeculatorKind):
        allowed = f"{', '.join(SPECULATORS)}, package.module:KIND or file.py:KIND, a SpeculatorKind"
        raise ConfigError("no such speculator", seen=name, allowed=allowed)
    return kind


def _imported(name: str) -> object:
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        return pkgutil.resolve_name(name)
    path = Path(place).resolve()
    # one module per file, however often it is named
    module_name = f"{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    return getattr(sys.modules[module_name], attribute)


def read_drafter(
    directory: Path, target: ModelConfig, own: Iterable[type[DraftNet]] = ()
) -> DraftNet:
    """The network of a checkpoint directory, of whichever speculator wrote it; `own`: kinds beside
    the table's.

    Raises InvalidInput, WeightsError or DataLoss, each naming the directory.
    """
    nets = [*(kind.net for kind in SPECULATORS.values() if kind.net is not None), *own]
    return net_of(directory, nets).read(directory, target)


def net_of(directory: Path, nets: Sequence[type[DraftNet]]) -> type[DraftNet]:
    """Which of the networks wrote a checkpoint directory.

    Raises InvalidInput naming the directory when none did.
    """
    try:
        name = architecture(read_config_json(directory))
    except InvalidInput as error:
        raise InvalidInput(
            f"drafter {directory}: {error.message}", seen=error.seen, allowed=error.allowed
        ) from error
    for net in nets:
        if name in net.architectures:
            return net
    allowed = ", ".join(sorted(one for net in nets for one in net.architectures))
    raise InvalidInput(
        f"drafter {directory}: architectures names no speculator here", seen=name, allowed=allowed
    )


def trained_net(name: str) -> type[DraftNet]:
    """The network of a speculator that is named as in `find_kind`.

    Raises ConfigError for one without weights.
    """
    net = find_kind(name).net
    if net is None:
        raise ConfigError(
            "a speculator without weights is not trained", seen=name, allowed="one with weights"
        )
    return net
