"""A running policy trainer (parent, two ranks, Redis, weight receivers) is stepped, killed,
resumed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from integration.policy_world import (
    GROUPS,
    SIBLINGS,
    World,
    made,
    policy_world,
    receiver,
    save_tiny_policy,
)
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from transformers import LlamaForCausalLM
from watched_stream import WatchedStream, ledger_record

from paceline.errors import InternalError, StaleEpoch, Unavailable, WeightsError
from paceline.local.news import heard, news_pipe
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.local.processes import NEWS_VARIABLE
from paceline.ranks.group import RankGroup
from paceline.ranks.messages import Save, Saved
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.messages import MESSAGES
from paceline.services.policy_trainer.server import RANK_GRACE_S
from paceline.streams import Ledger, LedgerCount, encode_trajectory, run_key
from paceline.telemetry import names
from paceline.v1.engine_pb2 import WEIGHT_TARGET_POLICY, WEIGHT_TARGET_POLICY_HEAD

NAN_LOSS = """
import dataclasses

from paceline.services.policy_trainer.algorithms.grpo import Grpo


class NanLoss(Grpo):
    def loss(self, tokens):
        loss = super().loss(tokens)
        return dataclasses.replace(loss, losses=loss.losses * float("nan"))
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_policy(directory)
    return directory


@pytest.fixture
async def world(
    tmp_path: Path, model_dir: Path, redis_url: str, run_id: str
) -> AsyncIterator[World]:
    async with policy_world(tmp_path, model_dir, redis_url, run_id) as one:
        yield one


def moved(after: dict[str, Any], before: dict[str, Any]) -> float:
    """Largest change of any weight."""
    return max(float(np.abs(after[name] - before[name]).max()) for name in before)


@pytest.mark.parametrize("offload", [False, True], ids=["stays", "offload"])
async def test_two_ranks_train_push_checkpoint_and_acknowledge(
    world: World, *, offload: bool
) -> None:
    await world.start(checkpoint_interval_steps=1, offload=offload)
    trajectories = await world.append(0, 0)
    batch, stepped, prepared = await world.step(0, 0)
    assert batch.trajectories == len(trajectories)
    assert stepped.world_size == 2
    assert stepped.figures["grad_norm"] > 0
    assert stepped.reward_mean == pytest.approx(0.5)
    assert prepared.policy_version == stepped.policy_version == 1
    start = load_file(world.model / "model.safetensors")
    first = world.weights(1)
    assert set(first) == set(start)
    assert 1e-4 < moved(first, start) < 2e-3
    head = load_file(world.spools["drafter"].path(3, 1) / "model.safetensors")
    assert np.array_equal(head["lm_head.weight"], first["lm_head.weight"])
    assert np.array_equal(head["model.embed_tokens.weight"], first["model.embed_tokens.weight"])

    stream = WatchedStream(world.client, run_key(world.run, "trajectories"))
    second = await world.append(1, 1)
    await world.step(1, 1)
    assert (await stream.depth()).entries == len(trajectories) + len(second), (
        "acknowledged before two checkpoints held the step"
    )
    await world.stop()
    assert (await stream.depth()).entries == len(second)
    count = await Ledger(world.client, world.run).count()
    assert (count.final, count.trained, count.open, count.lost) == (24, 24, 0, 0)
    checkpoint = world.directory / "checkpoints" / "policy" / "step-2"
    assert (checkpoint / "tokenizer.json").exists()
    loaded = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert np.array_equal(
        loaded.lm_head.weight.detach().numpy(), world.weights(2)["lm_head.weight"]
    )


