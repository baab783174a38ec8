"""Agents' sessions over HTTP: exact tokens, rewards, ends, quotas; the scripted engine's own choice
is the oracle.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from integration.gateway.conftest import Ends
from integration.gateway.http_agent import (
    SLOW,
    Agent,
    Oracle,
    claimed,
    message_of,
    opened,
    prompt_of,
    until_open,
    until_running,
    user,
)

from paceline.local.patience import patient

ONE = {"engine": {"workers": 1}}
TOKEN = "the-gateways-token"


async def two_turns(agent: Agent) -> tuple[dict[str, Any], dict[str, Any]]:
    """A question, and a second question that follows its answer."""
    first = await agent.chat([user("2+2=")])
    second = await agent.chat([user("2+2="), message_of(first), user("and 1+1=")])
    return first, second


def assert_each_said_token_trains_once(
    samples: list[dict[str, Any]], tree: list[dict[str, Any]]
) -> None:
    trained = sorted(
        token
        for sample in samples
        for token, bit in zip(sample["token_ids"], sample["loss_mask"], strict=True)
        if bit
    )
    assert trained == sorted(token for turn in tree for token in turn["response_ids"])


async def test_a_conversation_under_a_key_is_one_sample_of_exactly_what_the_engine_saw_and_said(
    serve_gateway: Any,
) -> None:
    async with serve_gateway(**ONE) as served:
        agent = await opened(served, task_id="t", group_id="g", group_size=2, sample_index=1)
        assert (agent.session["object"], agent.session["state"], agent.session["task"]) == (
            "session",
            "open",
            None,
        )
        first, second = await two_turns(agent)
        tree, oracle = await agent.export("tree"), Oracle(served)
        assert [turn["completion_id"] for turn in tree] == [first["id"], second["id"]]
        assert tree[1]["parent"] == first["id"]
        for turn in tree:
            assert turn["response_ids"] == oracle.said(
                prompt_of(tree, turn["completion_id"]), turn["seed"]
            )
        assert prompt_of(tree, first["id"]) == list(served.codec.encode("2+2="))
        (sample,) = await agent.export("samples")
        parts = [
            tree[0]["prompt_ids"],
            tree[0]["response_ids"],
            tree[1]["prompt_ids"],
            tree[1]["response_ids"],
        ]
        assert sample["token_ids"] == [token for part in parts for token in part]
        assert sample["loss_mask"] == [
            bit for n, part in enumerate(parts) for bit in [n % 2] * len(part)
        ]
        assert sample["reward"] is None
        said = sample["behavior_logprobs"]
        assert all(
            (value < 0) == bool(bit) for value, bit in zip(said, sample["loss_mask"], strict=True)
        )
        shown = await agent.show()
        assert (shown["turns"], shown["task_id"], shown["group_id"]) == (2, "t", "g")
        assert shown["completion_tokens"] == sum(sample["loss_mask"])
        assert shown["prompt_tokens"] == len(sample["loss_mask"]) - sum(sample["loss_mask"])


async def test_a_changed_history_begins_a_branch_and_every_token_trains_once(
    serve_gateway: Any,
) -> None:
    async with serve_gateway(**ONE) as served:
        agent = await opened(served)
        first, _ = await two_turns(agent)
        await agent.chat([user("2+2="), message_of(first), user("instead 3+3=")])
        changed = {**message_of(first), "content": "edited"}
        await agent.chat([user("2+2="), changed, user("and then")])
        tree, samples = await agent.export("tree"), await agent.export("samples")
        assert [turn["parent"] for turn in tree] == [None, first["id"], first["id"], None]
        assert len(samples) == 3
        assert_each_said_token_trains_once(samples, tree)


async def test_two_requests_at_once_on_one_session_fork(
    serve_gateway: Any, script: dict[str, Any]
) -> None:
    script |= SLOW
    async with serve_gateway() as served:
        agent = await opened(served)
        first = await agent.chat([user("2+2=")])
        history = [user("2+2="), message_of(first)]
        await asyncio.gather(*(agent.chat([*history, user(text)]) for text in ("left", "right")))
        tree, samples = await agent.export("tree"), await agent.export("samples")
        assert [turn["parent"] for turn in tree] == [None, first["id"], first["id"]]
        assert len(samples) == 2
        assert_each_said_token_trains_once(samples, tree)


async def test_rewards_of_session_and_turns_add_up_by_branch(serve_gateway: Any) -> None:
    async with serve_gateway(**ONE) as served:
        agent = await opened(served)
        first, second = await two_turns(agent)
        other = await agent.chat([user("another")])
        await agent.reward(1.0)
        await agent.reward(0.25, completion_id=first["id"])
        await agent.reward(0.5, completion_id=second["id"])
        samples = await agent.export("samples")
        assert [sample["reward"] for sample in samples] == [1.75, 1.0]
        await agent.reward(-1.0, completion_id=other["id"])
        assert [sample["reward"] for sample in await agent.export("samples")] == [1.75, 0.0]
        assert (await agent.act("complete"))["state"] == "final"


async def test_with_turn_discount_every_turn_is_a_sample_with_its_return(
    serve_gateway: Any,
) -> None:
    async with serve_gateway(**ONE) as served:
        agent = await opened(served, turn_discount=0.5)
        first, second = await two_turns(agent)
        await agent.reward(0.25, completion_id=first["id"])
        await agent.reward(1.0, completion_id=second["id"])
        samples = await agent.export("samples")
        assert [sample["reward"] for sample in samples] == [0.25 + 0.5 * 1.0, 1.0]
        assert_each_said_token_trains_once(samples, await agent.export("tree"))


async def test_a_sessions_reward_has_parts_and_a_turns_has_none(serve_gateway: Any) -> None:
    async with serve_gateway(**ONE) as served:
        agent = await opened(served)
        first = await agent.chat([user("2+2=")])
        refused = await agent.reward(
            0.5, completion_id=first["id"], parts={"form": 0.5}, status=400
        )
        assert "parts" in refused["error"]["message"]
        await agent.reward(0.5, parts={"form": 0.5, "answer": 0.0})
        (sample,) = await agent.export("samples")
        assert (sample["reward"], sample["reward_parts"]) == (0.5, {"form": 0.5, "answer": 0.0})


async def test_rewards_twice_in_conflict_accumulated_and_late(serve_gateway: Any) -> None:
    async with serve_gateway(**ONE) as served:
        agent = await opened(served)
        first = await agent.chat([user("2+2=")])
        for _ in range(2):
            assert (await agent.reward(0.5))["reward"] == 0.5
        conflict = await agent.reward(0.75, status=409)
        assert conflict["error"]["code"] == "reward_conflict"
        turn = {"completion_id": first["id"], "accumulate": True}
        for key, value in (("a", 0.25), ("a", 0.25), ("b", 0.5)):
            await agent.reward(value, idempotency_key=key, **turn)
        assert (await agent.export("tree"))[0]["reward"] == 0.75
        assert (await agent.reward(9, idempotency_key="a", status=409, **turn))["error"][
            "code"
        ] == "reward_conflict"
        assert "idempotency_key" in (await agent.reward(1, status=400, **turn))["error"]["message"]
        await agent.reward(1, completion_id="chatcmpl-unknown", status=404)
        for bad in ("much", None, "NaN"):
            await agent.act("reward", {"value": bad}, status=400)
        assert (await agent.act("complete"))["state"] == "final"
        late = await agent.reward(0.5, status=409)
        assert late["error"]["code"] == "session_ended"
        assert "final" in late["error"]["message"]


async def test_complete_abort_and_fail_end_a_session_and_a_repeated_end_learns_how(
    serve_gateway: Any,
) -> None:
    async with serve_gateway(**ONE) as served:
        agent = await opened(served)
        await agent.chat([user("2+2=")])
        assert (await agent.act("complete", {"reward": 0.0}))["state"] == "final"
        for body in ({}, {"reward": 0.0}):
            assert (await agent.act("complete", body))["state"] == "final"
        assert (await agent.chat([user("2+2=")], status=409))["error"]["code"] == "session_ended"

        unscored = await opened(served)
        await unscored.chat([user("2+2=")])
        assert (await unscored.act("complete"))["state"] == "unscored"
        assert (await unscored.show())["state"] == "unscored"

        aborted = await opened(served)
        await aborted.chat([user("2+2=")])
        await aborted.reward(1.0)
        assert (await aborted.act("abort"))["state"] == "aborted"
        assert "aborted" in (await aborted.act("complete", status=409))["error"]["message"]

        failed = await opened(served)
        await failed.act("fail", {"reason": "elsewhere"}, status=400)
        assert (await failed.act("fail", {"reason": "data", "message": "no such file"}))[
            "fail_reason"
        ] == "data"
        assert (await failed.act("fail", {"reason": "infra"}))["fail_reason"] == "data"
        await aborted.act("fail", {"reason": "data"}, status=409)
        told = await failed.chat([user("2+2=")], status=409)
        assert "failed: data" in told["error"]["message"]
        assert (await failed.show())["state"] == "failed"


async def test_keys_open_their_own_session_and_nothing_else(
    serve_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", TOKEN)
    async with serve_gateway(**ONE) as served:
        assert (await served.http.post("/v1/sessions", json={})).status_code == 401
        served.http.headers["authorization"] = f"Bearer {TOKEN}"
        one, other = await opened(served), await opened(served)
        for method, path in (
            ("GET", ""),
            ("GET", "/export"),
            ("POST", "/reward"),
            ("POST", "/complete"),
        ):
            url = f"/v1/sessions/{other.id}{path}"
            refused = await served.http.request(method, url, headers=one.headers, json={"value": 1})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_allowed")
        assert (
            await served.http.post("/v1/sessions", headers=one.headers, json={})
        ).status_code == 403
        assert (await served.http.get("/metrics", headers=one.headers)).status_code == 403
        stranger = {"authorization": "Bearer sk-pl-nobody"}
        assert (
            await served.http.get(f"/v1/sessions/{one.id}", headers=stranger)
        ).status_code == 401
        body = {"messages": [user("2+2=")]}
        for headers in (stranger, {"authorization": "Bearer wrong"}, {"authorization": ""}):
            answer = await served.http.post("/v1/chat/completions", headers=headers, json=body)
            assert answer.status_code == 401
        assert (await served.http.get("/v1/sessions/unknown")).status_code == 404
        assert (await served.http.get("/v1/sessions/current")).status_code == 400
        assert (await served.http.get(f"/v1/sessions/{one.id}")).json()["id"] == one.id
        anthropic = await served.http.get(
            "/v1/sessions/current",
            headers={"authorization": "", "x-api-key": one.session["api_key"]},
        )
        assert anthropic.json()["id"] == one.id


BAD_OPENINGS = [
    ({"group_size": 0}, "group_size"),
    ({"group_size": "2"}, "group_size"),
    ({"sample_index": -1}, "sample_index"),
    ({"turn_discount": 1.5}, "turn_discount"),
    ({"timeout_s": -1}, "timeout_s"),
    ({"task_id": "a/b"}, "task_id"),
    ({"group_id": "g" * 201}, "group_id"),
    ({"claim": True, "wait_s": 61}, "wait_s"),
    ({"trainable": "yes"}, "trainable"),
]


async def test_openings_that_mean_nothing_are_refused_by_field(serve_gateway: Any) -> None:
    async with serve_gateway(**ONE) as served:
        for body, field in BAD_OPENINGS:
            response = await served.http.post("/v1/sessions", json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, field), body
        assert (await claimed(served, wait_s=0)) is None


def assert_refused_for_now(response: Any) -> None:
    assert response.status_code == 429, response.text
    assert int(response.headers["retry-after"]) >= 1
    assert response.headers["x-should-retry"] == "true"


def assert_used_up(response: Any) -> None:
    assert response.headers["x-should-retry"] == "false"
    assert (response.status_code, response.json()["error"]["code"]) == (409, "session_quota"), (
        response.text
    )


async def test_quotas_of_a_session_count_choices_and_no_waiting_renews_them(
    serve_gateway: Any,
) -> None:
    async with serve_gateway(**ONE, sessions={"max_turns": 3, "max_parallel": 2}) as served:
        agent = await opened(served)

        async def ask(**body: Any) -> Any:
            asked = {"messages": [user("2+2=")], "max_tokens": 4, **body}
            return await served.http.post("/v1/chat/completions", headers=agent.headers, json=asked)

        for stream in (False, True):
            assert_refused_for_now(await ask(n=3, stream=stream))
        assert (await agent.show())["turns"] == 0
        assert (await ask(n=2)).status_code == 200
        for stream in (False, True):
            assert_used_up(await ask(n=2, stream=stream))
        assert (await ask(stream=True)).status_code == 200
        assert_used_up(await ask())
        assert (await agent.show())["turns"] == 3
    async with serve_gateway(**ONE, sessions={"max_tokens": 10, "limit": 2}) as served:
        agent = await opened(served)
        assert (await ask()).status_code == 200
        assert (await ask()).status_code == 200
        assert_used_up(await ask())
        await opened(served)
        assert_refused_for_now(await served.http.post("/v1/sessions", json={}))


async def test_a_request_beside_max_parallel_others_is_refused(
    serve_gateway: Any, script: dict[str, Any]
) -> None:
    script |= SLOW
    async with serve_gateway(**ONE, sessions={"max_parallel": 1}) as served:
        agent = await opened(served)
        long = {"max_tokens": 400, "ignore_eos": True}
        running = asyncio.create_task(agent.chat([user("2+2=")], **long))
        await until_running(served, 1)
        await agent.chat([user("1+1=")], status=429)
        running.cancel()
        await until_running(served, 0)
        await agent.chat([user("1+1=")])
        assert (await agent.show())["turns"] == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_full_queue_is_429_for_streams_too(
    serve_gateway: Any, script: dict[str, Any], stream: bool
) -> None:
    script |= SLOW
    async with serve_gateway(**ONE, queue={"running": 1, "limit": 1}) as served:
        long = {"messages": [user("2+2=")], "max_tokens": 400, "ignore_eos": True, "stream": stream}
        calls = [
            asyncio.create_task(served.http.post("/v1/chat/completions", json=long))
            for _ in range(3)
        ]
        ended, others = await asyncio.wait(
            calls, timeout=patient(10), return_when=asyncio.FIRST_COMPLETED
        )
        assert len(others) == 2
        assert_refused_for_now(ended.pop().result())
        for call in others:
            call.cancel()
        await until_running(served, 0)


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_client_that_leaves_a_stream_leaves_no_turn(
    serve_gateway: Any, script: dict[str, Any], choices: int
) -> None:
    script |= SLOW
    async with serve_gateway(**ONE, sessions={"max_parallel": choices}) as served:
        agent = await opened(served)
        body = {
            "messages": [user("2+2=")],
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": True,
            "n": choices,
        }
        async with served.http.stream(
            "POST", "/v1/chat/completions", headers=agent.headers, json=body
        ) as response:
            lines = response.aiter_lines()
            async for line in lines:
                if line:
                    assert json.loads(line.removeprefix("data: "))["choices"]
                    break
        await until_running(served, 0)
        assert (await agent.show())["turns"] == 0
        assert (await agent.chat([user("2+2=")], n=choices))["choices"]
        assert len(await agent.export("tree")) == choices


async def test_a_streamed_turn_is_recorded_before_its_last_event(serve_gateway: Any) -> None:
    async with serve_gateway(**ONE) as served:
        agent = await opened(served)
        body = {"messages": [user("2+2=")], "max_tokens": 64, "stream": True}
        async with served.http.stream(
            "POST", "/v1/chat/completions", headers=agent.headers, json=body
        ) as response:
            async for line in response.aiter_lines():
                if '"finish_reason":"stop"' in line:
                    await agent.reward(
                        1.0, completion_id=json.loads(line.removeprefix("data: "))["id"]
                    )
        assert [turn["reward"] for turn in await agent.export("tree")] == [1.0]


async def test_choices_are_rewarded_by_id_and_index(serve_gateway: Any) -> None:
    async with serve_gateway(**ONE) as served:
        agent = await opened(served)
        answer = await agent.chat([user("1+1=")], n=3)
        for index in range(3):
            await agent.reward(float(index), completion_id=f"{answer['id']}:{index}")
        assert sorted(sample["reward"] for sample in await agent.export("samples")) == [
            0.0,
            1.0,
            2.0,
        ]
        await agent.reward(1.0, completion_id=answer["id"], status=404)


async def test_a_client_without_a_session_gets_one_per_conversation_and_is_rewarded_by_completion(
    serve_gateway: Any,
) -> None:
    async with serve_gateway(**ONE) as served:

        async def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
            answer = await served.http.post(
                "/v1/chat/completions", json={"messages": messages, "max_tokens": 64}
            )
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        first = await ask([user("2+2=")])
        second = await ask([user("2+2="), message_of(first), user("more")])
        other = await ask([user("hello")])

        async def reward(completion: str, value: float, status: int = 200) -> Any:
            body = {"completion_id": completion, "value": value}
            answer = await served.http.post("/v1/rewards", json=body)
            assert answer.status_code == status, answer.text
            return answer.json()

        one = await reward(first["id"], 0.5)
        assert (await reward(second["id"], 1.0))["id"] == one["id"]
        assert (await reward(other["id"], 1.0))["id"] != one["id"]
        assert (await reward(second["id"], 0.0, status=409))["error"]["code"] == "reward_conflict"
        await reward("chatcmpl-unknown", 1.0, status=404)
        assert (await served.http.post("/v1/rewards", json={"value": 1})).json()["error"][
            "param"
        ] == "completion_id"
        tree = (await served.http.get(f"/v1/sessions/{one['id']}/export")).json()["tree"]
        assert [(turn["completion_id"], turn["parent"]) for turn in tree] == [
            (first["id"], None),
            (second["id"], first["id"]),
        ]
        stranger = await opened(served)
        await stranger.post("/v1/rewards", {"completion_id": first["id"], "value": 0.5}, status=404)


async def speaks(agent: Agent, **body: Any) -> dict[str, Any] | None:
    """The agent's answer; None when its session was over before the first token."""
    asked = {"messages": [user("2+2=")], "max_tokens": 64, **body}
    answer = await agent.http.post("/v1/chat/completions", json=asked, headers=agent.headers)
    assert answer.status_code in (200, 409), answer.text
    return dict(answer.json()) if answer.status_code == 200 else None


