"""One rank, in the process of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn.build import form_mesh
from paceline.training import STORE_VARIABLE


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    with pytest.MonkeyPatch.context() as patch:
        store = tmp_path_factory.mktemp("ranks") / "store"
        places = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, STORE_VARIABLE: store}
        for name, value in places.items():
            patch.setenv(name, str(value))
        yield form_mesh(PolicyTrainerConfig(device="cpu"))
        dist.destroy_process_group()
