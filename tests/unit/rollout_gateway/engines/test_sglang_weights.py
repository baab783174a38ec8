"""New weights for SGLang are compared with the served checkpoint before SGLang sees any tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import WeightsError
from paceline.models.adapters import DOWN, FILE, UP, AddedAdapters, hash_of_start
from paceline.services.rollout_gateway.engines.sglang.plugin import weights as plugin_weights
from paceline.services.rollout_gateway.engines.sglang.plugin.weights import (
    HEAD_NAMES,
    PluginWeights,
    TensorParallel,
)
from paceline.services.rollout_gateway.engines.sglang.spec import SGLangSpec
from paceline.trajectory import Target, VersionSet

DEMO = Path(__file__).parents[4] / "examples" / "demo"


@pytest.fixture
def weights() -> PluginWeights:
    return PluginWeights(
        SGLangSpec(model_dir=str(DEMO / "policy_start"), drafter=str(DEMO / "drafter_trained"))
    )


@pytest.mark.parametrize("fault", ["shape", "unknown name", "missing"])
@pytest.mark.parametrize(
    ("target", "source"), [(Target.POLICY, "policy_trained"), (Target.DRAFTER, "drafter_trained")]
)
def test_what_would_kill_sglang_or_be_ignored_is_refused_by_name(
    weights: PluginWeights, tmp_path: Path, target: Target, source: str, fault: str
) -> None:
    tensors = load_file(DEMO / source / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    if fault == "shape":
        tensors[name] = torch.zeros(3, 5)
    elif fault == "missing":
        del tensors[name]
    else:
        name = "layers.99.mystery.weight"
        tensors[name] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=name.replace(".", r"\.")):
        weights.prepare(target, 1, tmp_path)
    with pytest.raises(WeightsError, match="not prepared"):
        weights.prepared.changes(VersionSet(1, 1, 1))


def test_a_drafter_never_carries_what_it_shares_with_the_target(
    weights: PluginWeights, tmp_path: Path
) -> None:
    tensors = load_file(DEMO / "drafter_trained" / "model.safetensors")
    shared = {name: torch.zeros(320, 128) for name in ("embed_tokens.weight", "lm_head.weight")}
    save_file({**tensors, **shared}, tmp_path / "model.safetensors")
    weights.prepare(Target.DRAFTER, 4, tmp_path)
    prepared = weights.prepared.changes(VersionSet(1, 0, 4))[Target.DRAFTER]
    assert prepared.tensors.keys() == tensors.keys()


def test_adapters_alone_are_handed_over_as_whole_weights(
    weights: PluginWeights, tmp_path: Path
) -> None:
    start = load_file(DEMO / "policy_start" / "model.safetensors")
    name = next(name for name in start if name.endswith("q_proj.weight"))
    stem, (rows, width) = name.removesuffix(".weight"), start[name].shape
    up, down = torch.randn(rows, 2), torch.randn(2, width)
    save_file({stem + UP: up, stem + DOWN: down}, tmp_path / "model.safetensors")
    document = AddedAdapters(0.5, hash_of_start(DEMO / "policy_start")).text()
    (tmp_path / FILE).write_text(document, encoding="utf-8")
    weights.prepare(Target.POLICY, 1, tmp_path)
    prepared = weights.prepared.changes(VersionSet(1, 1, 0))[Target.POLICY].tensors
    assert prepared.keys() == start.keys()
    changed = start[name].double() + 0.5 * up.double() @ down.double()
    assert torch.allclose(prepared[name].double(), changed, atol=1e-5)
    assert all(torch.equal(one, prepared[key]) for key, one in start.items() if key != name)


def read_bytes(path: Path) -> int:
    """Return the resident bytes of a mapped file."""
    found, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            counts = line.endswith(str(path))
        elif counts and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_rank_reads_its_rows_and_a_share_of_the_whole_that_it_looks_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    rows, names = 1 << 21, [f"layers.{number}.weight" for number in range(8)]
    start, new = tmp_path / "start", tmp_path / "new"
    for seed, folder in enumerate((start, new)):
        folder.mkdir()
        draw = torch.Generator().manual_seed(seed)
        tensors = {name: torch.randn(rows, generator=draw) for name in (*names, *HEAD_NAMES)}
        save_file(tensors, folder / "model.safetensors")
    monkeypatch.setattr(plugin_weights, "from_all_ranks", lambda value, group: [value])
    one = PluginWeights(
        SGLangSpec(model_dir=str(start), drafter="off"), TensorParallel(1 % ranks, ranks)
    )
    one.prepare(Target.POLICY, 1, new)
    file, size = new / "model.safetensors", (new / "model.safetensors").stat().st_size
    looked = read_bytes(file)
    assert size / ranks * 0.9 < looked < size / ranks * 1.5  # a read also maps the pages around it
    for tensor in one.prepared.changes(VersionSet(1, 1, 0))[Target.POLICY].tensors.values():
        tensor[: rows // ranks].clone()  # SGLang's loaders narrow and copy such a part
    assert read_bytes(file) <= looked + 1.5 * size / ranks


def test_a_number_that_is_not_finite_is_seen_by_the_rank_that_looks_at_it_and_refused_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load_file(DEMO / "policy_trained" / "model.safetensors")
    first, second = sorted(tensors)[:2]
    tensors[second].view(-1)[5] = float("inf")
    save_file(tensors, tmp_path / "model.safetensors")
    spec, told = SGLangSpec(model_dir=str(DEMO / "policy_start"), drafter="off"), list[object]()

    def all_ranks(value: object, group: object) -> list[object]:
        told.append(value)
        return told if len(told) == 2 else [value, told_by_the_other]

    told_by_the_other = (
        f"tensor {second} holds 1 numbers that are not finite in float32",
        "inf",
        "finite",
    )
    monkeypatch.setattr(plugin_weights, "from_all_ranks", all_ranks)
    for rank in range(2):
        with pytest.raises(WeightsError, match=rf"{second} holds 1 numbers.*seen: inf"):
            PluginWeights(spec, TensorParallel(rank, 2)).prepare(Target.POLICY, 1, tmp_path)
    assert told == [None, told_by_the_other]
    assert first != second


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_number_that_overflows_in_the_engines_dtype_is_refused(
    tmp_path: Path, dtype: str
) -> None:
    tensors = load_file(DEMO / "policy_trained" / "model.safetensors")
    name = next(name for name in tensors if name.endswith("k_proj.weight"))
    tensors[name] = tensors[name].float()
    tensors[name][2, 3] = torch.finfo(torch.float32).max
    save_file(tensors, tmp_path / "model.safetensors")
    spec = SGLangSpec(model_dir=str(DEMO / "policy_start"), drafter="off", dtype=dtype)
    if dtype == "float32":
        PluginWeights(spec).prepare(Target.POLICY, 1, tmp_path)
        return
    with pytest.raises(WeightsError, match=f"{name} holds 1 numbers that are not finite"):
        PluginWeights(spec).prepare(Target.POLICY, 1, tmp_path)
