"""RolloutService over real worker processes: generation, tasks, rewards, restarts of workers,
arms.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections import Counter
from typing import Any

import grpc
import pytest
from counted import counted
from integration.gateway.conftest import Ends
from integration.gateway.http_agent import SLOW, until_running
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from paceline.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    PacelineError,
    ResourceExhausted,
)
from paceline.local.patience import patient
from paceline.rpc import error_from_rpc, rpc_errors
from paceline.services.rollout_gateway.bandits.kinds import TRIAL_PULLS
from paceline.services.rollout_gateway.workers.process import WorkerProcess
from paceline.trajectory import request_seed, tokens_hash
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub


async def generated(
    stub: RolloutServiceStub, request: rpb.GenerateRequest
) -> list[rpb.GenerateResponse]:
    return [piece async for piece in stub.Generate(request, timeout=patient(20))]


async def run_tasks(
    stub: RolloutServiceStub, request: rpb.RunTasksRequest
) -> list[rpb.RunTasksResponse]:
    return [news async for news in stub.RunTasks(request, timeout=patient(30))]


def samples(news: list[rpb.RunTasksResponse]) -> dict[tuple[str, int], rpb.SampleFinished]:
    found = [one.sample for one in news if one.HasField("sample")]
    assert len({(one.task_id, one.sample_index) for one in found}) == len(found)
    return {(one.task_id, one.sample_index): one for one in found}


async def test_generate_streams_the_scripted_tokens_and_text(serve_gateway: Any) -> None:
    async with serve_gateway() as served:
        request = rpb.GenerateRequest(
            text="2+2=",
            sampling=tpb.SamplingParams(temperature=1, max_tokens=64, seed=3),
            forced_arm="off",
        )
        pieces = await generated(served.stub, request)
        assert "".join(piece.text for piece in pieces) == "2+2=5 #5"
        ids = [token for piece in pieces for token in piece.chunk.token_ids]
        assert served.codec.decode(ids) == "2+2=5 #5"
        assert ids[-1] == 1
        assert pieces[-1].chunk.finish_reason == tpb.FINISH_REASON_STOP
        assert pieces[-1].prompt_tokens == 5


async def test_text_is_cut_before_a_stop_string_and_the_tokens_stay(serve_gateway: Any) -> None:
    async with serve_gateway() as served:
        sampling = tpb.SamplingParams(temperature=1, max_tokens=64, seed=3, stop=[" #"])
        pieces = await generated(served.stub, rpb.GenerateRequest(text="2+2=", sampling=sampling))
        assert "".join(piece.text for piece in pieces) == "2+2=5"
        ids = [token for piece in pieces for token in piece.chunk.token_ids]
        assert served.codec.decode(ids) == "2+2=5 #"


BAD_REQUESTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"text": "1"}, {"max_tokens": 0}, "max_tokens"),
    ({"text": "1"}, {"max_tokens": 4, "temperature": float("nan")}, "temperature"),
    ({"text": "1"}, {"max_tokens": 4, "top_p": 2}, "top_p"),
    ({"text": "1"}, {"max_tokens": 4, "presence_penalty": -2.5}, "presence_penalty"),
    ({"text": "1"}, {"max_tokens": 4, "frequency_penalty": float("nan")}, "frequency_penalty"),
    ({"text": "1"}, {"max_tokens": 4, "repetition_penalty": -1}, "repetition_penalty"),
    ({"text": "1"}, {"max_tokens": 4, "logit_bias": {9: 101}}, "logit_bias of token 9"),
    ({"text": "1"}, {"max_tokens": 4, "logit_bias": {320: 1}}, "logit_bias names a token"),
    (
        {"text": "1"},
        {"max_tokens": 4, "logit_bias": dict.fromkeys(range(301), 1.0)},
        "logit_bias has too many",
    ),
    ({"token_ids": rpb.TokenIds(ids=[99999])}, {"max_tokens": 4}, "token id out of range"),
    ({"token_ids": rpb.TokenIds(ids=[5] * 600)}, {"max_tokens": 4}, "does not fit"),
    ({}, {"max_tokens": 4}, "no prompt"),
]


async def test_bad_requests_name_what_is_wrong(serve_gateway: Any) -> None:
    async with serve_gateway() as served:
        for prompt, sampling, words in BAD_REQUESTS:
            with pytest.raises(grpc.aio.AioRpcError, match=words) as raised:
                await generated(
                    served.stub,
                    rpb.GenerateRequest(**prompt, sampling=tpb.SamplingParams(**sampling)),
                )
            assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_tasks_are_shared_evenly_and_scored(serve_gateway: Any) -> None:
    async with serve_gateway(engine={"workers": 2}) as served:
        news = await run_tasks(served.stub, served.tasks_request(purpose=tpb.PURPOSE_EVAL))
        found = samples(news)
        for (task, index), sample in found.items():
            right = task == "a" and request_seed(7, 0, "a", index) % 2 == 0
            assert sample.reward.value == float(right)
            text = {"a": "1+1=2 #2" if right else "1+1=3 #3", "b": "2+2=5 #5"}[task]
            assert sample.tokens_hash == tokens_hash([*served.codec.encode(text)[1:], 1])
            assert sample.worker_index == "ab".index(task)
        shares = [one.share for one in news if one.HasField("share")]
        assert sorted((share.worker_index, share.samples) for share in shares) == [(0, 2), (1, 2)]
        totals = news[-1].finished
        assert (totals.scored, totals.unscored) == (4, 0)
        assert totals.response_tokens == sum(sample.response_tokens for sample in found.values())
        assert sum(arm.pulls for arm in totals.arms) > 0


async def test_training_ends_with_the_scored_sessions_of_each_group_and_an_evaluation_with_none(
    serve_gateway: Any,
) -> None:
    async with serve_gateway() as served:
        trained = (await run_tasks(served.stub, served.tasks_request(samples_per_task=3)))[
            -1
        ].finished
        evaluated = (await run_tasks(served.stub, served.tasks_request(purpose=tpb.PURPOSE_EVAL)))[
            -1
        ].finished
    closed = [(group.group_id, group.scored_sessions) for group in trained.closed_groups]
    assert closed == [("g-a", 3), ("g-b", 3)]
    assert not evaluated.closed_groups


async def test_a_group_says_whether_its_rewards_are_equal(
    serve_gateway: Any,
) -> None:
    async with serve_gateway() as served:
        request = served.tasks_request(samples_per_task=8)
        news = await run_tasks(served.stub, request)
    rewards: dict[str, set[float]] = {}
    for one in (one.sample for one in news if one.HasField("sample")):
        rewards.setdefault(one.group_id, set()).add(one.reward.value)
    told = {one.group_id: one.equal_rewards for one in news[-1].finished.closed_groups}
    assert told == {group: len(found) < 2 for group, found in rewards.items()}
    assert set(told.values()) == {True, False}
    assert {
        one.closed.group_id: one.closed.equal_rewards for one in news if one.HasField("closed")
    } == told


async def test_a_group_is_told_of_as_it_closes_before_the_others_have_ended(
    serve_gateway: Any,
) -> None:
    async with serve_gateway() as served:
        news = await run_tasks(served.stub, served.tasks_request())
    closed = [
        (at, one.closed.group_id)
        for at, one in enumerate(news)
        if one.WhichOneof("event") == "closed"
    ]
    ends = [(at, one.sample.group_id) for at, one in enumerate(news) if one.HasField("sample")]
    assert sorted(group for _, group in closed) == ["g-a", "g-b"]
    for at, group in closed:
        assert max(end for end, ended in ends if ended == group) == at - 1
    assert closed[0][0] < ends[-1][0]
    assert {one.closed.scored_sessions for one in news if one.HasField("closed")} == {2}


async def test_calls_of_several_steps_run_at_once_and_each_speaks_of_its_own_alone(
    serve_gateway: Any, script: dict[str, Any], ends: Ends
) -> None:
    script |= SLOW
    async with serve_gateway(engine={"workers": 2}) as served:
        requests = [served.tasks_request(step=step, samples_per_task=2 + step) for step in (3, 4)]
        for request in requests:
            request.sampling.max_tokens = 150
            request.sampling.ignore_eos = True
            for task in request.tasks:
                task.group_id = f"s{request.context.step}.{task.task_id}"
        calls = asyncio.gather(*(run_tasks(served.stub, request) for request in requests))
        await until_running(served, 22)  # (5 + 6) samples of two tasks: all of both steps
        ends.come()
        told = await calls
    for request, news in zip(requests, told, strict=True):
        size, groups = request.samples_per_task, [task.group_id for task in request.tasks]
        assert len(samples(news)) == 2 * size
        assert {one.sample.group_id for one in news if one.HasField("sample")} == set(groups)
        assert {one.sample.session_id for one in news if one.HasField("sample")} == {
            f"{request.context.step}-{task}-{index}" for task in "ab" for index in range(size)
        }
        shares = [one.share for one in news if one.HasField("share")]
        assert sorted((one.worker_index, one.samples) for one in shares) == [(0, size), (1, size)]
        closed = [one.closed for one in news if one.WhichOneof("event") == "closed"]
        totals = news[-1].finished
        assert [group.group_id for group in totals.closed_groups] == groups
        assert sorted(closed, key=lambda one: one.group_id) == list(totals.closed_groups)
        assert totals.response_tokens == 2 * size * 150


async def test_runs_that_cannot_work_are_refused(serve_gateway: Any) -> None:
    changes: list[dict[str, Any]] = [
        {"environment": "casino"},
        {"reward": "luck"},
        {"samples_per_task": 0},
        {"purpose": tpb.PURPOSE_UNSPECIFIED},
    ]
    async with serve_gateway() as served:
        for change in changes:
            with (
                pytest.raises(
                    InvalidInput
                    if "purpose" in change or "samples_per_task" in change
                    else NotFound
                ) as raised,
                rpc_errors(),
            ):
                await run_tasks(served.stub, served.tasks_request(**change))
            assert raised.value.seen == str(next(iter(change.values())))


async def test_sampling_that_cannot_be_trained_is_refused_for_training(serve_gateway: Any) -> None:
    async with serve_gateway() as served:
        request = served.tasks_request()
        request.sampling.top_p = 0.9
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be trained"):
            await run_tasks(served.stub, request)
        request.purpose = tpb.PURPOSE_EVAL
        assert len(samples(await run_tasks(served.stub, request))) == 4


async def test_a_command_of_an_old_lease_is_refused(serve_gateway: Any) -> None:
    async with serve_gateway() as served:
        request = served.tasks_request(purpose=tpb.PURPOSE_EVAL)
        request.context.epoch = 5
        await run_tasks(served.stub, request)
        request.context.epoch = 4
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await run_tasks(served.stub, request)
        assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_a_killed_worker_is_replaced_and_its_requests_give_the_same_tokens(
    serve_gateway: Any, script: dict[str, Any], ends: Ends
) -> None:
    script |= {
        "real_time": True,
        "default_cost_s": 0.02,
        "costs_s": {},
        "arms": ["off"],
        "response_tokens": [60, 60],
    }
    async with serve_gateway(engine={"workers": 2}) as served:
        prompt = rpb.TokenIds(ids=[40, 41, 42])
        request = rpb.GenerateRequest(
            token_ids=prompt, sampling=tpb.SamplingParams(temperature=1, max_tokens=64, seed=5)
        )
        ends.come()
        whole = [
            token
            for piece in await generated(served.stub, request)
            for token in piece.chunk.token_ids
        ]
        ends.wait()

        status = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
        pids = [worker.pid for worker in status.workers]
        tokens: list[int] = []
        async for piece in served.stub.Generate(request, timeout=patient(30)):
            if not tokens:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                ends.come()
            tokens += piece.chunk.token_ids
            if piece.chunk.finish_reason:
                assert piece.chunk.finish_reason == tpb.FINISH_REASON_STOP
        assert tokens == whole
        status = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
        assert not {worker.pid for worker in status.workers if worker.ready} & set(pids)


async def test_an_engine_fault_ends_its_requests_with_the_message_and_the_worker_serves_on(
    serve_gateway: Any, script: dict[str, Any]
) -> None:
    script["fault_token"] = 99
    async with serve_gateway() as served:
        sampling = tpb.SamplingParams(temperature=1, max_tokens=4, seed=1)
        bad = await generated(
            served.stub, rpb.GenerateRequest(token_ids=rpb.TokenIds(ids=[99]), sampling=sampling)
        )
        assert bad[-1].chunk.finish_reason == tpb.FINISH_REASON_ERROR
        assert "asks for a fault" in bad[-1].chunk.error
        good = await generated(served.stub, rpb.GenerateRequest(text="2+2=", sampling=sampling))
        assert good[-1].chunk.finish_reason == tpb.FINISH_REASON_LENGTH


async def test_cancelling_a_call_frees_the_engine(
    serve_gateway: Any, script: dict[str, Any]
) -> None:
    script |= {"real_time": True, "default_cost_s": 0.01, "costs_s": {}, "arms": ["off"]}
    async with serve_gateway() as served:
        sampling = tpb.SamplingParams(temperature=1, max_tokens=400, seed=1, ignore_eos=True)
        call = served.stub.Generate(
            rpb.GenerateRequest(text="2+2=", sampling=sampling), timeout=patient(20)
        )
        await call.read()
        assert await running(served.stub) == 1
        call.cancel()
        async with asyncio.timeout(patient(5)):
            while await running(served.stub):
                pass


async def running(stub: RolloutServiceStub) -> int:
    status = await stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
    return int(sum(worker.health.running for worker in status.workers))


async def test_a_forced_arm_is_the_only_one_pulled(serve_gateway: Any) -> None:
    async with serve_gateway() as served:
        request = served.tasks_request(purpose=tpb.PURPOSE_EVAL, forced_arm="ngram:4_1_5")
        news = await run_tasks(served.stub, request)
        assert {arm.arm for arm in news[-1].finished.arms if arm.pulls} == {"ngram:4_1_5"}


async def test_an_arm_measured_at_one_gateway_is_known_at_another(
    serve_gateway: Any, script: dict[str, Any]
) -> None:
    fast, slow = "eagle:3_1_4", "ngram:4_1_5"
    script |= {"arms": ["off", fast, slow], "accept_lengths": {fast: 3.5, slow: 1.2}}
    calm = {"speculation": {"bandit": {"epsilon": 0.0}}}
    async with serve_gateway(**calm) as first, serve_gateway(**calm) as second:
        for arm in ("off", fast, slow) * TRIAL_PULLS:
            forced = first.tasks_request(purpose=tpb.PURPOSE_EVAL, forced_arm=arm)
            measured = (await run_tasks(first.stub, forced))[-1].finished.arms
        request = second.tasks_request(arms=measured)
        used = (await run_tasks(second.stub, request))[-1].finished.arms
    tried = Counter(one.batch_group for one in measured if one.pulls >= TRIAL_PULLS)
    known = {group for group, arms in tried.items() if arms == 3}
    assert {one.arm for one in used if one.batch_group in known} == {fast}


async def test_tasks_run_on_a_worker_that_does_not_learn_arms_in_time(
    serve_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, asked = WorkerProcess.ask, list[str]()

    async def late(process: WorkerProcess, command: pb.WorkerCommand, *options: float) -> Any:
        asked.append(command.WhichOneof("command") or "")
        answer = await ask(process, command, *options)
        if command.HasField("learn_arms"):
            raise DeadlineExceeded("the answer is late")
        return answer

    async with serve_gateway() as served:
        monkeypatch.setattr(WorkerProcess, "ask", late)
        request = served.tasks_request(arms=[pb.ArmStats(arm="off", batch_group=1, pulls=9)])
        finished = (await run_tasks(served.stub, request))[-1].finished
    assert "learn_arms" in asked
    assert finished.scored == 4


async def test_too_many_requests_are_refused(serve_gateway: Any, script: dict[str, Any]) -> None:
    script |= {"real_time": True, "default_cost_s": 0.01, "costs_s": {}, "arms": ["off"]}
    async with serve_gateway(queue={"running": 1, "limit": 1}) as served:
        sampling = tpb.SamplingParams(temperature=1, max_tokens=400, seed=1, ignore_eos=True)
        request = rpb.GenerateRequest(text="2+2=", sampling=sampling)
        first = served.stub.Generate(request, timeout=patient(20))
        await first.read()
        others = [
            asyncio.ensure_future(generated(served.stub, request)) for _ in range(2)
        ]  # one waits, one is refused
        done, waiting = await asyncio.wait(
            others, timeout=patient(10), return_when=asyncio.FIRST_COMPLETED
        )
        error = done.pop().exception()
        assert isinstance(error, grpc.aio.AioRpcError)
        refused = error_from_rpc(error)
        assert isinstance(refused, ResourceExhausted)
        assert refused.retry_after_s is not None
        assert refused.retry_after_s >= 1
        first.cancel()
        assert await waiting.pop()  # it takes the place of the cancelled call


async def test_a_worker_that_cannot_be_built_says_why(serve_gateway: Any) -> None:
    with pytest.raises(PacelineError, match="no such bandit"):
        async with serve_gateway(speculation={"bandit": {"kind": "coin"}}):
            pass


async def test_a_taken_port_is_refused(serve_gateway: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for addresses in (
            {"gateway": address, "http": "127.0.0.1:0"},
            {"gateway": "127.0.0.1:0", "http": address},
        ):
            with pytest.raises(ConfigError, match="in use"):
                async with serve_gateway(addresses=addresses):
                    pass


async def test_a_sample_whose_log_prob_is_nan_fails_for_its_data_and_the_others_are_scored(
    serve_gateway: Any, script: dict[str, Any], metric_reader: InMemoryMetricReader
) -> None:
    three = script["script"][0]["responses"][1][4]  # of "1+1=3 #3" alone
    script["nan_token"] = three
    async with serve_gateway() as served:
        found = samples(await run_tasks(served.stub, served.tasks_request(samples_per_task=8)))
        refused = [key for key, one in found.items() if not one.HasField("reward")]
        assert 1 <= len(refused) < 8
        assert {key[0] for key in refused} == {"a"}
        answers = [
            await served.http.post(
                "/v1/completions",
                json={"model": "tiny-model", "prompt": "1+1=", "seed": seed, "max_tokens": 64},
            )
            for seed in range(2)
        ]
        assert sorted(answer.status_code for answer in answers) == [200, 500]
        assert any("no finite number" in answer.text for answer in answers)
    assert counted(metric_reader, "paceline.gateway.not_finite") == len(refused) + 1
