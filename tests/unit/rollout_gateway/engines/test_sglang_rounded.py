"""Layers that are rounded after loading take new weights in the storages that serve. The model here
loads and rounds as SGLang's do: loaders are attributes of parameters, and rounding replaces these.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from paceline.services.rollout_gateway.engines.sglang.plugin import rounded

WIDTH, LAYERS = 8, 3
Pairs = Iterable[tuple[str, Tensor]]


class Rounding:
    """Per-channel int8, turned as a kernel wants it."""

    wider = False

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight = layer.weight.data
        if self.wider:
            weight = torch.cat((weight, weight))
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        layer.weight = nn.Parameter((weight / scale).round().to(torch.int8).t(), False)
        layer.weight_scale = nn.Parameter(scale, False)


class Plain:
    """A method that leaves a layer as loaded."""

    def process_weights_after_loading(self, layer: nn.Module) -> None: ...


class Linear(nn.Module):
    """A layer with rows from `parts` tensors of a checkpoint."""

    def __init__(self, parts: int, method: object) -> None:
        super().__init__()
        self.quant_method = method
        self.weight = nn.Parameter(torch.zeros(parts * WIDTH, WIDTH, dtype=torch.bfloat16), False)
        self.weight.weight_loader = self._load  # type: ignore[attr-defined]

    @staticmethod
    def _load(parameter: nn.Parameter, tensor: Tensor, part: int) -> None:
        parameter.data[part * WIDTH : (part + 1) * WIDTH].copy_(tensor)


class Model(nn.Module):
    """Decoder layers with a fused and a plain matrix, a norm, and a head that is not rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.method = Rounding()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "qkv": Linear(2, self.method),
                    "out": Linear(1, self.method),
                    "norm": Linear(1, Plain()),
                }
            )
            for _ in range(LAYERS)
        )
        self.lm_head = Linear(1, Plain())
        self.open = 0
        """Rounded layers that had memory to load into at the last load."""

    def load_weights(self, pairs: Pairs) -> None:
        self.open = sum(
            isinstance(one, Linear)
            and one.quant_method is self.method
            and one.weight.is_floating_point()
            for one in self.modules()
        )
        for name, tensor in pairs:
            stem = name.removesuffix(".weight")
            part = 0
            if stem.endswith((".q", ".k")):
                part = "qk".index(stem[-1])
                stem = stem[:-2] + ".qkv"
            parameter = self.get_submodule(stem).weight
            parameter.weight_loader(parameter, tensor, part)


def numbers(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    kinds = ("q", "k", "out", "norm")
    names = [f"model.layers.{n}.{one}.weight" for n in range(LAYERS) for one in kinds]
    return {name: torch.randn(WIDTH, WIDTH, generator=draw) for name in (*names, "lm_head.weight")}


def process(model: nn.Module, device: torch.device) -> None:
    """Process the layers after loading, as SGLang does."""
    for module in model.modules():
        if hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)


def started(seed: int) -> Model:
    model = Model()
    model.load_weights(numbers(seed).items())
    end_session(model)
    return model


def end_session(model: Model) -> None:
    """SGLang processes layers after its first load and at the end of every update."""
    rounded.postprocessed(None, process, model, torch.device("cpu"))


def served(model: Model) -> dict[str, Tensor]:
    return {name: one.data for name, one in model.named_parameters()}


def test_twenty_updates_serve_from_the_same_storages_what_a_fresh_start_would() -> None:
    model = started(0)
    assert rounded.rounds(model)
    places = {name: (one.data_ptr(), one.stride()) for name, one in served(model).items()}
    view = model.model.layers[1]["qkv"].weight.data[:, 3]
    for seed in range(1, 21):
        rounded.update(model, numbers(seed))
        end_session(model)
        fresh = served(started(seed))
        for name, one in served(model).items():
            assert (one.data_ptr(), one.stride()) == places[name], name
            assert torch.equal(one, fresh[name]), name
        assert torch.equal(view, fresh["model.layers.1.qkv.weight"][:, 3])


def test_no_more_than_one_layer_has_memory_to_be_loaded_into() -> None:
    model = started(0)
    rounded.update(model, dict(list(numbers(1).items())[:3]))
    assert model.open == 2  # its two matrices
    record = vars(model)["paceline_rounded"]
    held = [one.parameter.numel() for own in record.values() for one in own.values()]
    assert held == [0] * (2 * LAYERS)


def test_names_that_are_not_updated_keep_their_numbers() -> None:
    model = started(0)
    before = {name: one.clone() for name, one in served(model).items()}
    layer = {name: one for name, one in numbers(1).items() if name.startswith("model.layers.2.")}
    rounded.update(model, layer)
    for name, one in served(model).items():
        assert torch.equal(one, before[name]) == (not name.startswith("model.layers.2.")), name


def test_rounding_to_another_layout_is_an_error_that_names_both() -> None:
    model = started(0)
    model.method.wider = True
    with pytest.raises(RuntimeError, match=r"qkv.weight is rounded to .*\(8, 32\).*\(8, 16\)"):
        rounded.update(model, numbers(1))


def test_a_model_that_is_not_rounded_has_no_record_and_is_processed_each_time() -> None:
    model, seen = nn.Module(), []
    model.layer = Linear(1, Plain())

    def original(model: nn.Module, device: torch.device) -> None:
        seen.append(device)

    for _ in range(2):
        rounded.postprocessed(None, original, model, torch.device("cpu"))
    assert not rounded.rounds(model)
    assert len(seen) == 2
