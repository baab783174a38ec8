"""What `paceline profile` measures, prints and writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from random_models import save_random
from safetensors.torch import save_file
from typer.testing import CliRunner

from paceline.errors import ConfigError, InvalidInput
from paceline.models.adapters import hash_of_start
from paceline.models.config import read_config
from paceline.models.loading import read_tensors
from paceline.models.profiles import PROFILES, ROUNDED, profile_name
from paceline.services.rollout_gateway.engines.embedded import profile_report
from paceline.services.rollout_gateway.engines.embedded.build import build_embedded
from paceline.services.rollout_gateway.engines.embedded.profile_report import measure_profile
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import PauseMode
from paceline.services.rollout_gateway.environments.base import TextTurn
from paceline.services.rollout_gateway.profile_accuracy import HeldOut, accuracy
from paceline.services.rollout_gateway.profile_command import app
from paceline.tasks import Task, open_tasks, write_tasks
from paceline.trajectory import Target, VersionSet

DEMO = Path("examples/demo")
PROMPTS = [(3, 4, 5, 6), (7, 8)]


@pytest.fixture(autouse=True)
def _once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are not what is tested."""
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


def test_what_is_written_chooses_the_profile_for_this_model_and_for_no_other(
    model: Path, tmp_path: Path
) -> None:
    ran = CliRunner().invoke(
        app,
        [str(model), "fp8_tensor", "--prompts", "2", "--tokens", "4", "--out", str(tmp_path)],
    )
    assert ran.exit_code == 0, ran.output
    lines = ran.output.splitlines()
    assert "8 tokens drawn" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["profile", "float32", "fp8_tensor"]
    file = tmp_path / "fp8_tensor.json"
    assert len(json.loads(file.read_text())["matrices"]) == 12
    engine = build_embedded(EmbeddedSpec(model_dir=str(model), drafter="off", profile=str(file)))
    save_random(tmp_path / "deeper", "llama", sharpness=4.0, num_hidden_layers=4)
    with pytest.raises(ConfigError, match=r"another model.*3 layers.*allowed.*4 layers"):
        build_embedded(
            EmbeddedSpec(model_dir=str(tmp_path / "deeper"), drafter="off", profile=str(file))
        )
    other = tmp_path / "other"
    save_random(other, "llama", sharpness=5.0)
    hashes = f"seen: {hash_of_start(model)}; allowed: {hash_of_start(other)}"
    with pytest.raises(ConfigError, match=f"was measured on other weights; {hashes}"):
        build_embedded(EmbeddedSpec(model_dir=str(other), drafter="off", profile=str(file)))
    # ... as a version it is what training made of the first, and rounded alike
    profile = engine.versions.profile
    assert profile == profile_name(str(file))
    engine.prepare_weights(Target.POLICY, 1, other, profile)
    engine.commit_weights(VersionSet(1, 1, 0, profile), PauseMode.IN_PLACE)
    assert engine.versions == VersionSet(1, 1, 0, profile)


def test_the_demos_policy_answers_the_held_out_tasks_beside_it(tmp_path: Path) -> None:
    model = DEMO / "policy_trained"
    words = ["fp8_channel", "--prompts", "2", "--tokens", "8", "--answers", "4"]
    ran = CliRunner().invoke(app, [str(model), *words, "--out", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    first, head, plain, rounded = ran.output.splitlines()
    assert "vocabulary 320; float32, 16 tokens drawn, 4 tasks of" in first
    assert "accuracy" in head
    found = json.loads((tmp_path / "fp8_channel.json").read_text())
    assert f"  {found['plain_accuracy']:.3f}  1.00  " in plain
    kept = found["accuracy"] / found["plain_accuracy"]
    assert f"  {found['accuracy']:.3f}  {kept:.2f}  " in rounded
    assert found["answered"] == 4
    # what the policy was trained to do: most of its answers are right under either
    assert min(found["accuracy"], found["plain_accuracy"]) >= 0.5


@pytest.mark.parametrize(("answer", "asked", "shown"), [("0", True, "0.000 -"), ("", False, "- -")])
def test_answers_are_compared_with_those_of_a_file_that_has_some(
    answer: str, asked: bool, shown: str, tmp_path: Path
) -> None:
    tasks = open_tasks(str(DEMO / "tasks_heldout.jsonl"))[:3]
    write_tasks(tmp_path / "tasks.jsonl", [replace(one, answer=answer) for one in tasks])
    words = [str(DEMO / "policy_trained"), "fp8_channel", "--tasks", str(tmp_path / "tasks.jsonl")]
    options = ["--prompts", "1", "--tokens", "2", "--answer-tokens", "8"]
    ran = CliRunner().invoke(app, [*words, *options])
    assert ran.exit_code == 0, ran.output
    first, _, *rows = ran.output.splitlines()
    assert ("3 tasks of" in first) == asked
    assert [" ".join(row.split()[6:8]) for row in rows] == [shown, shown]


async def test_an_answer_counts_when_it_ended_by_itself_and_is_the_tasks() -> None:
    said = ("-225005#005", "#006", "005", "#5", "#10/2", "")
    turns = [TextTurn((), text, "stop") for text in said]
    tasks = [Task(str(number), "225:230=", "005") for number in range(len(said))]
    assert await accuracy(turns, tasks) == 0.5
    cut = [TextTurn((), "#005", "length"), TextTurn((), "=5", "stop")]
    assert await accuracy(cut, tasks[:2]) == 0.0
    assert await accuracy(cut, tasks[:2], marker="=") == 0.5


async def test_tasks_that_fill_the_context_are_refused() -> None:
    long = HeldOut([Task("1", "2" * 600, "2")], 8)
    with pytest.raises(InvalidInput, match=r"no room for an answer.*allowed: at most 511"):
        await long.accuracy_of(DEMO / "policy_start", "", dtype="float32")


def test_what_cannot_be_measured_is_refused_in_one_line(model: Path) -> None:
    ran = CliRunner().invoke(app, [str(model), "int4"])
    assert ran.exit_code == 2
    assert "no such profile; seen: int4; allowed: int8, int8_w8a8" in ran.output
    ran = CliRunner().invoke(app, [str(model), "--dtype", "float16"])
    assert ran.exit_code == 2
    assert "no such dtype; seen: float16; allowed: float32, bfloat16" in ran.output
    with pytest.raises(InvalidInput, match=r"304 tokens.*256 tokens"):
        measure_profile(model, "", PROMPTS, tokens=300, dtype="float32")
    with pytest.raises(InvalidInput, match="0 prompts"):
        measure_profile(model, "", [], tokens=3, dtype="float32")