@pytest.mark.slow
async def test_a_rank_writes_its_last_spans_before_it_ends(
    tmp_path: Path, model_dir: Path, redis_url: str, run_id: str
) -> None:
    config = PolicyTrainerConfig.model_validate(
        {
            "run": {"id": run_id, "dir": str(tmp_path / "run")},
            "redis": {"durable_url": redis_url},
            "telemetry": {"spans_dir": str(tmp_path / "spans")},
            "model": str(model_dir),
        }
    )
    imports = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    group = RankGroup("late_flush_rank", 1, 1, tmp_path, {"PYTHONPATH": imports}, config=config)
    async with group:
        await group.start(patient(90))
        group.send(MESSAGES.encode(Save(1)))
        saved = False
        while not saved:
            _, message = await group.receive(patient(60))
            saved = isinstance(MESSAGES.decode(message), Saved)
        await group.stop(patient(RANK_GRACE_S))
    spans = [json.loads(line) for file in (tmp_path / "spans").iterdir() for line in file.open()]
    assert names.POLICY_CHECKPOINT in {span["name"] for span in spans}


async def test_a_policy_that_moves_little_is_pushed_as_a_delta_bit_for_bit(world: World) -> None:
    settings = {"publish_dtype": "bfloat16", "optimizer.lr": 1e-6}
    await world.start(ranks=1, **settings)
    sent = []
    for step in (0, 1):
        await world.append(step, step)
        sent.append((await world.step(step, step))[-1].bytes)
        await world.commit(step + 1)
    assert 0 < sent[1] < sent[0] / 16
    await world.stop()
    checkpoint = world.directory / "checkpoints" / "policy" / "step-2"
    exported = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).state_dict()
    first, second = (
        load_tensors(world.spools["gateway"].path(1, version) / "model.safetensors")
        for version in (1, 2)
    )
    assert all(torch.equal(second[name], exported[name]) for name in second)
    assert any(not torch.equal(second[name], first[name]) for name in second)
    head = load_tensors(world.spools["drafter"].path(3, 2) / "model.safetensors")
    assert torch.equal(head["lm_head.weight"], exported["lm_head.weight"])


async def test_a_step_whose_groups_are_all_left_out_moves_nothing_and_loses_nothing(
    world: World,
) -> None:
    await world.start(ranks=1)
    trajectories = await world.append(0, 0)
    batch, stepped, prepared = await world.step(0, 0, left_out=True)
    assert (batch.trajectories, dict(batch.dropped)) == (0, {"no_variance": GROUPS})
    assert (prepared.policy_version, stepped.figures["grad_norm"]) == (1, 0.0)
    assert moved(world.weights(1), load_file(world.model / "model.safetensors")) == 0.0
    count = await Ledger(world.client, world.run).count()
    assert (count.final, dict(count.dropped), count.open, count.lost) == (
        *(len(trajectories), {"no_variance": len(trajectories)}),
        *(0, 0),
    )


async def test_empty_groups_cost_no_wait_and_a_session_of_several_branches_counts_once(
    world: World,
) -> None:
    await world.start(ranks=1)
    batch, stepped, _ = await asyncio.wait_for(
        world.step(0, 0, sessions=0, deadline_s=60), patient(30)
    )
    assert (batch.trajectories, dict(batch.dropped), stepped.figures["grad_norm"]) == (
        0,
        {"unscored": GROUPS},
        0.0,
    )
    assert moved(world.weights(1), load_file(world.model / "model.safetensors")) == 0.0
    await world.commit(1)

    ledger = Ledger(world.client, world.run)
    for one in made(world.run, 1, 1):
        branches = (
            3 if one.sample_index == 1 else 1
        )  # sessions with reward 1; the single siblings have 0
        if one.sample_index < 2:
            for branch in range(branches):
                key = dataclasses.replace(one.key, branch_id=str(branch))
                kept = dataclasses.replace(one, key=key, branch_count=branches)
                await ledger.append_final(kept, *encode_trajectory(kept))
    batch, stepped, _ = await world.step(1, 1, sessions=2)
    assert batch.trajectories == 4 * GROUPS
    assert (stepped.reward_mean, stepped.reward_std) == pytest.approx((0.5, 0.5))
    assert stepped.figures["grad_norm"] > 0


