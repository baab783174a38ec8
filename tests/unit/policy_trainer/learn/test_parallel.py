"""Placement of ranks: never two ranks on one GPU."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import ConfigError
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn import build
from paceline.services.policy_trainer.learn.build import form_mesh


@pytest.fixture
def ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the four ranks are on this host, which has one GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


@pytest.mark.usefixtures("ranks_of_a_host")
def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ranks.*seen: 2 ranks.*allowed: at most 1"):
        form_mesh(PolicyTrainerConfig(device="cuda"))


@pytest.mark.usefixtures("ranks_of_a_host")
def test_ranks_that_may_choose_stay_on_the_cpu_then(
    monkeypatch: pytest.MonkeyPatch, mesh: DeviceMesh
) -> None:
    joined: list[str] = []
    monkeypatch.setattr(build, "join_ranks", lambda kind, *_, **__: joined.append(kind))
    monkeypatch.setattr(build, "init_device_mesh", lambda kind, *_, **__: mesh)
    form_mesh(PolicyTrainerConfig(device="auto"))
    assert joined == ["cpu"]
