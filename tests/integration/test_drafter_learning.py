"""A drafter learns the demo's start policy from its rows within a minute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from integration.drafter_world import POLICY, rows_of_policy

from paceline.models.config import read_config
from paceline.services.drafter_trainer.config import BufferConfig, DrafterOptimizerConfig
from paceline.services.drafter_trainer.gate.evaluate import chain_survival
from paceline.services.drafter_trainer.learn.learner import DrafterLearner
from paceline.services.drafter_trainer.rows.buffer import FeatureBuffer
from paceline.services.drafter_trainer.rows.sample import load_policy_head, pack, sample_from
from paceline.speculators.eagle import EagleNet


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_acceptance_of_held_out_rows_rises_with_training() -> None:
    target, head = read_config(POLICY), load_policy_head(POLICY, 0)
    config = BufferConfig(samples=500, judged_every=5)
    vars(config).update(judged_samples=40)  # a constant of a run
    buffer = FeatureBuffer(config, seed=0)
    for batch in rows_of_policy("r", 240, length=60):
        buffer.add(sample_from(batch, target))
    learner = DrafterLearner(
        EagleNet(target, seed=0), DrafterOptimizerConfig(lr=1e-2), micro_batches=4
    )

    def acceptance() -> float:
        net = learner.snapshot()
        rows = [pack([one], window=512) for one in buffer.fresh([head.hash])]
        found = [chain_survival(net, row, head, 5, temperature=1.0) for row in rows]
        return 1.0 + float(torch.cat(found).mean(dim=0).sum())

    lengths = [acceptance()]
    for steps in (25, 35):
        for _ in range(4 * steps):
            row = pack(buffer.draw(512, known={head.hash}), window=512)
            learner.micro_step(row, head)
        lengths.append(acceptance())
    assert learner.total_steps == 60
    assert lengths[0] < lengths[1] < lengths[2]
    assert lengths[2] > 1.6
