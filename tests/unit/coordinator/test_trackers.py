"""The data that experiment trackers receive about a run."""

from __future__ import annotations

import struct
import threading
from pathlib import Path

import pytest
from metric_points import points
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from paceline.errors import ConfigError
from paceline.services.coordinator import metrics, trackers
from paceline.services.coordinator.trackers import Tracker, Tracking, check_trackers
from paceline.v1.coordinator_pb2 import StepRecord

RECORD = StepRecord(
    step=3,
    reward_mean=0.5,
    step_s=2.5,
    policy={"loss": 0.25, "entropy/x": 1.5},
    reward_parts={"format": 0.75},
)


def scalars(directory: Path) -> dict[tuple[str, int], float]:
    """Read the scalars of TensorBoard's event files.

    A record is its length, the length's checksum, a message, the message's checksum.
    """
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for file in directory.iterdir():
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            found |= {(one.tag, event.step): one.simple_value for one in event.summary.value}
    return found


def test_tensorboard_gets_every_figure_of_a_step_and_of_evaluations(tmp_path: Path) -> None:
    tracking = Tracking(["tensorboard"], "r", tmp_path)
    tracking.step(RECORD)
    tracking.evaluated(4, "accuracy", 0.75)
    tracking.close()
    read = scalars(tmp_path / "tensorboard")
    assert read["reward", 3] == 0.5
    assert read["step_s", 3] == 2.5
    assert read["reward/format", 3] == 0.75
    assert read["policy/loss", 3] == 0.25
    assert read["policy/entropy/x", 3] == 1.5
    assert read["evaluation/accuracy", 4] == 0.75
    Tracking(["tensorboard"], "r", tmp_path).close()
    assert scalars(tmp_path / "tensorboard") == read, "a run that is taken up again keeps them"


def test_wandb_writes_offline_what_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracking = Tracking(["wandb"], "r", tmp_path)
    tracking.step(RECORD)
    tracking.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-r.wandb")
    assert b"policy/loss" in file.read_bytes()


def test_trackio_keeps_what_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio")
    tracking = Tracking(["trackio"], "r", tmp_path)
    tracking.step(RECORD)
    tracking.close()
    assert any(b"policy/loss" in one.read_bytes() for one in tmp_path.iterdir() if one.is_file())


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name == "wandb" else name)
    check_trackers(["tensorboard", "trackio"])
    with pytest.raises(ConfigError, match=r"pip install wandb; seen: wandb; allowed: .*trackio"):
        check_trackers(["tensorboard", "wandb"])


def test_a_slow_tracker_loses_steps_which_are_counted_and_a_broken_one_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric_reader: InMemoryMetricReader
) -> None:
    released = threading.Event()

    def log(step: int, figures: dict[str, float]) -> None:
        raise OSError("no room")

    def close() -> None:
        raise AssertionError("it has failed before")

    def open_stuck(run_id: str, run_dir: Path) -> Tracker:
        released.wait(60)
        return log, close

    monkeypatch.setattr(trackers, "TRACKERS", {"stuck": ("stuck", open_stuck)})
    monkeypatch.setattr(trackers, "WAITING", 4)
    tracking = Tracking(["stuck"], "r", tmp_path)
    for step in range(7):
        tracking.evaluated(step, "accuracy", 0.5)
    assert points(metric_reader, metrics, "points_dropped") == {("stuck",): 3}
    released.set()
    tracking.close()
