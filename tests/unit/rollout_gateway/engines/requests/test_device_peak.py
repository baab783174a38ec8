"""The device's peak throughput, by which tokens per second are divided."""

from __future__ import annotations

import pytest
import torch

from examples.scripted_engine.engine import build_scripted
from examples.scripted_engine.script import ScriptedSpec
from paceline.services.rollout_gateway.engines.requests import timing
from paceline.services.rollout_gateway.engines.requests.timing import square_product_tflops
from paceline.services.rollout_gateway.engines.worker import wire

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _measured_anew() -> None:
    square_product_tflops.cache_clear()


@pytest.mark.parametrize(
    ("seconds", "size"),
    [
        ({128: 0.004}, 128),  # slow at once
        ({128: 0.0001, 256: 0.0008, 512: 0.0064}, 512),
        ({128: 1e-6, 256: 1e-5, 512: 1e-4, 1024: 1e-3}, 1024),  # the largest, however fast
    ],
)
def test_the_first_product_that_is_long_enough_counts(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], size: int
) -> None:
    monkeypatch.setattr(timing, "_median_s", lambda n, *_: seconds[n])
    assert square_product_tflops(CPU, torch.float32) == pytest.approx(
        size**3 / seconds[size] * 2e-12
    )


def test_a_processor_is_measured_once() -> None:
    first = square_product_tflops(CPU, torch.float32)
    assert 1e-5 < first < 1e3
    assert square_product_tflops(CPU, torch.float32) == first


def test_the_scripted_engine_has_no_device() -> None:
    engine = build_scripted(ScriptedSpec())
    assert engine.info.device_tflops == 0
    assert wire.ready_to(engine.info, 0, engine.versions, "").device_tflops == 0
