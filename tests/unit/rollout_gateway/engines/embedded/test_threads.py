"""The number of compute threads of an embedded engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from random_models import save_random

from paceline.local.processes import usable_cores
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec


@pytest.fixture
def threads_of_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads_of_before")
@pytest.mark.parametrize("threads", [0, 1, 2])
def test_zero_threads_are_all_cores_of_the_process(tmp_path: Path, threads: int) -> None:
    save_random(tmp_path, "llama")
    EmbeddedEngine(EmbeddedSpec(model_dir=str(tmp_path), threads=threads, max_batch=4))
    assert torch.get_num_threads() == (threads or usable_cores())