async def test_a_session_with_a_log_prob_that_is_nan_is_left_out_and_the_others_are_trained(
    world: World,
) -> None:
    await world.start(ranks=1, **{"algorithm.correction.weight": "token"})
    ledger = Ledger(world.client, world.run)
    broken, *others = made(world.run, 0, 0)
    logprobs = (*broken.behavior_logprobs[:-1], math.nan)
    for one in (dataclasses.replace(broken, behavior_logprobs=logprobs), *others):
        await ledger.append_final(one, *encode_trajectory(one))
    batch, stepped, _ = await asyncio.wait_for(world.step(0, 0, deadline_s=60), patient(40))
    assert (batch.trajectories, stepped.skipped_updates) == (GROUPS * SIBLINGS - 1, 0)
    assert all(np.isfinite(tensor).all() for tensor in world.weights(1).values())
    count = await ledger.count()
    assert (count.trained, count.dropped) == (GROUPS * SIBLINGS - 1, {"not_finite": 1})


async def test_steps_whose_loss_is_nan_leave_the_weights_alone_and_the_third_in_a_row_ends_it(
    world: World,
) -> None:
    own = world.directory.parent / "own.py"
    own.write_text(NAN_LOSS)
    await world.start(ranks=2, **{"algorithm.name": f"{own}:NanLoss"})
    start = load_file(world.model / "model.safetensors")
    for step in range(2):
        await world.append(step, step)
        _, stepped, _ = await world.step(step, step)
        assert stepped.skipped_updates == 1
        assert "loss" not in stepped.figures
        assert moved(world.weights(step + 1), start) == 0.0
        await world.commit(step + 1)
    pids = world.rank_pids()
    await world.append(2, 2)
    with pytest.raises(InternalError, match="not finite in several steps in a row; seen: 3 steps"):
        await world.step(2, 2)
    assert world.rank_pids() == pids, "a rank was left waiting"


@pytest.mark.slow
async def test_a_killed_trainer_replays_what_its_checkpoint_misses_and_steps_on(
    world: World,
) -> None:
    await world.start()
    for step in range(3):
        await world.append(step, step)
        await world.step(step, step)
        await world.commit(step + 1)
    third = world.weights(3)
    async with asyncio.timeout(patient(60)):  # written during the third step
        while world.checkpoints() != [2]:
            await world.counts()
    await world.stop(signal.SIGKILL)

    await world.start()
    assert ((await world.counts())["step"], world.checkpoints()) == (2, [2])
    again = await world.step(2, 2)
    assert again[-1].policy_version == 3
    assert again[-1].bytes == 0, "the replayed weights differ from those pushed before"
    await world.append(3, 3)
    await world.step(3, 3)
    assert moved(world.weights(4), third) > 1e-5
    await world.stop()
    count = await Ledger(world.client, world.run).count()
    assert (count.final, count.trained, count.open, count.lost) == (48, 48, 0, 0)


@pytest.mark.slow
async def test_trajectories_of_a_compacted_step_that_come_again_are_not_trained_by_a_resumed_run(
    world: World,
) -> None:
    settings = {"ranks": 1, "checkpoint_interval_steps": 1, "ledger_keep": 0}
    await world.start(**settings)
    first = await world.append(0, 0)
    for step in range(3):
        if step:
            await world.append(step, step)
        await world.step(step, step)
        await world.commit(step + 1)
    await world.stop()
    ledger = Ledger(world.client, world.run)
    assert await ledger_record(ledger, str(first[0].key)) is None, "step 0 is not compacted"
    stream = WatchedStream(world.client, run_key(world.run, "trajectories"))
    waiting = (await stream.depth()).entries

    await world.append(0, 0)
    assert (await stream.depth()).entries == waiting
    await world.start(**settings)
    await world.append(3, 3)
    batch, *_ = await world.step(3, 3)
    assert batch.trajectories == len(first)
    await world.stop()
    count = await ledger.count()
    assert count == LedgerCount(5 * len(first), 4 * len(first), {"late": len(first)}, 0, 0)


