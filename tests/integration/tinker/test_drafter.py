"""A drafter that learns from the samples of a loop by the SDK, in the loop's own pauses."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.tinker import data
from integration.tinker.conftest import ONE_WORKER

from benchmarks.processes import running
from benchmarks.tinker_loop import MODEL, Loop, LoopStep, TinkerServer, session, started, stopped
from paceline.config import SecurityConfig
from paceline.rpc import channel
from paceline.v1.rollout_pb2 import GetStatusRequest, GetStatusResponse
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LOOP = Loop(steps=12, prompts=6, samples=4, max_tokens=120)
ARM = "eagle:3_1_4"
SETTINGS = {
    **ONE_WORKER,
    "gateway.engine.max_batch": 32,
    "gateway.engine.dtype": "float32",
}
TOKEN = "PACELINE_TINKER_TEST_TOKEN"
QUICK = {
    "gateway.drafter": "eagle",
    "gateway.speculation.arms": f'["off","{ARM}"]',
    "drafter_trainer.micro_batches_per_step": 1,
    "drafter_trainer.max_micro_batch_tokens": 256,
    "drafter_trainer.optimizer.lr": 2.5e-3,
    "drafter_trainer.optimizer.warmup_steps": 0,
    "drafter_trainer.gate.interval_steps": 20,
    "drafter_trainer.buffer.judged_every": 2,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[LoopStep], Any]:
    """The loop's steps and greedy samples at a service without drafts."""
    off = {"gateway.drafter": "off", "gateway.speculation.arms": '["off"]'}
    served = started(tmp_path_factory.mktemp("plain") / "run", **SETTINGS, **off)
    try:
        with session(served) as client:
            return list(LOOP.run(client)), greedy(client)
    finally:
        stopped(served)


@pytest.fixture
def drafted(tmp_path: Path) -> Iterator[TinkerServer]:
    """A service with a drafter that is untrained at its start."""
    served = started(tmp_path / "run", **SETTINGS, **QUICK)
    try:
        yield served
    finally:
        stopped(served)


def greedy(client: Any) -> list[Any]:
    """Samples of the start policy at temperature 0."""
    import tinker

    sampling = client.create_sampling_client(base_model=str(MODEL)).result()
    params = tinker.SamplingParams(max_tokens=80, temperature=0.0)
    prompts = [data.tokenizer().encode(f"{n}:{n + 55}=") for n in (123, 456, 789)]
    going = [sampling.sample(tinker.ModelInput.from_ints(one), 1, params) for one in prompts]
    return [one.result().sequences[0] for one in going]


def status(served: TinkerServer) -> GetStatusResponse:
    """State of the gateway and its worker."""

    os.environ[TOKEN] = served.key.removeprefix("tml-")

    async def ask() -> GetStatusResponse:
        security = SecurityConfig(token_env=TOKEN)
        async with channel(served.addresses["gateway"], security) as gateway:
            stub: Any = RolloutServiceStub(gateway)  # type: ignore[no-untyped-call]
            answer: GetStatusResponse = await stub.GetStatus(GetStatusRequest(), timeout=30)
            return answer

    return asyncio.run(ask())


def test_a_drafter_of_the_loop_s_own_samples_serves_and_changes_no_token(
    drafted: TinkerServer, plain: tuple[list[LoopStep], Any]
) -> None:
    rounds, made = [(0, 0, 0)], []
    with session(drafted) as client:
        for step in LOOP.run(client):
            made.append(step.tokens)
            now = status(drafted)
            stats = now.workers[0].health.speculation
            counts = stats.arm_drafted_rounds[ARM], stats.arm_round_tokens[ARM]
            rounds.append((now.versions.drafter, *counts))
        own = greedy(client)
    assert made == [one.tokens for one in plain[0]]
    assert [one.tokens for one in own] == [one.tokens for one in plain[1]]
    for one, other in zip(own, plain[1], strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    committed = [version for version, _, _ in rounds]
    assert committed[1] == 0, "the first samples are drawn with an untrained drafter"
    assert committed[-1] > 0, rounds
    _, drafted_rounds, tokens = rounds[committed.count(0) - 1]  # with the untrained drafter
    late, end = rounds[-4], rounds[-1]
    last = (end[2] - late[2]) / (end[1] - late[1])
    accepted, first = last - 1, tokens / drafted_rounds - 1  # drafts of a round
    assert accepted > 1.2 * first, rounds


def test_a_killed_drafter_trainer_costs_no_sample_and_comes_back(
    drafted: TinkerServer, plain: tuple[list[LoopStep], Any]
) -> None:
    made, killed = [], 0
    with session(drafted) as client:
        for step in LOOP.run(client):
            made.append(step.tokens)
            serving = status(drafted).versions.drafter
            if serving and not killed:
                trainer = running("paceline.services.drafter_trainer", drafted.process.pid)[0]
                os.kill(trainer.pid, signal.SIGKILL)
                killed = serving
        assert killed, "no drafter was committed"
        assert made == [one.tokens for one in plain[0]]
        for _ in Loop(steps=30, prompts=6, samples=4, max_tokens=120).run(client):
            if status(drafted).versions.drafter > killed:
                break
    assert status(drafted).versions.drafter > killed, "the restarted trainer goes on"
