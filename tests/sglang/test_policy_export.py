"""A checkpoint of the policy trainer generates the same tokens in the real SGLang and in
transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from sglang_served import DEMO, Served, greedy, load_oracle
from torch.distributed.device_mesh import DeviceMesh
from unit.policy_trainer.sharded_step import trajectories

from paceline.ranks.messages import Save
from paceline.services.policy_trainer.batches.batch import make_batch
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn.build import build_learner, form_mesh
from paceline.services.policy_trainer.messages import Progress
from paceline.services.policy_trainer.trainer import PolicyTrainer
from paceline.training import STORE_VARIABLE

pytestmark = pytest.mark.sglang
START = DEMO / "policy_start"
PROMPTS = [[2, 5, 9, 4], [2, 7, 7, 3, 8], [2, 6]]
TOKENS = 24


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    with pytest.MonkeyPatch.context() as patch:
        store = tmp_path_factory.mktemp("ranks") / "store"
        places = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, STORE_VARIABLE: store}
        for name, value in places.items():
            patch.setenv(name, str(value))
        yield form_mesh(PolicyTrainerConfig(device="cpu"))
        dist.destroy_process_group()


def trained(run: Path, mesh: DeviceMesh, adapter_rank: int) -> Path:
    """The checkpoint of a policy after two large steps."""
    config = PolicyTrainerConfig.model_validate(
        {
            "model": str(START),
            "run": {"dir": str(run)},
            "adapters": {"rank": adapter_rank},
            "optimizer": {"lr": 2e-2 if adapter_rank else 3e-3},
        }
    )
    trainer = PolicyTrainer(config, build_learner(config, mesh), None)
    vocabulary = int(trainer.learner.weights.shapes()["model.embed_tokens.weight"][0])
    for _ in range(2):
        trainer.learner.step(make_batch(trajectories(vocabulary=vocabulary), 4))
    trainer.progress = Progress(policy_version=2, step=1)
    trainer.handle(Save(1))
    return config.checkpoints_dir / "step-2"


@pytest.mark.parametrize("adapter_rank", [0, 4], ids=["weights", "adapters"])
def test_a_checkpoint_is_served_by_sglang_as_transformers_has_it(
    tmp_path: Path, mesh: DeviceMesh, adapter_rank: int
) -> None:
    checkpoint = trained(tmp_path / "run", mesh, adapter_rank)
    wanted = [greedy(load_oracle(checkpoint), prompt, TOKENS) for prompt in PROMPTS]
    before = [greedy(load_oracle(START), prompt, TOKENS) for prompt in PROMPTS]
    assert wanted != before, "the test needs a policy that has moved"
    served = Served(
        tmp_path / "served", model_dir=str(checkpoint), drafter="off", max_sequence_tokens=64
    )
    try:
        assert served.tokens(PROMPTS, max_tokens=TOKENS) == wanted
    finally:
        served.client.close()
