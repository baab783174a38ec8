"""Measurements of a profile against float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from random_models import save_random
from safetensors.torch import save_file

from benchmarks import profile_report
from benchmarks.profile_accuracy import accuracy
from benchmarks.profile_report import measure_profile
from paceline.models.config import read_config
from paceline.models.loading import read_tensors
from paceline.models.profiles import PROFILES, ROUNDED
from paceline.services.rollout_gateway.environments import TextTurn
from paceline.tasks import Task

DEMO = Path("examples/demo")
PROMPTS = [(3, 4, 5, 6), (7, 8)]


@pytest.fixture(autouse=True)
def _once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure once: these tests do not check times."""
    monkeypatch.setattr(profile_report, "TIMED", 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_random(directory, "llama", sharpness=4.0)
    return directory


def e4m3(weight: np.ndarray) -> np.ndarray:
    """The nearest numbers of e4m3, ties to even: 4 significant bits, below 2^-6 steps of 2^-9."""
    exponent = np.maximum(np.floor(np.log2(np.abs(weight) + 1e-300)), -6)
    step = 2.0 ** (exponent - 3)
    return np.rint(weight / step) * step


def test_errors_are_those_of_a_rounding_in_float64(model: Path) -> None:
    report = measure_profile(model, "fp8_channel", PROMPTS, tokens=2, dtype="float32")
    found = {one.place: one for one in report.matrices}
    assert len(found) == 3 * 4
    stored = read_tensors(model)
    exact = stored["model.layers.1.mlp.down_proj.weight"].double().numpy()
    scale = np.abs(exact).max(axis=1, keepdims=True) / 448
    off = e4m3(exact / scale) * scale - exact
    norm = np.linalg.norm
    error = found["layers.1.down"]
    assert error.relative == pytest.approx(norm(off) / norm(exact), rel=1e-3)
    assert error.worst_row == pytest.approx(
        (norm(off, axis=1) / norm(exact, axis=1)).max(), rel=1e-3
    )


def test_weights_that_a_profile_holds_exactly_cost_nothing(model: Path, tmp_path: Path) -> None:
    tensors = {
        name: one.sign() * 0.0625 if "layers." in name and one.dim() == 2 else one
        for name, one in read_tensors(model).items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    for profile in ("", "fp8_channel", "fp8_tensor"):
        report = measure_profile(tmp_path, profile, PROMPTS, tokens=16, dtype="float32")
        assert report.tokens == 32
        assert report.gap_largest < 1e-4
        assert abs(report.divergence) < 1e-5
        assert all(one.relative < 1e-6 for one in report.matrices)


@pytest.mark.parametrize("profile", ROUNDED)
def test_a_profile_takes_less_memory_and_moves_log_probs(profile: str, model: Path) -> None:
    if profile.startswith("int8"):
        pytest.importorskip("torchao")
    plain = measure_profile(model, "", PROMPTS, tokens=16, dtype="float32")
    report = measure_profile(model, profile, PROMPTS, tokens=16, dtype="float32")
    assert plain.gap_largest < 1e-4 < report.gap_mean <= report.gap_upper <= report.gap_largest
    assert report.divergence > 1e-5
    config = read_config(model)
    matrices = config.num_layers * (
        config.hidden_size * (2 * config.hidden_size + config.kv_width)
        + 3 * config.hidden_size * config.intermediate_size
    )
    scales = config.num_layers * (
        3 * config.hidden_size + config.kv_width + 2 * config.intermediate_size
    )
    kept = scales if PROFILES[profile].scale_per == "row" else 4 * config.num_layers
    assert plain.bytes - report.bytes == 3 * matrices - 4 * kept
    assert min(report.tokens_per_s, report.prepare_s, report.commit_s) > 0


async def test_an_answer_counts_when_it_ended_by_itself_and_is_the_tasks() -> None:
    said = ("-225005#005", "#006", "005", "#5", "#10/2", "")
    turns = [TextTurn((), text, "stop") for text in said]
    tasks = [Task(str(number), "225:230=", "005") for number in range(len(said))]
    assert await accuracy(turns, tasks) == 0.5
    cut = [TextTurn((), "#005", "length"), TextTurn((), "=5", "stop")]
    assert await accuracy(cut, tasks[:2]) == 0.0
    assert await accuracy(cut, tasks[:2], marker="=") == 0.5
