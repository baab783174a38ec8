"""A running drafter trainer (parent, rank, Redis, a weight receiver) is activated, preempted,
killed, resumed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from integration.drafter_world import (
    POLICY,
    SECURITY,
    Receiver,
    World,
    rows_of_policy,
    serve_receiver,
)
from safetensors.torch import load_file, save_file
from whole_versions import build_manifest, push_weights

from paceline.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidInput,
    StaleEpoch,
    Unavailable,
)
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.models.config import read_config
from paceline.rpc import channel
from paceline.speculators.eagle import EagleNet
from paceline.speculators.shift import read_shift
from paceline.streams import FeatureBatch, connect, encode_features
from paceline.tensors import from_numpy, head_hash
from paceline.training.checkpoints import PREFIX, STATE, checkpoint_numbers
from paceline.trajectory import VersionSet
from paceline.v1 import drafter_pb2 as pb
from paceline.v1.engine_pb2 import WEIGHT_TARGET_POLICY_HEAD
from paceline.weights import Spool, commit_versions

ENDLESS = {"max_epochs": 1e6}


@pytest.fixture(scope="module")
def rows() -> list[FeatureBatch]:
    return rows_of_policy("any", 40)


@pytest.fixture
async def world(tmp_path: Path, redis_url: str, run_id: str) -> AsyncIterator[World]:
    spool, receiver, client = Spool(tmp_path / "gateway", keep=4), Receiver(), connect(redis_url)
    server, port = await serve_receiver(spool, receiver)
    address = f"127.0.0.1:{free_port()}"
    made = World(
        run_id, tmp_path / "run", redis_url, client, address, spool, receiver, f"127.0.0.1:{port}"
    )
    yield made
    receiver.open.set()
    await made.stop(signal.SIGKILL)
    await server.stop(0)
    await client.aclose()


async def collect(news: AsyncIterator[pb.ActivateResponse]) -> list[pb.ActivateResponse]:
    return [response async for response in news]


async def until(news: AsyncIterator[pb.ActivateResponse], event: str) -> Any:
    """The next news of that kind."""
    async for response in news:
        if response.WhichOneof("event") == event:
            return getattr(response, event)
    raise AssertionError(f"the stream ended without {event}")


async def promotion(news: AsyncIterator[pb.ActivateResponse]) -> pb.GateDecision:
    """The next promoted decision."""
    while True:
        gate: pb.GateDecision = await until(news, "gate")
        if gate.promoted:
            return gate


async def test_activations_train_stop_resume_and_fence_off_old_leases(
    world: World, rows: list[FeatureBatch]
) -> None:
    await world.append(rows[:20])
    header, _ = encode_features(rows[0])
    broken = await world.stream.append(header, b"no tensors")
    wide = dataclasses.replace(
        rows[0], hidden=from_numpy("hidden", torch.zeros(rows[0].rows, 3).numpy())
    )
    await world.append([wide, *rows[20:]])
    await world.start(**ENDLESS)
    news = await collect(world.activate(2, max_steps=6))
    assert [one.WhichOneof("event") for one in news] == ["activated", "detached"]
    assert news[0].activated.world_size == 1
    detached = news[-1].detached
    assert (detached.reason, detached.steps, detached.micro_batches) == ("max_steps", 6, 24)
    assert detached.tokens > 0
    assert detached.loss > 0
    assert (await world.stream.depth()).entries == 0
    dead = await world.stream.dead_letters()
    assert [letter.fields["dead_id"] for letter in dead if letter.payload == b"no tensors"] == [
        broken
    ]
    assert len(dead) == 2, "rows of another width belong to the dead letters too"
    assert detached.dropped == {"unusable": 2}

    async with aclosing(world.activate(3)) as running:
        await until(running, "activated")
        with pytest.raises(FailedPrecondition):
            await collect(world.activate(3))
        assert (await world.progress()).doing == "activation of step 0"
        assert not (await world.preempt(2)).was_active, (
            "a preemption of an older lease stopped a newer one"
        )
        ranks = world.rank_pids()
        assert (await world.preempt(3)).was_active
        detached = await until(running, "detached")
        assert detached.reason == "preempted"
    assert not (await world.preempt(3)).was_active
    progress = await world.progress()
    assert world.rank_pids() == ranks, "a rank had to be killed"
    assert progress.doing == ""
    assert detached.total_steps == 6 + detached.steps
    assert progress.counts["samples_waiting"] > 0

    with pytest.raises(StaleEpoch):
        await collect(world.activate(2))
    with pytest.raises(InvalidInput):
        await world.call("Preempt", pb.PreemptRequest(context={"run_id": "another", "epoch": 9}))
    assert not (await world.preempt(7)).was_active
    for slots in ([], [1, 1]):
        with pytest.raises(InvalidInput, match="slots"):
            await collect(world.activate(8, slots=slots))
    late = await collect(world.activate(6))
    assert [one.detached.reason for one in late] == ["preempted"], "Preempt overtook Activate"

    with pytest.raises(DeadlineExceeded, match="begun"):
        await collect(world.activate(9, deadline_s=1e-6))
    await world.preempt(9)  # returns when the late activation has stopped
    await world.stop()
    await world.start(**ENDLESS)
    steps = (await world.progress()).counts["optimiser_steps"]
    assert steps >= detached.total_steps
    saved = await world.call(
        "SaveDrafterCheckpoint", pb.SaveDrafterCheckpointRequest(context=world.context(9))
    )
    assert saved.total_steps == steps
    EagleNet.read(Path(saved.path), read_config(POLICY))


@pytest.mark.slow
async def test_a_promotion_is_pushed_whole_committed_and_outlived_by_training(
    world: World, rows: list[FeatureBatch]
) -> None:
    await world.append(rows)
    few = {"gate.samples": 8, "gate.min_positions": 8 * (48 - 6)}  # and all their positions
    await world.start(**ENDLESS, **{"gate.interval_steps": 50}, **few)
    world.receiver.open.clear()
    async with aclosing(world.activate(1)) as running:
        await until(running, "activated")
        await asyncio.wait_for(
            world.receiver.entered.wait(), patient(60)
        )  # the gateway takes long to load the drafter
        assert (await world.preempt(1)).was_active, "a preemption waited for a push"
        detached = await until(running, "detached")
        assert detached.reason == "preempted"
    world.receiver.open.set()
    async with aclosing(world.activate(2)) as running:
        gate = await promotion(running)  # undecided in the first activation
        await world.preempt(2)
    assert gate.drafter_version == 1
    assert gate.candidate_accept_length - gate.serving_accept_length > gate.noise > 0
    assert gate.positions == 8 * (48 - 6)
    written = world.directory / "checkpoints" / "drafter-candidates" / "drafter-1"
    received = world.pushed(1)
    assert (received / "config.json").read_bytes() == (written / "config.json").read_bytes()
    shift = read_shift(received)
    assert shift is not None
    assert shift.over == 0
    assert 1 + sum(shift.after) == pytest.approx(gate.candidate_accept_length)
    assert 1 + sum(shift.before) == pytest.approx(gate.serving_accept_length)
    target = read_config(POLICY)
    net, again = (
        EagleNet.read(written, target).state_dict(),
        EagleNet.read(received, target).state_dict(),
    )
    assert all(torch.equal(net[name], again[name]) for name in net)
    assert torch.linalg.norm(net["fc.weight"] - EagleNet(target, seed=0).fc.weight) > 0.1

    async with channel(world.address, SECURITY) as peer:
        await commit_versions(peer, world.context(3), VersionSet(1, 0, 1))
    await world.append(rows)  # the same rows judge again
    async with aclosing(world.activate(3, drafter=1)) as running:
        second = await until(running, "gate")
        assert second.drafter_version == 2
        assert second.serving_accept_length == pytest.approx(gate.candidate_accept_length, abs=1e-9)


@pytest.mark.slow
async def test_lost_ranks_lost_callers_new_heads_and_many_preemptions(
    world: World, rows: list[FeatureBatch]
) -> None:
    await world.append(rows)
    await world.start(**ENDLESS, checkpoint_interval_s=0.01)
    first = (await collect(world.activate(1, max_steps=2)))[-1].detached
    await world.call(
        "SaveDrafterCheckpoint", pb.SaveDrafterCheckpointRequest(context=world.context(1))
    )
    head, embedding = new_head()
    async with channel(world.address, SECURITY) as peer:
        tensors = [
            from_numpy("lm_head.weight", head),
            from_numpy("model.embed_tokens.weight", embedding),
        ]
        await push_weights(
            peer, build_manifest(WEIGHT_TARGET_POLICY_HEAD, 1, tensors), tensors, world.context(1)
        )

    async with aclosing(world.activate(2)) as running:
        await until(running, "activated")
        (pid,) = world.rank_pids()
        await checkpoints_while_training(world, 2)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Unavailable):
            await collect(running)
    assert (await world.stream.depth()).entries == 0, (
        "the buffer died with the rank, its rows are acknowledged"
    )
    directory = world.directory / "checkpoints" / "drafter"
    newest = directory / f"{PREFIX}{checkpoint_numbers(directory)[-1]}"
    steps = json.loads((newest / STATE).read_text())["learner"]["total_steps"]
    assert steps > first.total_steps
    await world.append(rows[:8])
    again = (await collect(world.activate(3, max_steps=1)))[-1].detached
    assert (again.reason, again.total_steps) == ("max_steps", steps + 1)
    assert world.rank_pids() != [pid]
    expected = head_hash(head.tobytes())
    newer = [relabelled(batch, expected, 1) for batch in rows[8:16]]
    # Without the head of version 1, these rows would wait for their head.
    unknown = [relabelled(batch, "0" * 16, 1) for batch in rows[16:20]]
    await world.append([*newer, *unknown])
    async with aclosing(world.activate(4)) as running:
        await until(running, "activated")
    # A checkpoint waits: it is written after the end of the activation without a reader.
    await world.call(
        "SaveDrafterCheckpoint", pb.SaveDrafterCheckpointRequest(context=world.context(4))
    )
    assert (await world.progress()).doing == ""
    detached = (await collect(world.activate(5, max_steps=1)))[-1].detached
    assert detached.steps == 1
    assert detached.dropped == {"stale_head": len(unknown)}
    await preempt_often(world, range(6, 16))


@pytest.mark.slow
async def test_two_ranks_start_warm_train_save_and_learn_a_head_that_comes_while_they_train(
    world: World, rows: list[FeatureBatch]
) -> None:
    await world.append(
        [batch for batch in rows if not judged_first(batch)]
    )  # no held-out rows so far
    warm = sglang_drafter(world.directory.with_name("warm"))
    await world.start(ranks=2, drafter=world.directory.with_name("warm"), **ENDLESS)
    target = read_config(POLICY)
    first = EagleNet.read(
        world.directory / "checkpoints" / "drafter-candidates" / "drafter-0", target
    ).state_dict()
    assert all(torch.equal(value, warm[name].float()) for name, value in first.items())
    head, embedding = new_head()
    tensors = [
        from_numpy("lm_head.weight", head),
        from_numpy("model.embed_tokens.weight", embedding),
    ]
    async with (
        aclosing(world.activate(1, slots=(0, 1))) as running,
        channel(world.address, SECURITY) as peer,
    ):
        assert (await until(running, "activated")).world_size == 2
        await push_weights(
            peer, build_manifest(WEIGHT_TARGET_POLICY_HEAD, 1, tensors), tensors, world.context(1)
        )
        await world.append([relabelled(batch, head_hash(head.tobytes()), 1) for batch in rows])
        saving = asyncio.create_task(
            world.call(
                "SaveDrafterCheckpoint", pb.SaveDrafterCheckpointRequest(context=world.context(1))
            )
        )
        assert (await until(running, "gate")).policy_version == 1
        assert (await world.preempt(1)).was_active
        detached = await until(running, "detached")
    saved = await saving
    assert saved.total_steps == detached.total_steps > 0
    EagleNet.read(Path(saved.path), read_config(POLICY))
    news = await collect(world.activate(2, max_steps=2, slots=[1]))
    assert news[0].activated.world_size == 1, "one slot was leased"
    again = await collect(world.activate(3, max_steps=2, slots=[3, 0, 5]))
    assert again[0].activated.world_size == 2, "there are two ranks"
    ended = [detached, news[-1].detached, again[-1].detached]
    assert [one.steps for one in ended[1:]] == [2, 2]
    assert sum(one.micro_batches for one in ended) == 4 * sum(one.steps for one in ended), (
        "a gradient was lost"
    )
    assert ended[-1].total_steps == sum(one.steps for one in ended)
    await world.stop()


@pytest.mark.slow
async def test_slots_join_a_running_activation_once_and_not_one_that_ends(
    world: World, rows: list[FeatureBatch]
) -> None:
    await world.append(rows)
    await world.start(ranks=3, **ENDLESS)
    async with aclosing(world.activate(1, slots=[4])) as running:
        assert (await until(running, "activated")).world_size == 1
        assert (await world.join(1, 4, 2)).world_size == 2
        assert (await world.join(1, 4, 2)).world_size == 2, "a duplicate"
        assert (await world.join(1, 4, 2, 7)).world_size == 3
        assert (await world.join(1, 4, 2)).world_size == 3, "an older one, late"
        with pytest.raises(InvalidInput, match="each once"):
            await world.join(1, 4, 4)
        with pytest.raises(StaleEpoch):
            await world.join(0, 4, 5)
        await checkpoints_while_training(world, 1)
        assert (await world.preempt(1)).was_active
        detached = await until(running, "detached")
    assert detached.total_steps == detached.steps > 0
    with pytest.raises(FailedPrecondition, match="no activation"):
        await world.join(1, 4, 2, 7, 8)
    await joins_beside_preemptions(world, range(2, 6))
    await a_dead_rank_cannot_join(world, 6)
    await world.append(rows)  # rows that the lost ranks had read are lost
    last = world.activate(7, max_steps=2, slots=[0, 1, 2], deadline_s=patient(60))
    again = await collect(last)
    assert (again[0].activated.world_size, again[-1].detached.steps) == (3, 2)
    await world.stop()


async def joins_beside_preemptions(world: World, epochs: range) -> None:
    """Join or preemption may win; the activation ends and all ranks take the next activation."""
    ranks = world.rank_pids()
    for epoch in epochs:
        async with aclosing(world.activate(epoch, slots=[0])) as running:
            assert (await until(running, "activated")).world_size == 1
            joined, preempted = await asyncio.gather(
                world.join(epoch, 0, 1), world.preempt(epoch), return_exceptions=True
            )
            assert isinstance(joined, pb.JoinResponse | FailedPrecondition), joined
            assert isinstance(preempted, pb.PreemptResponse)
            assert preempted.was_active
            assert (await until(running, "detached")).reason == "preempted"
    assert world.rank_pids() == ranks, "a rank had to be killed"


async def a_dead_rank_cannot_join(world: World, epoch: int) -> None:
    """Both calls report the dead rank, and new ranks follow."""
    async with aclosing(world.activate(epoch, slots=[0])) as running:
        await until(running, "activated")
        os.kill(world.rank_pids()[1], signal.SIGKILL)
        with pytest.raises((Unavailable, FailedPrecondition)):
            await world.join(epoch, 0, 1)
        with pytest.raises(Unavailable, match="rank 1"):
            await until(running, "detached")


def sglang_drafter(directory: Path) -> dict[str, torch.Tensor]:
    """A drafter in SGLang's own format: bf16, "model." before its names, with the target's
    matrices.
    """
    target = read_config(POLICY)
    net = EagleNet(target, seed=5)
    net.to(torch.bfloat16).save(directory)
    own = load_file(directory / "model.safetensors")
    matrix = torch.zeros(target.vocab_size, target.hidden_size, dtype=torch.bfloat16)
    shared = {"model.embed_tokens.weight": matrix, "lm_head.weight": matrix.clone()}
    save_file(
        {f"model.{name}": value for name, value in own.items()} | shared,
        directory / "model.safetensors",
    )
    return own


async def preempt_often(world: World, epochs: range) -> None:
    """Preempts activations that train and write a checkpoint, and prints the times."""
    before, took_s = world.rank_pids(), list[float]()
    for epoch in epochs:
        async with aclosing(world.activate(epoch)) as running:
            await until(running, "activated")
            await checkpoints_while_training(world, 1)
            preempted = await world.preempt(epoch)
            assert preempted.was_active
            took_s.append(preempted.stopped_after_s)
            assert (await until(running, "detached")).reason == "preempted"
    assert world.rank_pids() == before, "a rank had to be killed"
    assert min(took_s) > 0
    sys.stdout.write(f"{len(took_s)} preemptions, the longest of {1e3 * max(took_s):.0f} ms\n")


async def checkpoints_while_training(world: World, count: int) -> None:
    """Returns once `count` more checkpoints are on disk."""
    directory = world.directory / "checkpoints" / "drafter"
    wanted = max(checkpoint_numbers(directory), default=0) + count
    async with asyncio.timeout(patient(60)):
        while max(checkpoint_numbers(directory), default=0) < wanted:
            await world.progress()


def new_head() -> tuple[Any, Any]:
    """Head and embedding of a policy that has moved."""
    tensors = load_file(POLICY / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"].float()
    return (tensors.get("lm_head.weight", embedding).float() * 1.01).numpy(), embedding.numpy()


def relabelled(batch: FeatureBatch, head: str, version: int) -> FeatureBatch:
    """The same rows as if version `version` had computed them."""
    return dataclasses.replace(
        batch,
        lm_head_hash=head,
        policy_version=version,
        versions=np.full(batch.rows, version, dtype=np.int64),
    )


def judged_first(batch: FeatureBatch) -> bool:
    """Whether the buffer's rule keeps the rows for evaluation."""
    return zlib.crc32((batch.group_id or batch.session_id).encode()) % 4 == 0


def test_the_parent_imports_no_torch() -> None:
    code = (
        "import paceline.services.drafter_trainer.server, sys; assert 'torch' not in sys.modules and "
        "'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patient(60))
