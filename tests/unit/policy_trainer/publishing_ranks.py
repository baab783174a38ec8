"""One rank of the tests of publication and export: what rank 0 is given, and what each rank held."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from unit.policy_trainer.held import Held
from unit.policy_trainer.sharded_step import trajectories, whole

from paceline.errors import ResourceExhausted
from paceline.services.policy_trainer import publish
from paceline.services.policy_trainer.batches.batch import make_batch
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn.build import build_learner
from paceline.services.policy_trainer.learn.learner import Learner
from paceline.services.policy_trainer.learn.parallel import form_mesh
from paceline.services.policy_trainer.publish import gather_publication, take_served
from paceline.tensors import NamedTensor, encode_safetensors
from paceline.training import streaming
from paceline.training.checkpoints import CheckpointWriter, read_each_whole
from paceline.training.hugging_face import write_causal_lm
from paceline.training.process import from_all_ranks
from paceline.training.shards import local_of

PIECE = 2 << 10


def stepped(model: Path, out: Path, given: Mapping[str, object]) -> Learner:
    """After a step, so that shards are no copies of the start's."""
    run = {"model": str(model), "device": "cpu", "run": {"dir": str(out / "run")}}
    config = PolicyTrainerConfig.model_validate({**run, "optimizer": {"lr": 1e-2}, **given})
    learner = build_learner(config, form_mesh(config))
    learner.step(make_batch(trajectories(), 4))
    return learner


def main(model: Path, out: Path, given: Mapping[str, object]) -> None:
    """Publishes and exports; rank 0 writes both, the whole state as torch gathers it, and bytes."""
    streaming.PIECE_BYTES = PIECE
    learner = stepped(model, out, given)
    with Held() as published:
        publication = gather_publication(1, learner.published(), learner.shapes(), learner.config)
    alone = dist.get_world_size() == 1
    rank = dist.get_rank()
    exported = Held()

    def export(state: dict[str, object], checkpoint: Path) -> None:
        with exported:
            weights = read_each_whole(checkpoint, "learner/model", state)
            write_causal_lm(weights, learner.shapes(), model, checkpoint)

    writer = CheckpointWriter(out / "checkpoints", export)
    writer.write({"learner": learner.state()}, 1, None if alone else dist.new_group())
    writer.wait()
    full = whole(learner.published())
    held = from_all_ranks([published.most, exported.most])
    if rank == 0:
        assert publication is not None
        (out / "published.safetensors").write_bytes(encode_safetensors(publication.policy))
        save_file(full, out / "full.safetensors")
        (out / "held.json").write_text(json.dumps(held))
    else:
        assert publication is None
    dist.barrier()
    dist.destroy_process_group()


def taking(model: Path, out: Path, dtype: str) -> None:
    """Takes what serves where its bits differ; rank 0 writes own weights, those, and the taken."""
    streaming.PIECE_BYTES = PIECE
    learner = stepped(model, out, {"publish_dtype": dtype})
    own = {name: one.clone() for name, one in whole(learner.published()).items()}
    served = {name: one.to(getattr(torch, dtype), copy=True) for name, one in own.items()}
    for one in served.values():
        one[-1] *= 1.25
    served["model.norm.weight"][0] = -0.0
    own_rank = dist.get_rank() == 0
    there = {
        name: NamedTensor(
            name,
            {"float32": "F32", "bfloat16": "BF16"}[dtype],
            tuple(one.shape),
            one.view(torch.uint8).numpy().tobytes(),
        )
        for name, one in served.items()
    }
    take_served(learner.published(), there if own_rank else None, learner.config)
    taken = whole(learner.published())
    if own_rank:
        for name, tensors in (("own", own), ("served", served), ("taken", taken)):
            save_file(tensors, out / f"{name}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def without_room(model: Path, out: Path) -> None:
    """The disk of rank 0 is full: no rank waits for another."""
    learner = stepped(model, out, {})
    before = {name: local_of(one).clone() for name, one in learner.published()}

    def full(nbytes: int, directory: Path) -> memoryview:
        raise ResourceExhausted("no room", seen=nbytes)

    publish.allocate_on_disk = full
    with pytest.raises(ResourceExhausted, match="no room"):
        gather_publication(1, learner.published(), learner.shapes(), learner.config)
    assert all(torch.equal(local_of(one), before[name]) for name, one in learner.published())
    dist.destroy_process_group()
