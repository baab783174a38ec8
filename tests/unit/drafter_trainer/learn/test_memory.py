"""The drafter trainer's memory between activations: bytes leave the device, and old shards are
freed.

The tensors are on the CPU here, under members with another device name; the same tensors leave.
Each test fails if a move off the device has no effect.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
from live_memory import live_bytes, storage_bytes
from random_models import save_random
from rank_processes import run_ranks
from torch import Tensor
from unit.drafter_trainer import memory_ranks
from unit.drafter_trainer.memory_ranks import HEAD, ROWS, elsewhere, held, learner

from paceline.ranks.group import RankLink
from paceline.services.drafter_trainer.config import DrafterTrainerConfig
from paceline.services.drafter_trainer.learn.membership import on_cpu
from paceline.services.drafter_trainer.rank import Rank


def weak(tensors: list[Tensor]) -> list[weakref.ref[object]]:
    """Return weak references to the storages."""
    return [weakref.ref(one.untyped_storage()) for one in tensors]


@pytest.mark.few(1)
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_learner_off_its_device_holds_no_byte_there_and_learns_on(kind: str) -> None:
    one, never = learner(kind=kind), learner(kind=kind)
    for row in ROWS[:3]:
        one.micro_step(row, HEAD)
        never.micro_step(row, HEAD)
    kept, live = held(one), live_bytes()
    assert storage_bytes(kept) > 4 * storage_bytes(one.sharded.net.parameters())  # and averages
    with elsewhere(one):
        one.offload()
        assert storage_bytes(kept) == 0
        assert one.sharded.net.head.numel() == one.sharded.net.embed.numel() == 0
        assert live_bytes() <= live
        one.attach(one.members)
    assert storage_bytes(kept) > 0
    for row in ROWS[3:]:
        assert one.micro_step(row, HEAD) == never.micro_step(row, HEAD)


@pytest.mark.usefixtures("one_rank")
def test_a_rank_whose_activation_ends_leaves_its_device(tmp_path: Path) -> None:
    save_random(tmp_path / "model", "llama", num_hidden_layers=4)
    config = DrafterTrainerConfig.model_validate(
        {"model": str(tmp_path / "model"), "run": {"dir": str(tmp_path)}}
    )
    rank = Rank(config, RankLink(f"ipc://{tmp_path}/parent", 1))  # rank 0 alone reads a stream
    kept = held(rank.learner)
    assert storage_bytes(kept) > 0
    with elsewhere(rank.learner):
        rank._leave()
        assert storage_bytes(kept) == 0
    rank.link.close()


@pytest.mark.few(1)
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("how", ["moved", "begun again"])
def test_a_drafter_that_another_takes_the_place_of_is_freed(how: str) -> None:
    one = learner()
    for row in ROWS[:3]:
        one.micro_step(row, HEAD)
    gone, live = weak(held(one)), live_bytes()
    if how == "moved":
        one.attach(on_cpu(1))
    else:
        one.begin_again()
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)
    assert live_bytes() <= live


@pytest.mark.slow
def test_two_ranks_off_their_devices_hold_no_shard_and_nothing_gathered(tmp_path: Path) -> None:
    run_ranks(memory_ranks.main, 2, tmp_path)
