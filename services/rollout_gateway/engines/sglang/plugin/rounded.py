"""New weights for layers that SGLang lays out anew after it has loaded them (`quantization =
"fp8"`, the profile int8_w8a8), in the storages that serve, so that captured CUDA graphs read them.

Rounding replaces a layer's parameters by others of another layout, which SGLang's loaders do not
know. Two records mend that (FlashRL; Liu et al. 2025): the parameters as they are loaded, kept
without memory, and those that serve. An update puts the first in the place of the second, lets
SGLang load and round as at its start, copies the result into the storages that serve and puts these
back; a decoder layer at a time, so that no more than one is there twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.errors import WeightsError

_RECORD, _LOADABLE = "paceline_rounded", "paceline_loadable"
_LAYER = re.compile(r"model\.layers\.\d+\.")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A parameter as SGLang loads it: with what its loaders read of it, and without memory."""

    parameter: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(parameter: nn.Parameter) -> Loaded:
        """As it is now."""
        return Loaded(parameter, parameter.shape, parameter.stride())

    def fill(self, device: torch.device) -> None:
        """Memory for numbers that come now."""
        self.parameter.data = torch.empty_strided(
            self.shape, self.stride, dtype=self.parameter.dtype, device=device
        )

    def drop(self) -> None:
        """Until the next update."""
        self.parameter.data = self.parameter.data.new_empty(0)


Record = dict[str, dict[str, Loaded]]
"""By module and parameter."""
Pairs = Iterable[tuple[str, Tensor]]


def postprocessed(
    plugin: Any, original: Callable[..., None], model: nn.Module, target_device: torch.device
) -> None:
    """AROUND DefaultModelLoader.postprocess_weights: records what rounding replaces. An update has
    rounded already when SGLang's session ends.
    """
    if hasattr(model, _RECORD):
        return
    before = {
        name: {key: Loaded.of(one) for key, one in _parameters(module).items()}
        for name, module in _rounding(model)
    }
    original(model, target_device)
    record: Record = {}
    for name, module in _rounding(model):
        now = _parameters(module)  # those that serve as they were loaded are still there
        replaced = {k: one for k, one in before[name].items() if now.get(k) is not one.parameter}
        if replaced:
            record[name] = replaced
        for one in replaced.values():
            one.drop()
    if record:
        setattr(model, _RECORD, record)


def take_as(model: nn.Module, loadable: Callable[[Pairs], Pairs]) -> None:
    """Has an update load what `loadable` makes of a version's tensors; may raise WeightsError."""
    setattr(model, _LOADABLE, loadable)


def rounds(model: nn.Module) -> bool:
    """Whether SGLang replaced parameters after it had loaded them."""
    return hasattr(model, _RECORD)


def update(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Serves other numbers from the same storages: of a decoder layer all tensors or none.

    Raises RuntimeError where rounding came to another layout, or to numbers that are not finite. An
    update that is interrupted leaves layers of both versions: the process has to end.
    """
    record: Record = getattr(model, _RECORD)
    modules = dict(model.named_modules())
    for layer, part in _by_layer(tensors).items():
        own = _of_layer(record, layer)
        serving = {name: _parameters(modules[name]) for name in own}
        _open(modules, own)
        try:
            _load(model, part)
        except WeightsError as error:  # no refusal: layers before this one are new
            raise RuntimeError(str(error)) from error
        for name, loaded in own.items():
            _round(name, modules[name], serving[name])
            for one in loaded.values():
                one.drop()


class NotFinite(NamedTuple):
    """Numbers that rounding left and nothing can be computed with."""

    place: str
    numbers: int
    value: float


def not_finite(model: Any, tensors: Mapping[str, Tensor]) -> NotFinite | None:
    """Rounds a version as `update` does, a layer at a time, and keeps nothing of it: the first
    parameter that is not finite then, such as a scale, or None. What serves stays as it is.

    Raises WeightsError where a profile finds it so.
    """
    record: Record = getattr(model, _RECORD)
    modules = dict(model.named_modules())
    for layer, part in _by_layer(tensors).items():
        own = _of_layer(record, layer)
        if not own:
            continue
        with _elsewhere({k: m for k, m in modules.items() if _layer_of(f"{k}.") == layer}):
            _open(modules, own)
            try:
                _load(model, part)
                for name in own:
                    module: Any = modules[name]
                    module.quant_method.process_weights_after_loading(module)
                    found = _first_wrong(name, module)
                    if found is not None:
                        return found
            finally:
                for loaded in own.values():
                    for one in loaded.values():
                        one.drop()
    return None


@contextmanager
def _elsewhere(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Has what is written to parameters written to copies, and puts back the parameters that were
    there.
    """
    before = {name: dict(module._parameters) for name, module in modules.items()}
    held = [(one, one.data) for own in before.values() for one in own.values() if one is not None]
    for one, data in held:
        one.data = data.clone()
    try:
        yield
    finally:
        for one, data in held:
            one.data = data
        for name, own in before.items():
            modules[name]._parameters.clear()
            modules[name]._parameters.update(own)


def _open(modules: Mapping[str, nn.Module], own: Record) -> None:
    """Puts parameters to load into where rounded ones serve."""
    for name, loaded in own.items():
        device = next(iter(_parameters(modules[name]).values())).device
        for key, one in loaded.items():
            one.fill(device)
            modules[name]._parameters[key] = one.parameter


def _load(model: Any, part: Mapping[str, Tensor]) -> None:
    as_loaded = getattr(model, _LOADABLE, None)
    model.load_weights(list(as_loaded(part.items()) if as_loaded else part.items()))


def _first_wrong(name: str, module: nn.Module) -> NotFinite | None:
    """Of the parameters of a module after rounding. Numbers of eight bits are cut to what they can
    hold: their scales are looked at.
    """
    for key, one in _parameters(module).items():
        if one.is_floating_point() and one.itemsize > 1:
            wrong = one.data[~torch.isfinite(one.data)]
            if len(wrong):
                return NotFinite(f"{name}.{key}", len(wrong), float(wrong[0]))
    return None


def _round(name: str, module: Any, serving: Mapping[str, nn.Parameter]) -> None:
    module.quant_method.process_weights_after_loading(module)
    wrong = _first_wrong(name, module)
    if wrong is not None:
        raise RuntimeError(f"{wrong.place}: {wrong.numbers} are not finite: {wrong.value}")
    rounded = _parameters(module)
    for key, served in serving.items():
        found = rounded[key]
        if found is served:
            continue
        if (found.shape, found.dtype) != (served.shape, served.dtype):
            raise RuntimeError(
                f"{name}.{key} is rounded to {found.dtype} {tuple(found.shape)}, and serves as "
                f"{served.dtype} {tuple(served.shape)}"
            )
        served.data.copy_(found.data)
        module._parameters[key] = served


def _rounding(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that SGLang processes after loading."""
    for name, module in model.named_modules():
        if getattr(module, "quant_method", None) is not None:
            yield name, module


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {key: one for key, one in module._parameters.items() if one is not None}


def _of_layer(record: Record, layer: str) -> Record:
    return {name: one for name, one in record.items() if _layer_of(f"{name}.") == layer}


def _by_layer(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors of each decoder layer, and under an empty name all others."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, one in tensors.items():
        parts.setdefault(_layer_of(name), {})[name] = one
    return parts


def _layer_of(name: str) -> str:
    found = _LAYER.match(name)
    return found.group() if found else ""