@pytest.mark.slow
async def test_a_damaged_checkpoint_is_replaced_by_the_one_before_and_its_steps_trained_again(
    world: World,
) -> None:
    await world.start(checkpoint_interval_steps=1)
    for step in range(3):
        await world.append(step, step)
        await world.step(step, step)
        await world.commit(step + 1)
    await world.stop()
    kept = sorted((world.directory / "checkpoints" / "policy").glob("step-*"))
    assert [path.name for path in kept] == ["step-2", "step-3"]
    shard = kept[-1] / "shards" / "rank-1.safetensors"
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)

    await world.start(checkpoint_interval_steps=1)
    assert ((await world.counts())["step"], world.checkpoints()) == (2, [2])
    assert (await world.step(2, 2))[-1].bytes == 0, "the step came to other weights"
    log = (world.directory / "logs" / "policy_trainer.rank-rank0.log").read_text()
    assert "checkpoint_damaged" in log
    assert "rank-1.safetensors" in log
    await world.append(3, 3)
    await world.step(3, 3)
    await world.stop(signal.SIGKILL)

    (world.directory / "checkpoints" / "policy" / "records.jsonl").unlink()
    for checkpoint in (world.directory / "checkpoints" / "policy").glob("step-[234]"):
        (checkpoint / "manifest.json").unlink(missing_ok=True)  # killed during a removal
    process = await world.spawn()
    assert await asyncio.wait_for(process.wait(), patient(60)) != 0
    log = (world.directory / "logs" / "policy_trainer.rank-rank0.log").read_text()
    assert "cannot be trained again" in log


@pytest.mark.slow
async def test_another_number_of_ranks_goes_on_from_a_checkpoint_bit_for_bit(world: World) -> None:
    await world.start(checkpoint_interval_steps=10)
    for step in range(2):
        await world.append(step, step)
        await world.step(step, step)
        await world.commit(step + 1)
    await world.stop()
    shards = (world.directory / "checkpoints" / "policy" / "step-2" / "shards").iterdir()
    assert len(list(shards)) == 2

    await world.start(ranks=1)
    assert ((await world.counts())["step"], len(world.rank_pids())) == (1, 1)
    again = await world.step(1, 1)
    assert again[-1].bytes == 0, "the weights of one rank differ from those two ranks pushed"
    await world.append(2, 2)
    assert (await world.step(2, 2))[1].world_size == 1


async def killed_and_started_with_two_ranks(world: World) -> None:
    """The checkpoint misses both steps; two ranks replay them to other bits than one rank."""
    await world.stop(signal.SIGKILL)
    await world.start(ranks=2, checkpoint_interval_steps=10)
    assert ((await world.counts())["step"], world.checkpoints()) == (1, [])
    assert len(world.rank_pids()) == 2


@pytest.mark.slow
async def test_a_step_replayed_to_other_bits_takes_the_place_of_what_does_not_serve_yet(
    world: World,
) -> None:
    await world.start(ranks=1, checkpoint_interval_steps=10)
    for step in range(2):
        await world.append(step, step)
        await world.step(step, step)
        if not step:
            await world.commit(1)
    before = world.weights(2)
    await killed_and_started_with_two_ranks(world)
    prepared = (await world.step(1, 1))[-1]
    assert (prepared.replaced, prepared.policy_version) == (True, 2)
    assert 0 < moved(world.weights(2), before) < 1e-5
    await world.commit(2)
    await world.append(2, 2)
    assert not (await world.step(2, 2))[-1].replaced


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["next", "again"])
async def test_a_trainer_that_replayed_to_other_bits_goes_on_from_what_serves(
    world: World, again: bool
) -> None:
    await world.start(ranks=1, checkpoint_interval_steps=10)
    for step in range(2):
        await world.append(step, step)
        await world.step(step, step)
        await world.commit(step + 1)
    served = world.weights(2)
    await killed_and_started_with_two_ranks(world)
    if again:
        assert (await world.step(1, 1))[-1].bytes == 0, "what serves was pushed again"
    await world.step(2, 2, sessions=0)  # changes no weight
    assert moved(world.weights(3), served) == 0.0


