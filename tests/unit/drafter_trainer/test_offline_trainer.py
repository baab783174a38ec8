"""A whole offline run on one rank: its learning, its files, and its resumption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_models import save_random
from safetensors.torch import load_file
from torch import Tensor

from paceline.errors import ConfigError, InvalidInput
from paceline.models.config import read_config
from paceline.services.drafter_trainer.config import OfflineConfig
from paceline.services.drafter_trainer.offline.rank import train
from paceline.speculators.eagle import EagleDrafter, EagleNet
from paceline.speculators.kinds import SpeculatorKind
from paceline.speculators.net import read_drafter
from paceline.training.optimizer import RMS

pytestmark = pytest.mark.usefixtures("one_rank")


KIND = SpeculatorKind(
    "counting", EagleDrafter, f"{__name__}:CountingNet", ("LlamaForCausalLMEagle",)
)


class CountingNet(EagleNet):
    """A custom speculator: EAGLE that also reads an inner layer and receives token counts."""

    kind = KIND

    counts: Tensor | None = None

    @property
    def capture(self) -> Any:
        return type(super().capture)(inner=(1,))

    def choose_tokens(self, counts: Tensor) -> None:
        type(self).counts = counts


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A target and sequences that count upwards, which a drafter can learn."""
    save_random(tmp_path / "model", "llama")
    random = np.random.default_rng(0)
    with (tmp_path / "data.jsonl").open("w") as file:
        for _ in range(24):
            length, first = int(random.integers(12, 40)), int(random.integers(3, 50))
            ids = [(first + i) % 90 + 3 for i in range(length)]
            file.write(
                json.dumps({"input_ids": ids, "loss_mask": [int(i >= 4) for i in range(length)]})
                + "\n"
            )
    return tmp_path


def run(world: Path, stop_after: int = 10_000, **settings: Any) -> list[dict[str, Any]]:
    """Messages of a run."""
    given = {
        "data": world / "data.jsonl",
        "model": world / "model",
        "out": world / "out",
        "steps": 12,
    }
    given |= {
        "batch_tokens": 128,
        "row_tokens": 128,
        "lr": 3e-3,
        "warmup_steps": 2,
        "heldout_share": 0.2,
    }
    told: list[dict[str, Any]] = []
    train(OfflineConfig.model_validate(given | settings), told.append, stop(told, stop_after))
    return told


def stop(told: list[dict[str, Any]], after: int) -> Callable[[], bool]:
    return lambda: sum(message["kind"] == "trained" for message in told) >= after


