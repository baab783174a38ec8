"""Workers join a gateway that serves, and leave it: an added one has the committed set, and what a
drained one runs ends or goes on elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from integration.gateway.commands import (
    add,
    commit,
    drain,
    push,
    release,
    resume,
    worker_versions,
    workers,
)
from integration.gateway.conftest import Ends
from integration.gateway.http_agent import SLOW, until_running
from integration.gateway.test_open_traffic import redis_keys, stream_of
from integration.gateway.test_partial_rollouts import (
    SAMPLES,
    TOKENS,
    finished,
    hashes,
    rollout,
    until_tokens,
)

from paceline.errors import ConfigError, FailedPrecondition, InvalidInput, StaleEpoch, Unavailable
from paceline.local.patience import patient
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.services.rollout_gateway.workers.process import WorkerProcess
from paceline.services.rollout_gateway.workers.quarantine import Quarantined
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb

POLICY = Path(__file__).parents[3] / "examples" / "demo" / "policy_start"
ELASTIC = {"workers": 1, "most_workers": 2}


def shares(news: list[rpb.RunTasksResponse]) -> dict[int, int]:
    """Samples by worker, of those that have told of the end of their share."""
    ended = [one.share for one in news if one.HasField("share")]
    return {share.worker_index: share.samples for share in ended}


def sessions(news: list[rpb.RunTasksResponse]) -> list[str]:
    return sorted(one.sample.session_id for one in news if one.HasField("sample"))


async def vacant(served: Any) -> list[bool]:
    return [worker.vacant for worker in await workers(served)]


async def test_an_added_worker_has_the_committed_set_and_a_share_of_the_next_tasks(
    serve_gateway: Any,
) -> None:
    async with serve_gateway(engine=ELASTIC) as served:
        await push(served, pb.WEIGHT_TARGET_POLICY, 1)
        await commit(served, VersionSet(1, 1, 0))
        assert await vacant(served) == [False, True]
        assert shares(await finished(served, served.tasks_request())) == {0: SAMPLES}
        await add(served, 2, 0, 1)
        await add(served, 2, 1)  # again
        assert await vacant(served) == [False, False]
        assert await worker_versions(served) == [(1, 0), (1, 0)]
        assert shares(await finished(served, served.tasks_request(step=1))) == {0: 2, 1: 2}
        alone = served.tasks_request(step=2, workers=[1])
        assert shares(await finished(served, alone)) == {1: SAMPLES}


async def test_a_drained_worker_hands_over_what_it_runs_and_no_sample_is_lost_or_told_twice(
    serve_gateway: Any,
    script: dict[str, Any],
    redis_url: str,
    redis_client: redis.asyncio.Redis,
    run_id: str,
    ends: Ends,
) -> None:
    script |= SLOW
    keys = redis_keys(redis_url, run_id)
    # a request of an agent would be refused after wait_s; the samples of a step are not
    async with serve_gateway(engine={"workers": 2}, queue={"wait_s": 0.05}, **keys) as served:
        run = asyncio.create_task(finished(served, rollout(served)))
        await until_tokens(served, run, 5 * SAMPLES)
        await drain(served, 1, 1, drain_s=0.0)
        assert await vacant(served) == [False, True]
        again = asyncio.create_task(finished(served, rollout(served)))  # as a coordinator asks
        await until_running(served, SAMPLES)
        ends.come()
        first, second = await run, await again
        found = await stream_of(redis_client, run_id, SAMPLES)
    assert sessions(first) == sessions(second) == sorted({one.key.session_id for one in found})
    assert (shares(first).keys(), shares(second)) == ({0, 1}, {0: SAMPLES})
    assert all(len(one.behavior_logprobs) == len(one.token_ids) for one in found)
    assert all(one.version_spans[-1].end == len(one.token_ids) for one in found)


async def test_what_a_drained_worker_runs_may_end_there_in_the_time_that_it_is_given(
    serve_gateway: Any, script: dict[str, Any], ends: Ends
) -> None:
    script |= SLOW
    async with serve_gateway(engine={"workers": 2}) as served:
        run = asyncio.create_task(finished(served, rollout(served, tokens=40)))
        await until_running(served, SAMPLES)
        leaving = asyncio.create_task(drain(served, 1, 1, drain_s=600.0))
        ends.come()
        await leaving
        news = await run
    assert {one.sample.worker_index for one in news if one.HasField("sample")} == {0, 1}
    assert len(set(sessions(news))) == SAMPLES


async def test_the_embedded_engine_draws_the_same_tokens_while_workers_come_and_go(
    serve_gateway: Any, redis_url: str, redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    keys = redis_keys(redis_url, run_id)
    engine = {"kind": "embedded", "workers": 1, "most_workers": 2, "max_sequence_tokens": 256}
    async with serve_gateway(model=str(POLICY), engine=engine, **keys) as served:
        undisturbed = rollout(served)
        undisturbed.purpose = tpb.PURPOSE_EVAL
        expected = hashes(await finished(served, undisturbed))
        await add(served, 1, 1)
        alone = rollout(served)
        alone.workers.append(0)
        run = asyncio.create_task(finished(served, alone))
        await until_tokens(served, run, SAMPLES * TOKENS + 5 * SAMPLES)
        await drain(served, 1, 0, drain_s=0.0)
        again = hashes(await run)
        found = await stream_of(redis_client, run_id, SAMPLES)
    assert again.keys() == expected.keys()
    for key, (tokens, gap) in again.items():
        assert tokens == expected[key][0] or min(gap, expected[key][1]) < 1e-4
    assert len({one.key.session_id for one in found}) == SAMPLES


async def test_requests_that_wait_are_taken_by_a_worker_that_is_added(serve_gateway: Any) -> None:
    async with serve_gateway(engine=ELASTIC) as served:
        await release(served, 1, 0)
        run = asyncio.create_task(finished(served, served.tasks_request(workers=[0])))
        await add(served, 1, 1)
        await drain(served, 1, 0)  # whose samples they were
        assert len(sessions(await run)) == SAMPLES
        assert await resume(served, 2) == ([0], 0)  # a lease of a worker that is gone ends too
        await add(served, 2, 0)
        assert shares(await finished(served, served.tasks_request(step=1))) == {0: 2, 1: 2}


async def test_a_worker_added_on_lent_slots_takes_its_requests_when_they_are_back(
    serve_gateway: Any,
) -> None:
    async with serve_gateway(engine=ELASTIC) as served:
        await release(served, 1, 0, 1)
        await add(served, 1, 1)
        run = asyncio.create_task(finished(served, served.tasks_request()))
        await until_waiting(served)
        assert await resume(served, 2) == ([0, 1], 0)
        assert shares(await run) == {0: 2, 1: 2}


async def until_waiting(served: Any) -> None:
    """Waits until somebody hears that requests wait for lent workers."""
    news = served.stub.WatchTraffic(rpb.WatchTrafficRequest(), timeout=60)
    assert (await anext(aiter(news))).requests >= 1
    news.cancel()


async def test_workers_that_came_or_went_are_as_they_were_when_the_gateway_starts_again(
    serve_gateway: Any,
) -> None:
    engine = {"workers": 2, "most_workers": 3}
    async with serve_gateway(engine=engine) as served:
        await add(served, 1, 2)
        await drain(served, 1, 0)
    async with serve_gateway(engine=engine) as served:
        assert await vacant(served) == [True, False, False]


async def test_a_worker_that_dies_while_it_is_drained_is_not_replaced(
    serve_gateway: Any, script: dict[str, Any], ends: Ends
) -> None:
    script |= SLOW
    async with serve_gateway(engine={"workers": 2}) as served:
        run = asyncio.create_task(finished(served, rollout(served)))
        await until_tokens(served, run, 5 * SAMPLES)
        pid = (await workers(served))[1].pid
        leaving = asyncio.create_task(drain(served, 1, 1, drain_s=600.0))
        while not (await vacant(served))[1]:
            assert not leaving.done()
        os.kill(pid, signal.SIGKILL)
        await leaving
        ends.come()
        assert len(set(sessions(await run))) == SAMPLES
        assert [worker.pid != 0 for worker in await workers(served)] == [True, False]


async def test_a_worker_that_answers_nothing_is_ended_and_what_it_ran_goes_on_elsewhere(
    serve_gateway: Any, script: dict[str, Any], ends: Ends
) -> None:
    script |= SLOW
    engine = {"workers": 2, "command_deadline_s": patient(3)}
    async with serve_gateway(engine=engine, run={"heartbeat_s": 600}) as served:
        run = asyncio.create_task(finished(served, rollout(served)))
        await until_tokens(served, run, 5 * SAMPLES)
        os.kill((await workers(served))[1].pid, signal.SIGSTOP)
        await drain(served, 1, 1, drain_s=0.0)
        ends.come()
        assert len(set(sessions(await run))) == SAMPLES


async def test_what_cannot_be_is_refused_with_what_may_be(serve_gateway: Any) -> None:
    async with serve_gateway(engine=ELASTIC) as served:
        with pytest.raises(InvalidInput, match=r"no such place .*seen: 2; allowed: 0\.\.1"):
            await add(served, 1, 1, 2)
        with pytest.raises(InvalidInput, match="seen: 7"):
            await drain(served, 1, 7)
        with pytest.raises(FailedPrecondition, match="keeps an engine worker"):
            await drain(served, 1, 0)
        with pytest.raises(InvalidInput, match="drain_s"):
            await drain(served, 1, 0, drain_s=-1.0)
        await add(served, 3, 1)
        with pytest.raises(StaleEpoch):
            await add(served, 2, 1)


async def test_an_added_worker_that_does_not_start_leaves_its_place_vacant(
    serve_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve_gateway(engine=ELASTIC) as served:
        with monkeypatch.context() as patched:
            patched.setattr(WorkerProcess, "_become_ready", ended_at_once)
            (why,) = (await add(served, 1, 0, 1)).values()
        assert "worker 1 does not start; seen: it ended before" in why
        assert await vacant(served) == [False, True]
        assert await add(served, 1, 1) == {}
        assert await vacant(served) == [False, False]


async def ended_at_once(process: WorkerProcess, deadline_s: float) -> None:
    raise Unavailable("it ended before it was ready")


async def test_a_set_that_is_committed_while_a_worker_starts_is_the_one_it_serves(
    serve_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve_gateway(engine=ELASTIC) as served:
        await push(served, pb.WEIGHT_TARGET_POLICY, 1)
        right = Quarantined.tell

        async def commits_meanwhile(quarantined: Quarantined, process: WorkerProcess) -> None:
            await right(quarantined, process)
            await commit(served, VersionSet(1, 1, 0))

        monkeypatch.setattr(Quarantined, "tell", commits_meanwhile)
        await add(served, 1, 1)
        assert await worker_versions(served) == [(1, 0), (1, 0)]


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"engine": {"workers": 2, "most_workers": 1}}, "0, or at least 2"),
        ({"engine": {"workers": 2, "most_workers": 3}, "replicas": 2}, "0 or 2"),
    ],
)
def test_places_that_contradict_other_settings_are_refused(
    model_dir: Path, settings: dict[str, Any], allowed: str
) -> None:
    config = GatewayConfig.model_validate({"model": str(model_dir), **settings})
    with pytest.raises(ConfigError, match=f"most_workers.*{allowed}"):
        Gateway(config)