async def test_a_silent_session_ends_unscored_by_its_own_time_out(serve_gateway: Any) -> None:
    async with serve_gateway(**ONE) as served:
        lasting = await opened(served)
        for timeout_s in (0.2, 2.0, 20.0):  # a busy machine may need longer for the first token
            silent = await opened(served, timeout_s=timeout_s)
            if await speaks(silent):
                break
        await until_open(served, 1)
        assert (await silent.show())["state"] == "unscored"
        assert "unscored" in (await silent.chat([user("2+2=")], status=409))["error"]["message"]
        assert (await lasting.show())["state"] == "open"


async def test_a_session_that_generates_for_longer_than_its_time_out_is_not_silent(
    serve_gateway: Any, script: dict[str, Any]
) -> None:
    script |= SLOW
    async with serve_gateway(**ONE) as served:
        for timeout_s in (0.2, 1.0, 3.0):  # a busy machine may need longer to begin
            agent = await opened(served, timeout_s=timeout_s)
            if answer := await speaks(agent, max_tokens=400, ignore_eos=True):
                break
        assert answer is not None
        assert answer["usage"]["completion_tokens"] == 400


async def test_sampling_that_cannot_be_trained_needs_a_session_that_is_not(
    serve_gateway: Any,
) -> None:
    async with serve_gateway(**ONE) as served:
        trained, free = await opened(served), await opened(served, trainable=False)
        refused = await trained.chat([user("2+2=")], top_p=0.5, status=400)
        assert "top_p=0.5" in refused["error"]["message"]
        await trained.chat([user("2+2=")], temperature=0, status=400)
        await trained.chat([user("2+2=")], temperature=0.5)
        assert (
            "one temperature"
            in (await trained.chat([user("x")], temperature=0.7, status=400))["error"]["message"]
        )
        assert (
            message_of(await free.chat([user("2+2=")], top_p=0.5, top_k=3))["content"] == "2+2=5 #5"
        )
        assert (await free.act("complete", {"reward": 1.0}))["state"] == "final"
        without = {"messages": [user("2+2=")], "top_p": 0.5, "max_tokens": 64}
        answer = await served.http.post("/v1/chat/completions", json=without)
        assert answer.status_code == 200


