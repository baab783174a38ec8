"""Versions of adapters alone: read as peft merges them, refused over anything but their start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from random_models import save_random
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from paceline.errors import DataLoss, PacelineError, WeightsError
from paceline.models.adapters import FILE, AddedAdapters, hash_of_start, read_version
from paceline.models.config import read_config
from paceline.models.in_place import ServedModel, serve_staged, storages
from paceline.models.profiles import PROFILES

RANK, ALPHA = 3, 12.0
TARGETS = ["q_proj", "k_proj", "o_proj", "down_proj"]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("start")
    save_random(directory, "llama", num_hidden_layers=2)
    return directory


@pytest.fixture(scope="module")
def trained(start: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Adapters under the names of a version, and the weights that peft merges them into."""
    lm = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS)
    adapted = get_peft_model(lm, settings)
    draw = torch.Generator().manual_seed(4)
    for name, one in adapted.named_parameters():
        if "lora_" in name:
            one.data.copy_(0.3 * torch.randn(one.shape, generator=draw))
    adapters = {
        name.removeprefix("base_model.model.").replace(".default.", "."): one.detach().clone()
        for name, one in adapted.named_parameters()
        if "lora_" in name
    }
    return adapters, dict(adapted.merge_and_unload().state_dict())


@pytest.fixture
def version(start: Path, trained: tuple[dict[str, Tensor], object], tmp_path: Path) -> Path:
    return spooled(tmp_path, trained[0], AddedAdapters(ALPHA / RANK, hash_of_start(start)).text())


def spooled(directory: Path, adapters: dict[str, Tensor], document: str) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(adapters, directory / "model.safetensors")
    (directory / FILE).write_text(document, encoding="utf-8")
    return directory


def served(start: Path, profile: str = "") -> ServedModel:
    config = read_config(start)
    return ServedModel(config, torch.float32, 32, PROFILES.get(profile), start=start)


def test_a_version_reads_as_peft_merges_it_and_other_weights_are_the_starts(
    start: Path, version: Path, trained: tuple[object, dict[str, Tensor]]
) -> None:
    found = read_version(version, start)
    assert found.keys() <= trained[1].keys()
    for name in found:
        assert torch.allclose(found[name], trained[1][name], atol=1e-6), name


def test_a_whole_version_is_read_as_it_is(start: Path) -> None:
    found = read_version(start, None)
    lm = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    assert all(torch.equal(one, lm.state_dict()[name]) for name, one in found.items())


@pytest.mark.parametrize("profile", ["", "fp8_channel"])
def test_adapters_are_served_in_place_and_the_start_again_after_them(
    start: Path, version: Path, trained: tuple[object, dict[str, Tensor]], profile: str
) -> None:
    model, whole = served(start, profile), version / "whole"
    serving = model.load(start)
    before = {name: (one.data_ptr(), one.clone()) for name, one in storages(serving).items()}
    adapted = serve_staged(serving, model.staged(version))
    whole.mkdir()
    save_file(
        {name: one.contiguous() for name, one in trained[1].items()}, whole / "model.safetensors"
    )
    expected = storages(model.load(whole))
    for name, one in storages(adapted).items():
        assert one.data_ptr() == before[name][0], name
        assert torch.allclose(one.float(), expected[name].float(), atol=1e-6, rtol=0.15), name
    assert any(not torch.equal(one, before[name][1]) for name, one in storages(adapted).items())


def _renamed(adapters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("q_proj", "r_proj"): one for name, one in adapters.items()}


def _alone(adapters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one for name, one in adapters.items() if "lora_A" in name}


def _wide(adapters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.cat((one, one), -1) for name, one in adapters.items()}


def _endless(adapters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one / 0 for name, one in adapters.items()}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_renamed, "no matrix of the start policy.*r_proj"),
        (_alone, "lora_B.weight is missing"),
        (_wide, "wrong shape"),
        (_endless, "not finite"),
    ],
)
def test_adapters_that_do_not_fit_are_refused_by_name(
    start: Path, trained: tuple[dict[str, Tensor], object], tmp_path: Path, spoil, message: str
) -> None:
    document = AddedAdapters(1.0, hash_of_start(start)).text()
    path = spooled(tmp_path / "spoiled", spoil(trained[0]), document)
    with pytest.raises(WeightsError, match=f"(?s){message}"):
        read_version(path, start)


@pytest.mark.parametrize(
    ("document", "kind", "message"),
    [
        ("{", DataLoss, "describes no adapters"),
        ("[" * 100_000, DataLoss, "describes no adapters"),
        (json.dumps({"scale": 1.0}), DataLoss, "describes no adapters"),
        (json.dumps({"scale": "wide", "start": "x"}), DataLoss, "describes no adapters"),
        (json.dumps({"scale": float("inf"), "start": "x"}), WeightsError, "scale"),
        (json.dumps({"scale": 1.0, "start": "0123"}), WeightsError, "another start policy.*0123"),
    ],
)
def test_a_document_that_lies_is_refused(
    start: Path,
    trained: tuple[dict[str, Tensor], object],
    tmp_path: Path,
    document: str,
    kind: type[PacelineError],
    message: str,
) -> None:
    with pytest.raises(kind, match=message):
        read_version(spooled(tmp_path / "lies", trained[0], document), start)


def test_an_engine_without_a_start_policy_refuses_adapters(version: Path) -> None:
    with pytest.raises(WeightsError, match="another start policy"):
        read_version(version, None)


def test_a_start_policy_is_named_by_its_numbers(start: Path, tmp_path: Path) -> None:
    save_random(tmp_path, "llama", num_hidden_layers=2)
    assert hash_of_start(tmp_path) == hash_of_start(start)
    save_random(tmp_path, "llama", num_hidden_layers=2, seed=9)
    assert hash_of_start(tmp_path) != hash_of_start(start)