@pytest.mark.slow
async def test_a_killed_rank_costs_a_repeated_step_and_changes_no_bit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, world.news = news_pipe()
    monkeypatch.setenv(NEWS_VARIABLE, str(world.news))
    await world.start()
    assert world.process is not None
    await world.append(0, 0)
    await world.step(0, 0)
    await world.commit(1)
    call = asyncio.create_task(world.step(1, 1))
    before = world.rank_pids()
    importer = psutil.Process(before[0]).ppid()
    assert importer != world.process.pid
    os.kill(before[1], signal.SIGKILL)
    with pytest.raises(Unavailable):
        await call
    await world.append(1, 1)
    assert (await world.step(1, 1))[-1].policy_version == 2
    after = world.rank_pids()
    assert not set(before) & set(after)
    assert {psutil.Process(pid).ppid() for pid in after} == {importer}, "torch is imported again"
    async with aclosing(heard(reading)) as news, asyncio.timeout(patient(10)):
        told = (one async for one in news if one[0] != "turn")  # event loop turns, sent regularly
        kind, what = await anext(told)
        assert kind == "impaired"
        assert "rank 1 of policy_trainer.rank was killed by SIGKILL" in what
        assert (await anext(told))[0] == "recovered"
    await world.stop()

    killed = [world.weights(version) for version in (1, 2)]
    world.run, world.directory = f"{world.run}-undisturbed", world.directory / "undisturbed"
    await world.start()
    for step in range(2):
        await world.append(step, step)
        await world.step(step, step)
    undisturbed = [world.weights(version) for version in (1, 2)]
    for one, other in zip(killed, undisturbed, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)


async def test_a_drafter_trainer_that_is_away_costs_no_step_and_gets_the_next_head(
    world: World,
) -> None:
    port = free_port()
    await world.start(ranks=1, **{"addresses.drafter_trainer": f"127.0.0.1:{port}"})
    await world.append(0, 0)
    assert (await world.step(0, 0))[-1].policy_version == 1
    assert world.spools["drafter"].prepared == frozenset()
    server, _ = await receiver(world.spools["drafter"], WEIGHT_TARGET_POLICY_HEAD, port)
    try:
        await world.append(1, 1)
        assert (await world.step(1, 1))[-1].policy_version == 2
    finally:
        await server.stop(0)
    assert world.spools["drafter"].prepared == {(WEIGHT_TARGET_POLICY_HEAD, 2)}


async def test_old_epochs_wrong_versions_and_foreign_directories_are_refused(world: World) -> None:
    await world.start()
    await world.append(0, 0)
    with pytest.raises(WeightsError) as wrong:
        await world.step(0, 7, epoch=5)
    assert "p7" in str(wrong.value)
    with pytest.raises(StaleEpoch):
        await world.step(0, 0, epoch=4)
    assert len(await world.step(0, 0, epoch=5)) == 3
    await world.stop()
    refused = await world.spawn(resume="false")
    assert await asyncio.wait_for(refused.wait(), patient(20)) == 2


@pytest.mark.slow
async def test_a_step_whose_push_failed_is_pushed_when_called_again_and_not_trained_twice(
    world: World,
) -> None:
    port = free_port()
    await world.start(ranks=1, **{"addresses.gateway": f"127.0.0.1:{port}"})
    await world.append(0, 0)
    with pytest.raises(Unavailable):
        await world.step(0, 0)
    count = await Ledger(world.client, world.run).count()
    assert (count.trained, count.open) == (0, GROUPS * SIBLINGS)
    server, _ = await receiver(world.spools["gateway"], WEIGHT_TARGET_POLICY, port)
    try:
        again = await world.step(0, 0)
    finally:
        await server.stop(0)
    assert [type(news).__name__ for news in again] == [
        "BatchReady",
        "PolicyStepped",
        "PolicyPrepared",
    ]
    assert again[0].trajectories == GROUPS * SIBLINGS
    assert moved(world.weights(1), load_file(world.model / "model.safetensors")) < 1.1e-3, (
        "stepped twice"
    )
    assert (await world.counts())["trained"] == GROUPS * SIBLINGS
    count = await Ledger(world.client, world.run).count()
    assert (count.trained, count.open) == (GROUPS * SIBLINGS, 0)