async def test_a_session_that_ends_under_a_running_request_keeps_nothing_of_it(
    serve_gateway: Any, script: dict[str, Any], ends: Ends
) -> None:
    script |= SLOW
    async with serve_gateway(**ONE) as served:
        agent = await opened(served)
        running = asyncio.create_task(agent.chat([user("2+2=")], max_tokens=30, ignore_eos=True))
        await until_running(served, 1)
        assert (await agent.act("complete", {"reward": 1.0}))["turns"] == 0
        ends.come()
        assert (await running)["usage"]["completion_tokens"] == 30
        assert "final" in (await agent.chat([user("2+2=")], status=409))["error"]["message"]


async def test_an_ended_session_is_exported_under_its_key_until_later_ones_need_the_room(
    serve_gateway: Any,
) -> None:
    async with serve_gateway(**ONE, sessions={"ended_tokens": 24}) as served:
        first, second = await opened(served), await opened(served)
        for agent in (first, second):
            await agent.chat([user("2+2=")])
            before = await agent.export("samples")
            await agent.act("complete", {"reward": 1.0})
            (after,) = await agent.export("samples")
            assert after == {**before[0], "reward": 1.0}
        gone = await served.http.get(f"/v1/sessions/{first.id}/export", headers=first.headers)
        assert gone.status_code == 409
        assert "ended_tokens" in gone.json()["error"]["message"]