def of(told: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [message for message in told if message["kind"] == kind]


def weights(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


@pytest.mark.slow
def test_the_loss_falls_and_a_drafter_that_serves_is_left(world: Path) -> None:
    told = run(world, steps=30, lr=1e-2, eval_every=15)
    steps = of(told, "trained")
    assert [message["step"] for message in steps] == list(range(1, 31))
    assert steps[-1]["feature"] < 0.6 * steps[0]["feature"]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert {"feature", "loss_0", "correct", "alpha"} <= set(steps[0])
    net = read_drafter(world / "out/checkpoint/speculator", read_config(world / "model"))
    assert isinstance(net, EagleNet)
    lines = [json.loads(line) for line in (world / "out/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "trained" in line] == list(range(1, 31))
    assert [line["step"] for line in lines if "heldout" in line] == [15, 30]
    assert lines[-1]["heldout"]["length"] == of(told, "heldout")[-1]["length"]


def test_a_frozen_base_model_is_the_same_to_the_bit(world: Path) -> None:
    before = {path.name: path.read_bytes() for path in (world / "model").iterdir()}
    run(world, steps=2)
    assert before == {path.name: path.read_bytes() for path in (world / "model").iterdir()}


def test_a_stopped_run_goes_on_to_the_same_weights_as_one_that_was_not(world: Path) -> None:
    run(world, out=world / "whole", steps=9)
    first = run(world, stop_after=4, steps=9)
    assert of(first, "trained")[-1]["step"] == 4
    second = run(world, steps=9)
    assert of(second, "resumed") == [{"kind": "resumed", "step": 4}]
    assert [message["step"] for message in of(second, "trained")] == [5, 6, 7, 8, 9]
    whole, resumed = (weights(world / out / "checkpoint/speculator") for out in ("whole", "out"))
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
    figures = [
        [
            (line["step"], line.get("trained", {}).get("loss"))
            for line in map(json.loads, (world / out / "log.jsonl").open())
        ]
        for out in ("whole", "out")
    ]
    assert figures[0] == figures[1]
    assert of(run(world, steps=9), "saved") == [], "a finished run is not written again"


def test_the_last_of_twelve_steps_has_a_twelfth_of_the_rate(world: Path) -> None:
    run(world, stop_after=11, average=0)
    before = weights(world / "out/checkpoint/speculator")["fc.weight"]
    run(world, average=0)
    moved = weights(world / "out/checkpoint/speculator")["fc.weight"] - before
    assert 0 < moved.square().mean().sqrt() < 0.2 * RMS * 3e-3


def test_a_run_whose_last_checkpoint_is_damaged_goes_on_from_the_one_before(world: Path) -> None:
    run(world, out=world / "whole", steps=6)
    run(world, stop_after=4, steps=6, save_every=2)
    shard = world / "out/states/checkpoint-4/shards/rank-0.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    told = run(world, steps=6, save_every=2)
    assert str(shard) in of(told, "damaged")[0]["fault"]
    assert of(told, "resumed") == [{"kind": "resumed", "step": 2}]
    whole, resumed = (weights(world / out / "checkpoint/speculator") for out in ("whole", "out"))
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name


def test_a_run_with_other_settings_or_ranks_does_not_continue_the_old_run(world: Path) -> None:
    run(world, steps=2)
    with pytest.raises(ConfigError, match="another window; --no-resume or another --out"):
        run(world, window=16)
    with pytest.raises(
        ConfigError, match=r"another rows_per_step .*--ranks.*; seen: 2; allowed: 1"
    ):
        run(world, ranks=2)
    told = run(world, window=16, resume=False, steps=1)
    assert [message["step"] for message in of(told, "trained")] == [1]
    assert len((world / "out/log.jsonl").read_text().splitlines()) == 2


def test_a_speculator_of_ones_own_trains_by_import_path_and_hears_of_token_counts(
    world: Path,
) -> None:
    name = f"{__name__}:KIND"
    told = run(world, steps=3, speculator=name, options={"fc_bias": True})
    assert "fc.bias" in weights(world / "out/checkpoint/speculator")
    said = np.zeros(97, dtype=int)
    for line in (world / "data.jsonl").open():
        record = json.loads(line)
        np.add.at(said, np.array(record["input_ids"])[np.array(record["loss_mask"], dtype=bool)], 1)
    assert CountingNet.counts is not None
    ends = (CountingNet.counts != torch.from_numpy(said)).nonzero()[:, 0].tolist()
    assert ends == [2]  # the policy's end, which every vocabulary keeps
    said[2] += said.sum()
    assert CountingNet.counts.tolist() == said.tolist()
    again = run(
        world,
        out=world / "warm",
        steps=1,
        speculator=name,
        start=world / "out/checkpoint/speculator",
    )
    assert of(again, "trained")[0]["loss"] < of(told, "trained")[0]["loss"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"speculator": "eagel"}, "no such speculator; seen: eagel"),
        ({"speculator": "ngram"}, "a speculator without weights"),
        (
            {"options": {"fc_bios": True}},
            r"option fc_bios of eagle: .*; allowed: draft_vocab_size, ttt_steps, ttt_decay, fc_bias, norms, feature_weight, token_weight",
        ),
        ({"start": Path("/nowhere")}, "no config.json"),
        ({"row_tokens": 16, "data": "short"}, r"too few sequences.*seen: 1 of 2, cut to 16 tokens"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(
    world: Path, settings: dict[str, Any], named: str
) -> None:
    if settings.get("data") == "short":
        settings["data"] = world / "short.jsonl"
        late = {"input_ids": [5] * 20, "loss_mask": [0] * 17 + [1] * 3}
        early = {"input_ids": [5] * 5, "loss_mask": [0, 0, 1, 1, 1]}
        settings["data"].write_text(json.dumps(late) + "\n" + json.dumps(early) + "\n")
    with pytest.raises(InvalidInput, match=named):
        run(world, **settings)
