"""Later versions in the storages of the first: bits, addresses, memory, and rejected versions."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
import torch
from random_models import save_random
from safetensors.torch import save_file
from torch import Tensor
from torch.profiler import ProfilerActivity
from torch.profiler import profile as recorded

from paceline.errors import ResourceExhausted, WeightsError
from paceline.models.config import read_config
from paceline.models.decoder import DecoderWeights
from paceline.models.in_place import ServedModel, beside, serve_staged, storages
from paceline.models.loading import model_shapes, read_tensors
from paceline.models.profiles import PROFILES, ROUNDED

NAMES = ("", *ROUNDED)
UPDATES = 20


def model_of(directory: Path, profile: str, dtype: torch.dtype = torch.float32) -> ServedModel:
    if profile.startswith("int8"):
        pytest.importorskip("torchao", reason="torchao rounds to INT8: the extra `int8`")
    config = read_config(directory)
    return ServedModel(config, dtype, 64, PROFILES.get(profile))


def bits(weights: DecoderWeights) -> dict[str, Tensor]:
    return {
        name: one.contiguous().view(torch.uint8).clone() for name, one in storages(weights).items()
    }


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def save_like(source: Path, target: Path, change: Callable[[str, Tensor], Tensor]) -> Path:
    """A checkpoint with each tensor of another one changed."""
    target.mkdir()
    tensors = {name: change(name, one).contiguous() for name, one in read_tensors(source).items()}
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model with every kind of tensor there is, and two later versions of it."""
    found = []
    for seed in range(3):
        found.append(tmp_path_factory.mktemp(f"p{seed}"))
        save_random(found[-1], "qwen3", seed=seed, num_hidden_layers=2)
    return found


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("profile", NAMES)
def test_twenty_updates_keep_every_address_and_end_with_the_bits_of_a_fresh_load(
    profile: str, dtype: torch.dtype, versions: list[Path]
) -> None:
    model = model_of(versions[0], profile, dtype)
    weights = model.load(versions[0])
    fresh = [bits(model.load(path)) for path in versions]
    addresses = {name: one.data_ptr() for name, one in storages(weights).items()}
    for update in range(1, UPDATES + 1):
        weights = serve_staged(weights, model.staged(versions[update % 3]))
        assert {name: one.data_ptr() for name, one in storages(weights).items()} == addresses
        assert_equal(bits(weights), fresh[update % 3])


@pytest.mark.parametrize("profile", NAMES)
def test_a_version_with_the_served_numbers_changes_nothing(
    profile: str, versions: list[Path]
) -> None:
    model = model_of(versions[0], profile)
    weights = model.load(versions[0])
    assert serve_staged(weights, model.staged(versions[0])) is weights
    changed = serve_staged(weights, model.staged(versions[1]))
    assert changed is not weights
    assert serve_staged(changed, model.staged(versions[1])) is changed


@pytest.mark.parametrize("family", ["llama-tied", "qwen2"])
def test_heads_that_are_tied_and_biases_are_updated_too(family: str, tmp_path: Path) -> None:
    for seed in range(2):
        save_random(tmp_path / str(seed), family, seed=seed)
    model = model_of(tmp_path / "0", "fp8_channel")
    weights = serve_staged(model.load(tmp_path / "0"), model.staged(tmp_path / "1"))
    fresh = model.load(tmp_path / "1")
    assert_equal(bits(weights), bits(fresh))
    assert weights.head_hash == fresh.head_hash
    assert (weights.head is weights.embed) == (family == "llama-tied")


@pytest.mark.parametrize("profile", NAMES)
def test_a_view_that_was_taken_before_sees_the_new_numbers(
    profile: str, versions: list[Path]
) -> None:
    model = model_of(versions[0], profile)
    weights, fresh = model.load(versions[0]), storages(model.load(versions[1]))
    held = {name: one[1:] for name, one in storages(weights).items()}
    before = {name: one.clone() for name, one in held.items()}
    serve_staged(weights, model.staged(versions[1]))
    for name, view in held.items():
        assert torch.equal(view.view(torch.uint8), fresh[name][1:].view(torch.uint8)), name
    assert any(not torch.equal(held[name].float(), one.float()) for name, one in before.items())


@pytest.mark.parametrize("profile", ROUNDED)
def test_scales_follow_the_weights(profile: str, versions: list[Path], tmp_path: Path) -> None:
    """Eight times the weights have eight times the scales and the same values."""
    model = model_of(versions[0], profile)
    larger = save_like(
        versions[0],
        tmp_path / "larger",
        lambda name, one: one * 8 if name.endswith("down_proj.weight") else one,
    )
    weights = model.load(versions[0])
    before = bits(weights)
    scales = weights.layers[1].down.scales  # type: ignore[union-attr]
    wanted = scales * 8
    weights = serve_staged(weights, model.staged(larger))
    assert torch.equal(scales, wanted)
    after = bits(weights)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {f"layers.{index}.down.scales" for index in range(2)}


