"""External agents claim tasks of a run: offers, faults, rewards, and the results for the step."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis.asyncio
from integration.gateway.conftest import Ends
from integration.gateway.http_agent import (
    SLOW,
    Agent,
    claimed,
    message_of,
    task_run,
    until_open,
    until_running,
    user,
)
from watched_stream import WatchedStream, ledger_record

from paceline.local.patience import patient
from paceline.rpc.progress import ask_progress
from paceline.streams import Ledger, decode_trajectory, run_key
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.v1.progress_pb2 import Part

ONE = {"engine": {"workers": 1}}
EXTERNAL = {"environment": "external", "reward": "agent"}
CLAIM = {"claim": True, "wait_s": 20}


def one_task(served: Any, *, samples: int = 1, **options: Any) -> rpb.RunTasksRequest:
    """The first of the two tasks."""
    request = served.tasks_request(**{**EXTERNAL, "samples_per_task": samples, **options})
    del request.tasks[1:]
    return request


def samples_of(told: list[Any]) -> list[rpb.SampleFinished]:
    return [event.sample for event in told if event.HasField("sample")]


def redis_keys(url: str, run_id: str) -> dict[str, Any]:
    return {"trajectories": True, "redis": {"durable_url": url}, "run": {"id": run_id}}


async def claim(served: Any, **body: Any) -> Agent:
    agent = await claimed(served, **body)
    assert agent is not None
    return agent


async def solve(agent: Agent, reward: float | None = 1.0) -> dict[str, Any]:
    await agent.chat([user(agent.session["task"]["prompt"])])
    return await agent.act("complete", {} if reward is None else {"reward": reward})


@pytest.mark.few(2)
@pytest.mark.parametrize("task_id", ["HumanEval/0", "50% off", "a?b#c", "é 😀", "tab\there"])
async def test_a_task_with_an_odd_id_is_led_by_its_agent(serve_gateway: Any, task_id: str) -> None:
    async with serve_gateway(**ONE) as served:
        request = one_task(served)
        request.tasks[0].task_id = task_id
        async with task_run(served, request) as told:
            agent = await claim(served)
            path = f"/v1/sessions/{quote(agent.id, safe='')}"
            found = await served.http.get(path, headers=agent.headers)
            assert (found.status_code, found.json()["id"]) == (200, agent.id)
            assert (await solve(agent))["state"] == "final"
    (sample,) = samples_of(told)
    assert (sample.task_id, sample.reward.value) == (task_id, 1.0)


async def test_every_sample_is_claimed_once_and_rewarded_by_the_agent(
    serve_gateway: Any,
) -> None:
    async with (
        serve_gateway(**ONE) as served,
        task_run(served, served.tasks_request(**EXTERNAL, step=3)) as told,
    ):
        agents = [await claim(served) for _ in range(4)]
        assert all("answer" not in agent.session["task"] for agent in agents)
        assert await claimed(served, wait_s=0) is None
        assert sorted(agent.session["task"]["prompt"] for agent in agents) == [
            "1+1=",
            "1+1=",
            "2+2=",
            "2+2=",
        ]
        assert {agent.session["group_id"] for agent in agents} == {"g-a", "g-b"}
        for number, agent in enumerate(agents):
            assert (await solve(agent, float(number)))["state"] == "final"
    found = {sample.session_id: sample for sample in samples_of(told)}
    assert {agent.id: found[agent.id].reward.value for agent in agents} == {
        agent.id: float(number) for number, agent in enumerate(agents)
    }
    assert {sample.reward.source for sample in found.values()} == {"agent"}
    assert sorted((sample.task_id, sample.sample_index) for sample in found.values()) == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("b", 1),
    ]
    closed = {group.group_id: group.scored_sessions for group in told[-1].finished.closed_groups}
    assert (told[-1].finished.scored, closed) == (4, {"g-a": 2, "g-b": 2})


async def test_a_rule_scores_where_the_agent_gives_no_reward(serve_gateway: Any) -> None:
    async with (
        serve_gateway(**ONE) as served,
        task_run(served, one_task(served, samples=3, reward="math_answer")) as told,
    ):
        answers = {}
        for _ in range(3):
            agent = await claim(served)
            answer = await agent.chat([user("1+1=")])
            text = message_of(answer)["content"]
            if len(answers) == 2:
                text = "its own"
                await agent.reward(7.0, completion_id=answer["id"])
            ended, again = await asyncio.gather(agent.act("complete"), agent.act("complete"))
            assert ended["state"] == again["state"] == "final"
            answers[agent.id] = text
    expected = {"1+1=2 #2": 1.0, "1+1=3 #3": 0.0, "its own": 7.0}
    assert {s.session_id: s.reward.value for s in samples_of(told)} == {
        session: expected[text] for session, text in answers.items()
    }


SLOW_RULE = '''
import asyncio
from pathlib import Path

class Rule:
    """Scores when a file says so."""

    async def score(self, episode):
        while not Path("{gate}").exists():
            await asyncio.sleep(0.01)
        return 0.5
'''


async def test_a_repeated_complete_waits_for_the_rule_and_ends_as_the_first(
    serve_gateway: Any, tmp_path: Path
) -> None:
    gate, rule = tmp_path / "gate", tmp_path / "rule.py"
    rule.write_text(SLOW_RULE.format(gate=gate))
    async with (
        serve_gateway(**ONE, rewards={"own": {"slow": f"{rule}:Rule"}}) as served,
        task_run(served, one_task(served, reward="slow")) as told,
    ):
        agent = await claim(served)
        await agent.chat([user("1+1=")])
        first = asyncio.create_task(agent.act("complete"))
        await served.http.get("/health")
        second = asyncio.create_task(agent.act("complete"))
        assert (await served.http.get("/health")).status_code == 200
        assert (await agent.show())["state"] == "open"
        gate.touch()
        assert [(await one)["state"] for one in (first, second)] == ["final", "final"]
    assert [sample.reward.value for sample in samples_of(told)] == [0.5]


@pytest.mark.parametrize(("reason", "attempts"), [("infra", 4), ("data", 2)])
async def test_a_failed_attempt_is_offered_again_so_often_and_then_unscored(
    serve_gateway: Any, reason: str, attempts: int
) -> None:
    async with serve_gateway(**ONE) as served, task_run(served, one_task(served)) as told:
        keys = []
        for _ in range(attempts):
            agent = await claim(served)
            await agent.chat([user("1+1=")])
            await agent.act("fail", {"reason": reason})
            assert (
                f"failed: {reason}"
                in (await agent.chat([user("x")], status=409))["error"]["message"]
            )
            keys.append(agent.session["api_key"])
        assert len(set(keys)) == attempts
        assert await claimed(served, wait_s=0) is None
    (sample,) = samples_of(told)
    assert not sample.HasField("reward")
    assert [(g.group_id, g.scored_sessions) for g in told[-1].finished.closed_groups] == [
        ("g-a", 0)
    ]


async def test_the_key_of_a_failed_attempt_does_not_open_the_next_one(serve_gateway: Any) -> None:
    async with serve_gateway(**ONE) as served, task_run(served, one_task(served)) as told:
        first = await claim(served)
        await first.act("fail", {"reason": "infra"})
        second = await claim(served)
        assert second.id == first.id
        for call in (
            first.chat([user("1+1=")], status=409),
            first.act("reward", {"value": -1.0}, status=409),
        ):
            assert "failed: infra" in (await call)["error"]["message"]
        named = await served.http.get(f"/v1/sessions/{second.id}", headers=first.headers)
        assert named.status_code == 409
        await solve(second)
    assert [sample.reward.value for sample in samples_of(told)] == [1.0]


async def test_an_aborted_session_is_not_offered_again(serve_gateway: Any) -> None:
    async with serve_gateway(**ONE) as served, task_run(served, one_task(served)) as told:
        agent = await claim(served)
        await agent.chat([user("1+1=")])
        await agent.act("abort")
    assert [sample.HasField("reward") for sample in samples_of(told)] == [False]


async def test_a_session_completed_without_a_word_is_unscored(serve_gateway: Any) -> None:
    async with (
        serve_gateway(**ONE) as served,
        task_run(served, one_task(served, samples=2, reward="math_answer")) as told,
    ):
        for _ in range(2):
            agent = await claim(served)
            for _ in range(2):
                assert (await agent.act("complete"))["state"] == "unscored"
    assert [sample.HasField("reward") for sample in samples_of(told)] == [False, False]


async def test_a_silent_claimed_session_is_offered_again(serve_gateway: Any) -> None:
    async with serve_gateway(**ONE) as served, task_run(served, one_task(served)) as told:
        silent = await claim(served, timeout_s=0.2)
        agent = await claim(served, wait_s=10)
        assert "failed: infra" in (await silent.chat([user("x")], status=409))["error"]["message"]
        await solve(agent)
    assert [sample.reward.value for sample in samples_of(told)] == [1.0]


async def test_a_claimer_that_goes_away_takes_no_task(serve_gateway: Any) -> None:
    async with serve_gateway(**ONE) as served:
        waiting = asyncio.create_task(
            served.http.post("/v1/sessions", json={"claim": True, "wait_s": 30})
        )
        await served.http.get("/health")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await served.http.get("/health")
        async with task_run(served, one_task(served)) as told:
            await solve(await claim(served))
        assert len(samples_of(told)) == 1


async def test_the_next_caller_joins_the_claimed_sessions_of_one_that_left(
    serve_gateway: Any, script: dict[str, Any], ends: Ends
) -> None:
    script |= SLOW
    async with serve_gateway(**ONE) as served:
        request = one_task(served, samples=2)
        call = served.stub.RunTasks(request, timeout=patient(30))
        agent, other = await claim(served), await claim(served)
        working = asyncio.create_task(agent.chat([user("1+1=")], max_tokens=60, ignore_eos=True))
        await until_running(served, 1)
        call.cancel()
        ends.come()
        await working
        await solve(other, 0.5)
        async with task_run(served, request) as told:
            await agent.act("complete", {"reward": 0.25})
        async with task_run(served, request) as again:
            pass
        for heard in (told, again):
            assert sorted(sample.reward.value for sample in samples_of(heard)) == [0.25, 0.5]
        assert await claimed(served, wait_s=0) is None


async def test_the_gateway_says_whom_its_work_waits_for(
    serve_gateway: Any, script: dict[str, Any], ends: Ends
) -> None:
    async def asked() -> tuple[Part, Part]:
        gateway, worker = (await ask_progress(served.channel, patient(5))).parts
        return gateway, worker

    script |= SLOW
    async with serve_gateway(**ONE) as served:
        assert [(part.doing, part.waits_for) for part in await asked()] == [("", ""), ("", "")]
        async with task_run(served, one_task(served, samples=2, step=3)):
            agent = await claim(served)
            gateway, worker = await asked()
            assert (gateway.doing, gateway.waits_for) == ("runs the tasks of step 3", "agents")
            counts = ("samples_left", "offers", "open_sessions")
            assert [gateway.counts[name] for name in counts] == [2, 1, 1]
            work = asyncio.create_task(agent.chat([user("1+1=")], max_tokens=60, ignore_eos=True))
            await until_running(served, 1)
            gateway, worker = await asked()
            assert (gateway.waits_for, gateway.counts["requests_running"]) == ("worker 0", 1)
            assert (worker.name, worker.doing, worker.counts["requests"]) == (
                "worker 0",
                "decodes",
                1,
            )
            assert gateway.still_s <= worker.still_s < gateway.doing_s
            ends.come()
            await work
            await agent.act("complete", {"reward": 1.0})
            await solve(await claim(served))


async def appended(client: redis.asyncio.Redis, run_id: str, count: int) -> list[Any]:
    """Waits for the first `count` trajectories of the stream."""
    stream = WatchedStream(client, run_key(run_id, "trajectories"))
    await stream.create_group("test")
    entries: list[Any] = []
    async with asyncio.timeout(patient(10)):
        while len(entries) < count:
            entries += await stream.read("test", "c", count, 1.0)
    return [decode_trajectory(entry.fields, entry.payload) for entry in entries]


async def test_branches_of_claimed_sessions_land_once_under_their_step_and_group(
    serve_gateway: Any, redis_url: str, redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    keys = redis_keys(redis_url, run_id)
    async with serve_gateway(**ONE, **keys) as served:
        async with task_run(served, served.tasks_request(**EXTERNAL, step=5)) as told:
            for number in range(4):
                agent = await claim(served)
                if number == 0:
                    await agent.chat([user("a failed attempt")])
                    await agent.act("fail", {"reason": "infra"})
                    agent = await claim(served, wait_s=5)
                await agent.chat([user(agent.session["task"]["prompt"])])
                if number == 1:
                    await agent.chat([user("a second branch")])
                await agent.act("complete", {} if number == 3 else {"reward": 1.0})
        found = await appended(redis_client, run_id, 4)
    async with serve_gateway(**ONE, **keys) as served:
        again = await claimed_again(served)
    ledger = Ledger(redis_client, run_id)
    assert (await ledger.count()).final == 4
    assert {(one.step, one.group_size) for one in found} == {(5, 2)}
    branches = {str(one.key): one for one in found}
    assert len(branches) == 4
    by_session: dict[str, list[Any]] = {}
    for one in found:
        by_session.setdefault(one.key.session_id, []).append(one)
    assert sorted(one.branch_count for one in found) == [1, 1, 2, 2]
    scored = [sample for sample in samples_of(told) if sample.HasField("reward")]
    assert set(by_session) == {sample.session_id for sample in scored}
    for sample in scored:
        (group,) = {one.group_id for one in by_session[sample.session_id]}
        assert group == sample.group_id
    (unscored,) = [sample for sample in samples_of(told) if not sample.HasField("reward")]
    record = await ledger_record(ledger, f"{unscored.session_id}/0")
    assert record is not None
    assert (record["reason"], record["step"]) == ("unscored", 5)
    closed = {group.group_id: group.scored_sessions for group in told[-1].finished.closed_groups}
    assert closed == {
        group: sum(sample.group_id == group for sample in scored) for group in ("g-a", "g-b")
    }
    assert sorted(closed.values()) == [1, 2]
    assert again == unscored.session_id


async def claimed_again(served: Any) -> str:
    """After a restart the ledger answers for final samples; only the rest is offered.

    Returns the id of the claimed session.
    """
    async with aclosing(_first_offer(served)) as offers:
        return await anext(offers)


async def _first_offer(served: Any) -> Any:
    call = served.stub.RunTasks(served.tasks_request(**EXTERNAL, step=5), timeout=patient(30))
    agent = await claim(served)
    assert await claimed(served, wait_s=0) is None
    yield agent.id
    call.cancel()


async def test_evaluations_never_enter_the_stream_and_may_sample_as_they_like(
    serve_gateway: Any, redis_url: str, redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    async with serve_gateway(**ONE, **redis_keys(redis_url, run_id)) as served:
        request = one_task(served, samples=2, purpose=tpb.PURPOSE_EVAL)
        async with task_run(served, request) as told:
            for _ in range(2):
                agent = await claim(served)
                assert not agent.session["trainable"]
                await agent.chat([user("1+1=")], temperature=0)
                await agent.act("complete", {"reward": 0.5})
        assert [sample.reward.value for sample in samples_of(told)] == [0.5, 0.5]
        assert list(told[-1].finished.closed_groups) == []
        await until_open(served, 0)
    assert (await Ledger(redis_client, run_id).count()).final == 0


async def nothing_yet(served: Any) -> bool:
    """Whether the gateway answers a claim that it offers no task now."""
    response = await served.http.post("/v1/sessions", json={"claim": True})
    return bool(response.status_code == 204)


@pytest.mark.parametrize("wait_s", [0, 30])
async def test_a_claim_without_a_run_is_refused_at_once(serve_gateway: Any, wait_s: float) -> None:
    async with serve_gateway(**ONE) as served:
        claim = {"claim": True, "wait_s": wait_s}
        async with asyncio.timeout(patient(10)):
            refused = await served.http.post("/v1/sessions", json=claim)
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "no_tasks_offered"
        assert "no run uses this gateway" in refused.json()["error"]["message"]


async def test_a_claim_before_the_run_has_begun_waits_for_it(
    serve_gateway: Any, redis_url: str, run_id: str
) -> None:
    async with serve_gateway(**ONE, **redis_keys(redis_url, run_id)) as served:
        early = asyncio.create_task(served.http.post("/v1/sessions", json=CLAIM))
        assert await nothing_yet(served)
        async with task_run(served, one_task(served)):
            agent = Agent(served.http, (await early).json())
            assert (await solve(agent))["state"] == "final"


async def test_a_claim_in_a_run_whose_tasks_are_not_for_agents_is_told_why(
    serve_gateway: Any, redis_url: str, run_id: str
) -> None:
    keys = redis_keys(redis_url, run_id)
    async with serve_gateway(**ONE, **keys) as served:
        early = asyncio.create_task(served.http.post("/v1/sessions", json=CLAIM))
        assert await nothing_yet(served)
        async with task_run(served, served.tasks_request()):
            refused = await early
        assert refused.status_code == 409
        assert "'single_turn'" in refused.json()["error"]["message"]
