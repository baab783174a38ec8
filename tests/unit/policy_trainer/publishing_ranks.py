"""One rank of the tests of publication and export: its publications and its peak memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from unit.policy_trainer.held import Held
from unit.policy_trainer.sharded_step import trajectories, whole

from paceline.errors import ResourceExhausted, WeightsError
from paceline.services.policy_trainer import publish
from paceline.services.policy_trainer.batches.batch import make_batch
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn.build import build_learner, form_mesh
from paceline.services.policy_trainer.learn.learner import Learner
from paceline.services.policy_trainer.publish import Publisher, adopt_served, publication_of
from paceline.tensors import NamedTensor
from paceline.training import shards
from paceline.training.checkpoints import CheckpointWriter, read_each_whole
from paceline.training.process import from_all_ranks
from paceline.training.shards import local_of, write_causal_lm
from paceline.v1.trajectory_pb2 import CommandContext

PIECE = 2 << 10
MOVED = ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight")
"""Few tensors: this model's tensors are so small that a record for each would make a large delta.
"""


def stepped(model: Path, out: Path, given: Mapping[str, object]) -> Learner:
    """Return a learner after a step, so that its shards differ from the start's."""
    run = {"model": str(model), "device": "cpu", "run": {"dir": str(out / "run")}}
    config = PolicyTrainerConfig.model_validate({**run, "optimizer": {"lr": 1e-2}, **given})
    learner = build_learner(config, form_mesh(config))
    learner.step(make_batch(trajectories(), 4))
    return learner


def main(model: Path, out: Path, given: Mapping[str, object]) -> None:
    """Publish and export. Each rank writes its published bytes; rank 0 writes the export, the
    whole state as torch gathers it, and the most bytes held by each rank.
    """
    shards.PIECE_BYTES = PIECE
    learner = stepped(model, out, given)
    with Held() as published:
        publication = publication_of(
            1, learner.weights.published(), learner.weights.shapes(), learner.config
        )
    alone = dist.get_world_size() == 1
    rank = dist.get_rank()
    exported = Held()

    def export(state: dict[str, object], checkpoint: Path) -> None:
        with exported:
            weights = read_each_whole(checkpoint, "learner/model", state)
            write_causal_lm(weights, learner.weights.shapes(), model, checkpoint)

    writer = CheckpointWriter(out / "checkpoints", export, whole="learner/model")
    writer.write({"learner": learner.state()}, 1, None if alone else dist.new_group())
    writer.wait()
    full = whole(learner.weights.published())
    held = from_all_ranks([published.most, exported.most])
    for one in publication.policy.tensors:
        (out / f"{one.name}.{rank}").write_bytes(one.view)
    if rank == 0:
        save_file(full, out / "full.safetensors")
        (out / "held.json").write_text(json.dumps(held))
    dist.barrier()
    dist.destroy_process_group()


@torch.no_grad()
def pushing(model: Path, out: Path, given: Mapping[str, object], spoil: Mapping[str, int]) -> None:
    """Push the start's weights, and again after a few numbers of two tensors have moved; rank 0
    writes the reports.

    `spoil`: numbers of one rank become NaN before the third version; its error is written.
    """
    shards.PIECE_BYTES = PIECE
    run = {"model": str(model), "device": "cpu", "run": {"dir": str(out / "run")}}
    config = PolicyTrainerConfig.model_validate({**run, **given})
    learner = build_learner(config, form_mesh(config))
    publisher, told = Publisher(config, asyncio.Runner()), []
    for version in (1, 2, 3):
        for name, weight in learner.weights.published():
            rows = local_of(weight).flatten(1) if weight.ndim > 1 else local_of(weight)
            if version > 1 and name in MOVED:
                rows[..., ::64] *= 1.25
            if version == 3 and dist.get_rank() == spoil["rank"]:
                rows[...] = float("nan")
        try:
            publication = publication_of(
                version, learner.weights.published(), learner.weights.shapes(), config
            )
            context = CommandContext(run_id="local", step=version, epoch=3)
            told.append(asdict(publisher.push(publication, context)))
        except WeightsError as error:
            told.append({"error": str(error)})
    assert (
        from_all_ranks([one.get("error") for one in told])
        == [[one.get("error") for one in told]] * dist.get_world_size()
    )
    if dist.get_rank() == 0:
        (out / "told.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def adapted(model: Path, out: Path, dtype: str) -> None:
    """Publish adapters alone; each rank writes its published bytes, rank 0 the manifests and
    the whole weights.
    """
    adapters = {"rank": 4, "publish": "adapters"}
    learner = stepped(model, out, {"adapters": adapters, "publish_dtype": dtype})
    weights = learner.weights
    publication = publication_of(
        1, weights.pushed(), weights.pushed_shapes(), learner.config, added=weights.added
    )
    for part, one in (("policy", publication.policy), ("head", publication.head)):
        for tensor in one.tensors:
            (out / f"{part}.{tensor.name}.{dist.get_rank()}").write_bytes(tensor.view)
    full = whole(learner.weights.published())
    if dist.get_rank() == 0:
        for part, one in (("policy", publication.policy), ("head", publication.head)):
            (out / f"{part}.manifest").write_bytes(one.manifest.SerializeToString())
        save_file(full, out / "full.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def taking(model: Path, out: Path, dtype: str) -> None:
    """Take served weights where their bits differ; rank 0 writes own, served and taken weights."""
    shards.PIECE_BYTES = PIECE
    learner = stepped(model, out, {"publish_dtype": dtype})
    own = {name: one.clone() for name, one in whole(learner.weights.published()).items()}
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
    adopt_served(learner.weights.published(), there if own_rank else None, learner.config)
    taken = whole(learner.weights.published())
    if own_rank:
        for name, tensors in (("own", own), ("served", served), ("taken", taken)):
            save_file(tensors, out / f"{name}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def without_room(model: Path, out: Path) -> None:
    """The disk of the last rank is full: no rank waits for another."""
    learner = stepped(model, out, {})
    before = {name: local_of(one).clone() for name, one in learner.weights.published()}

    def full(nbytes: int, directory: Path) -> memoryview:
        raise ResourceExhausted("no room", seen=nbytes)

    if dist.get_rank() == dist.get_world_size() - 1:
        publish.room_for = full
    with pytest.raises(ResourceExhausted, match="no room"):
        publication_of(1, learner.weights.published(), learner.weights.shapes(), learner.config)
    assert all(
        torch.equal(local_of(one), before[name]) for name, one in learner.weights.published()
    )
    dist.destroy_process_group()