def peak_of(call: Callable[[], object]) -> int:
    """Return the peak of torch's allocated bytes during the call, above the bytes at its start."""
    with recorded(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        kept = call()
    events = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    now = most = 0
    for _, change in memory:
        now += change
        most = max(most, now)
    del kept
    return most


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save two versions of a model with small layers in folders 0 and 1."""
    shape = {"hidden_size": 128, "intermediate_size": 384, "vocab_size": 64}
    directory = tmp_path_factory.mktemp("deep")
    for seed in range(2):
        save_random(directory / str(seed), "llama", seed=seed, num_hidden_layers=12, **shape)
    return directory


@pytest.mark.few(1)
@pytest.mark.parametrize("profile", NAMES)
def test_an_update_takes_no_more_memory_than_the_largest_layer_as_it_is_loaded(
    profile: str, deep: Path
) -> None:
    model = model_of(deep / "0", profile)
    weights = model.load(deep / "0")
    first = "model.layers.0."
    shapes = model_shapes(model.config).items()
    layer = sum(4 * math.prod(shape) for name, shape in shapes if name.startswith(first))
    served = sum(one.nbytes for one in storages(weights).values())
    # The mapped checkpoint counts as if it were in memory.
    mapped = peak_of(lambda: read_tensors(deep / "1"))
    assert mapped >= served / 4, "nothing is measured"
    rounding = 6 * (4 << 14) if profile else 0  # buffers for rounding a few rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.models.quantised.ROUNDED_AT_ONCE", 1 << 14)
        staging = peak_of(lambda: model.staged(deep / "1")) - mapped
        assert staging <= layer + rounding
        assert staging < served / 2
        staged = model.staged(deep / "1")
        joined = 0 if profile else layer  # rows of one tensor
        assert peak_of(lambda: serve_staged(weights, staged)) < joined + (16 << 10)
        loading = peak_of(lambda: model.load(deep / "1")) - mapped
        assert loading <= served + weights.rotation.nbytes + layer + rounding


@pytest.mark.parametrize("other", NAMES)
def test_a_version_of_another_profile_is_served_beside(other: str, versions: list[Path]) -> None:
    weights = model_of(versions[0], "fp8_tensor").load(versions[0])
    model = model_of(versions[0], other)
    assert_equal(bits(beside(weights, model.staged(versions[1]))), bits(model.load(versions[1])))


def test_a_version_of_another_model_is_refused_before_anything_is_read_into_it(
    versions: list[Path], tmp_path: Path
) -> None:
    save_random(tmp_path, "qwen3", num_hidden_layers=2, intermediate_size=96)
    with pytest.raises(WeightsError, match=r"mlp\..*wrong shape.*seen.*96"):
        model_of(versions[0], "fp8_channel").staged(tmp_path)


@pytest.mark.parametrize("profile", ROUNDED)
def test_weights_that_no_scale_reaches_are_refused_by_name(
    profile: str, versions: list[Path], tmp_path: Path
) -> None:
    """float64 holds numbers that float32 does not."""
    model = model_of(versions[0], profile)
    wrong = save_like(
        versions[0],
        tmp_path / "wrong",
        lambda name, one: one.double() * 1e300 if "layers.1.mlp.down" in name else one,
    )
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.down_proj\.weight.*scale.*inf"):
        model.staged(wrong)


def test_a_full_disk_is_told_and_leaves_no_file(
    versions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path) -> IO[bytes]:
        return Path("/dev/full").open("wb", buffering=0)

    monkeypatch.setattr("paceline.models.in_place._unnamed_file", full)
    with pytest.raises(ResourceExhausted, match=r"no room to stage embed.*No space left"):
        model_of(versions[0], "fp8_channel").staged(versions[1])


def test_a_version_in_the_served_dtype_is_staged_without_a_file_and_served_after_its_removal(
    versions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("paceline.models.in_place._unnamed_file")
    model, path = model_of(versions[0], ""), save_like(versions[1], tmp_path / "1", lambda _, x: x)
    staged = model.staged(path)
    shutil.rmtree(path)
    assert_equal(bits(serve_staged(model.load(versions[0]), staged)), bits(model.load(versions[1])))


def test_staging_leaves_no_name_in_the_versions_directory(versions: list[Path]) -> None:
    before = sorted(path.name for path in versions[1].iterdir())
    model_of(versions[0], "fp8_channel").staged(versions[1])
    assert sorted(path.name for path in versions[1].iterdir()) == before
