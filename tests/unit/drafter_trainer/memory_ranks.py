"""Learners that leave a device, in one process or on two ranks; the CPU acts as the device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist
from live_memory import live_bytes, storage_bytes
from torch import Tensor
from torch.distributed.tensor import DTensor
from unit.drafter_trainer.samples import TARGET, sample, toy_policy

from paceline.services.drafter_trainer.config import DrafterOptimizerConfig
from paceline.services.drafter_trainer.learn.learner import DrafterLearner
from paceline.services.drafter_trainer.learn.membership import Members, Membership, on_cpu
from paceline.services.drafter_trainer.rows.sample import pack
from paceline.speculators.eagle import EagleNet
from paceline.training.shards import local_of

ROWS = [pack([sample(12 + i, i)], window=512) for i in range(8)]
HEAD = toy_policy().policy_head()


def learner(kind: str = "adamw", members: Members | None = None) -> DrafterLearner:
    """Return a learner of an EAGLE drafter of the toy policy; it steps after two rows."""
    config = DrafterOptimizerConfig.model_validate({"lr": 1e-2, "warmup_steps": 2, "kind": kind})
    net = EagleNet(TARGET, seed=1)
    return DrafterLearner(net, config, micro_batches=2, members=members or on_cpu(1))


def held(one: DrafterLearner) -> list[Tensor]:
    """Return a learner's tensors on its device: shards, moments, averages, a partial gradient."""
    live = one.sharded.named() | one.sharded.gradients()
    return [local_of(each.detach()) for each in live.values()]


@contextmanager
def elsewhere(one: DrafterLearner) -> Iterator[None]:
    """Name the members' devices cuda:0, cuda:1, ..., as if the tensors were there."""
    here = one.members
    away = replace(here, devices=tuple(f"cuda:{slot}" for slot in range(here.size)))
    one.members = one.sharded.members = away
    yield
    one.members = one.sharded.members = here


def main() -> None:
    """Two ranks learn in shards, leave in the middle of a step, and come back."""
    dist.init_process_group("gloo")
    membership = Membership("cpu")
    one = learner(members=membership.members)
    for row in ROWS[:3]:
        one.micro_step(row, HEAD)
    kept, live = held(one), live_bytes()
    assert storage_bytes(kept) > 0
    with elsewhere(one):
        one.offload()
        assert storage_bytes(kept) == 0
        whole = [each for each in one.sharded.net.parameters() if not isinstance(each, DTensor)]
        assert storage_bytes(whole) == 0, "something gathered is left"
        assert live_bytes() <= live
        one.attach(one.members)
    assert storage_bytes(kept) > 0
    one.micro_step(ROWS[3], HEAD)
    shards = [weakref.ref(tensor.untyped_storage()) for tensor in held(one)]
    del kept, whole
    one.attach(membership.join(range(1)))
    assert one.members.takes_part == (dist.get_rank() == 0)
    gc.collect()
    assert not [ref for ref in shards if ref() is not None], "old shards are held"
    dist.barrier()
    dist.destroy_process_group()
