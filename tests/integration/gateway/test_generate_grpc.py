"""Generations and sessions over gRPC have the same abilities as over HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from integration.gateway.http_agent import (
    SLOW,
    Agent,
    Oracle,
    loads,
    prompt_of,
    until_running,
    user,
)

from paceline.local.patience import patient
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub

ONE = {"engine": {"workers": 1}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
HERMES = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    '<tool_call>{"name": ..., "arguments": ...}</tool_call>\n{% endif %}'
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson "
    "}}</tool_call>{% endfor %}"
    "{% endfor %}[assistant]"
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


def asked(**fields: Any) -> rpb.GenerateRequest:
    """A request with sampling that can be trained."""
    sampling = {"temperature": 1.0, "max_tokens": 64, **fields.pop("sampling", {})}
    return rpb.GenerateRequest(sampling=tpb.SamplingParams(**sampling), **fields)


def talk(messages: list[dict[str, Any]], tools: Any = None, choice: str = "") -> rpb.Conversation:
    return rpb.Conversation(
        messages_json=json.dumps(messages),
        tools_json=json.dumps(tools) if tools else "",
        tool_choice=choice,
    )


async def whole(
    served: Any, request: rpb.GenerateRequest
) -> tuple[list[int], rpb.GenerateResponse, str]:
    """All tokens, the last chunk, the whole text."""
    pieces = [piece async for piece in served.stub.Generate(request, timeout=patient(20))]
    tokens = [token for piece in pieces for token in piece.chunk.token_ids]
    return tokens, pieces[-1], "".join(piece.text for piece in pieces)


async def opened(served: Any, **fields: Any) -> rpb.OpenSessionResponse:
    request = rpb.OpenSessionRequest(**{"trainable": True, **fields})
    found: rpb.OpenSessionResponse = await served.stub.OpenSession(request, timeout=patient(5))
    return found


async def refused(call: Any, code: grpc.StatusCode, match: str) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError, match=match) as raised:
        await call
    assert raised.value.code() == code
    return raised.value


async def show(served: Any, session: str) -> tuple[rpb.GetSessionResponse, list[dict[str, Any]]]:
    shown = await served.stub.GetSession(
        rpb.GetSessionRequest(session_id=session), timeout=patient(5)
    )
    return shown, json.loads(shown.tree_json)["tree"]


async def test_tokens_text_and_conversations_extend_one_session(serve_gateway: Any) -> None:
    async with serve_gateway(**ONE) as served:
        session = (await opened(served)).session_id
        first, last, text = await whole(
            served, asked(session_id=session, conversation=talk([user("2+2=")]))
        )
        assert (text, last.prompt_tokens, json.loads(last.message_json)["content"]) == (
            "2+2=5 #5",
            5,
            "2+2=5 #5",
        )
        history = [user("2+2="), json.loads(last.message_json), user("more")]
        second, end, _ = await whole(served, asked(session_id=session, conversation=talk(history)))
        ids = [
            *served.codec.encode("2+2="),
            *first,
            *served.codec.encode_piece("more"),
            *second,
            7,
            8,
        ]
        third, by_ids, _ = await whole(
            served, asked(session_id=session, token_ids=rpb.TokenIds(ids=ids))
        )
        assert not by_ids.message_json
        fourth, by_text, said = await whole(served, asked(session_id=session, text="1+1="))
        shown, tree = await show(served, session)
        names = [last.completion_id, end.completion_id, by_ids.completion_id, by_text.completion_id]
        assert [turn["completion_id"] for turn in tree] == names
        assert [turn["parent"] for turn in tree] == [None, *names[:2], None]
        assert [turn["response_ids"] for turn in tree] == [first, second, third, fourth]
        oracle = Oracle(served)
        for turn in tree:
            assert turn["response_ids"] == oracle.said(
                prompt_of(tree, turn["completion_id"]), turn["seed"]
            )
        line, other = shown.branches
        assert list(line.token_ids) == [*ids, *third]
        assert sum(line.loss_mask) == len(first) + len(second) + len(third)
        assert (sum(other.loss_mask), said in ("1+1=2 #2", "1+1=3 #3")) == (len(fourth), True)


async def test_a_text_that_goes_on_from_a_known_one_keeps_its_tokens(serve_gateway: Any) -> None:
    async with serve_gateway(**ONE) as served:
        session = (await opened(served)).session_id
        _, first, text = await whole(served, asked(session_id=session, text="1+1="))
        await whole(served, asked(session_id=session, text=f"1+1={text} so"))
        _, tree = await show(served, session)
        assert [turn["parent"] for turn in tree] == [None, first.completion_id]
        assert tree[1]["prompt_ids"] == list(served.codec.encode_piece(" so"))


async def test_outside_a_session_text_and_tokens_leave_nothing_and_a_conversation_can_be_rewarded(
    serve_gateway: Any,
) -> None:
    async with serve_gateway(**ONE) as served:
        ids = rpb.TokenIds(ids=served.codec.encode("2+2="))
        for prompt in ({"text": "2+2="}, {"token_ids": ids}):
            tokens, last, text = await whole(served, asked(**prompt))
            assert (text, tokens[-1], last.chunk.finish_reason) == (
                "2+2=5 #5",
                1,
                tpb.FINISH_REASON_STOP,
            )
        status = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
        assert status.open_sessions == 0
        _, last, _ = await whole(served, asked(conversation=talk([user("2+2=")])))
        reward = rpb.PostRewardRequest(
            completion_id=last.completion_id, reward=tpb.Reward(value=1.0)
        )
        assert (
            await served.stub.PostReward(reward, timeout=patient(5))
        ).state == rpb.SESSION_STATE_OPEN


@pytest.mark.parametrize("inside", [True, False])
async def test_tools_are_offered_forced_and_read(
    serve_gateway: Any, model_dir: Path, script: dict[str, Any], inside: bool
) -> None:
    (model_dir / "chat_template.jinja").write_text(HERMES)
    script["replies"] = [
        {
            "pattern": r"<tool_call>\s*\{\"name\": \"add\"[^<]*$",
            "texts": [' {"a": 9}}\n</tool_call>'],
        },
        {"pattern": "<tools>", "texts": [CALL]},
        {"pattern": ".", "texts": ["no tools"]},
    ]
    async with serve_gateway(engine={"workers": 1, "max_sequence_tokens": 4096}) as served:
        place = {"session_id": (await opened(served)).session_id} if inside else {}

        async def ask(
            choice: str, tools: Any = TOOLS
        ) -> tuple[dict[str, Any], rpb.GenerateResponse]:
            _, last, _ = await whole(
                served, asked(**place, conversation=talk([user("2+7")], tools, choice))
            )
            return json.loads(last.message_json), last

        message, last = await ask("auto")
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
            "add",
            {"a": 2},
        )
        assert last.chunk.finish_reason == tpb.FINISH_REASON_STOP
        message, _ = await ask("add")
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 9}
        message, _ = await ask("none")
        assert (message["content"], message.get("tool_calls")) == ("no tools", None)
        for choice, tools in (("multiply", TOOLS), ("required", None)):
            await refused(ask(choice, tools), grpc.StatusCode.INVALID_ARGUMENT, "tool_choice")
        if inside:
            _, tree = await show(served, place["session_id"])
            forced = served.codec.decode(tree[1]["prompt_ids"])
            assert '"add"' in forced[-40:]  # the prompt's tokens, not the model's
            assert len(tree) == 3


async def test_a_request_without_a_place_or_a_prompt_is_refused(serve_gateway: Any) -> None:
    async with serve_gateway(**ONE) as served:
        session = (await opened(served)).session_id
        bad = {
            "no prompt": asked(session_id=session),
            "messages": asked(conversation=rpb.Conversation(messages_json="[]")),
            "role": asked(conversation=talk([{"role": "wizard", "content": "x"}])),
            "body": asked(conversation=rpb.Conversation(messages_json="[}")),
            "max_tokens": asked(text="2+2=", sampling={"max_tokens": 0}),
            "prompt does not fit": asked(text=""),
            "unknown arm": asked(text="2+2=", forced_arm="leap"),
            "cannot be trained": asked(session_id=session, text="2+2=", sampling={"top_k": 3}),
        }
        bad["prompt does not fit"].token_ids.CopyFrom(rpb.TokenIds())
        for match, request in bad.items():
            await refused(whole(served, request), grpc.StatusCode.INVALID_ARGUMENT, match)
        await refused(
            whole(served, asked(session_id="nobody", text="x")),
            grpc.StatusCode.NOT_FOUND,
            "no such session",
        )
        openings = (
            {"turn_discount": 1.5},
            {"timeout_s": -1.0},
            {"timeout_s": float("nan")},
            {"task_id": "t" * 201},
        )
        for fields in openings:
            await refused(
                opened(served, **fields), grpc.StatusCode.INVALID_ARGUMENT, next(iter(fields))
            )
        await refused(
            opened(served, claim=True, wait_s=61.0), grpc.StatusCode.INVALID_ARGUMENT, "wait_s"
        )


@pytest.mark.slow
async def test_pieces_of_a_reader_that_stops_are_merged(
    serve_gateway: Any, script: dict[str, Any]
) -> None:
    tokens = 20_000
    script |= {"max_sequence_tokens": tokens + 10, "costs_s": {}, "arms": ["off"]}
    async with serve_gateway(**ONE) as served:
        session = (await opened(served)).session_id
        sampling = {"max_tokens": tokens, "ignore_eos": True, "top_logprobs": 20}  # much to send
        request = asked(session_id=session, text="2+2=", sampling=sampling)
        small = [
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", 64 << 10),
        ]  # limit of unread bytes
        async with grpc.aio.insecure_channel(served.channel.address, options=small) as peer:
            call = RolloutServiceStub(peer).Generate(request, timeout=patient(60))
            first = await call.read()
            async with asyncio.timeout(patient(20)):
                while sum(await loads(served)):
                    pass
            rest = []
            while (piece := await call.read()) is not grpc.aio.EOF:
                rest.append(piece)
        said = [
            *first.chunk.token_ids,
            *(token for piece in rest for token in piece.chunk.token_ids),
        ]
        _, (turn,) = await show(served, session)
        assert said == turn["response_ids"]
        assert len(said) == tokens
        assert max(len(piece.chunk.token_ids) for piece in rest) > tokens / 2  # a round gives one
        assert "".join([first.text, *(piece.text for piece in rest)]) == served.codec.decode(said)


async def test_a_cancelled_generation_frees_its_place_and_leaves_no_turn(
    serve_gateway: Any, script: dict[str, Any]
) -> None:
    script |= SLOW
    async with serve_gateway(**ONE, sessions={"max_parallel": 1}) as served:
        session = (await opened(served)).session_id
        long = {"max_tokens": 400, "ignore_eos": True}
        call = served.stub.Generate(
            asked(session_id=session, text="2+2=", sampling=long), timeout=patient(30)
        )
        await call.read()
        beside = whole(served, asked(session_id=session, text="2+2="))
        await refused(beside, grpc.StatusCode.RESOURCE_EXHAUSTED, "under way")
        call.cancel()
        await until_running(served, 0)
        tokens, _, _ = await whole(served, asked(session_id=session, text="2+2="))
        _, tree = await show(served, session)
        assert [turn["response_ids"] for turn in tree] == [tokens]


async def test_rewards_and_ends_over_grpc(serve_gateway: Any) -> None:
    async with serve_gateway(**ONE) as served:
        session = (await opened(served, turn_discount=0.5)).session_id
        _, first, _ = await whole(
            served, asked(session_id=session, conversation=talk([user("2+2=")]))
        )
        history = [user("2+2="), json.loads(first.message_json), user("more")]
        _, second, _ = await whole(served, asked(session_id=session, conversation=talk(history)))

        async def post(value: float, **fields: Any) -> int:
            request = rpb.PostRewardRequest(reward=tpb.Reward(value=value), **fields)
            return int((await served.stub.PostReward(request, timeout=patient(5))).state)

        added = {"completion_id": first.completion_id, "accumulate": True}
        for key in ("a", "a", "b"):
            assert await post(0.25, idempotency_key=key, **added) == rpb.SESSION_STATE_OPEN
        await post(1.0, completion_id=second.completion_id, session_id=session)
        await refused(
            post(0.5, completion_id=second.completion_id),
            grpc.StatusCode.FAILED_PRECONDITION,
            "another",
        )
        await refused(
            post(0.5, session_id=session, completion_id="x"),
            grpc.StatusCode.NOT_FOUND,
            "no such completion",
        )
        await refused(
            post(float("nan"), session_id=session), grpc.StatusCode.INVALID_ARGUMENT, "finite"
        )
        missing = served.stub.PostReward(
            rpb.PostRewardRequest(session_id=session), timeout=patient(5)
        )
        await refused(missing, grpc.StatusCode.INVALID_ARGUMENT, "no reward")
        shown, _ = await show(served, session)
        assert [branch.reward for branch in shown.branches] == [0.5 + 0.5 * 1.0, 1.0]

        async def close(session: str, **fields: Any) -> int:
            request = rpb.CloseSessionRequest(session_id=session, **fields)
            return int((await served.stub.CloseSession(request, timeout=patient(5))).state)

        assert await close(session) == await close(session, abort=True) == rpb.SESSION_STATE_FINAL
        await refused(
            post(1.0, session_id=session), grpc.StatusCode.FAILED_PRECONDITION, "has ended"
        )
        ways = {
            rpb.SESSION_STATE_UNSCORED: {},
            rpb.SESSION_STATE_ABORTED: {"abort": True},
            rpb.SESSION_STATE_FAILED: {
                "fail_reason": rpb.FAIL_REASON_DATA,
                "message": "no such file",
            },
        }
        for state, way in ways.items():
            session = (await opened(served)).session_id
            assert await close(session, **way) == state
            again = await served.stub.GetSession(
                rpb.GetSessionRequest(session_id=session), timeout=patient(5)
            )
            assert again.state == state
        session = (await opened(served)).session_id
        await refused(close(session, fail_reason=7), grpc.StatusCode.INVALID_ARGUMENT, "reason")
        assert await close(session) == rpb.SESSION_STATE_UNSCORED
        await refused(close("nobody"), grpc.StatusCode.NOT_FOUND, "no such session")


async def test_a_session_opened_over_grpc_goes_on_over_http(serve_gateway: Any) -> None:
    async with serve_gateway(**ONE) as served:
        found = await opened(served, task_id="t", group_id="g", group_size=2, sample_index=1)
        agent = Agent(served.http, {"id": found.session_id, "api_key": found.api_key})
        answer = await agent.chat([user("2+2=")])
        history = [user("2+2="), answer["choices"][0]["message"], user("more")]
        _, last, _ = await whole(served, asked(session_id=agent.id, conversation=talk(history)))
        shown, tree = await show(served, agent.id)
        assert await agent.export("tree") == tree
        assert [turn["completion_id"] for turn in tree] == [answer["id"], last.completion_id]
        assert tree[1]["parent"] == answer["id"]
        (branch,) = shown.branches
        assert (branch.task_id, branch.group_id, branch.group_size, branch.sample_index) == (
            "t",
            "g",
            2,
            1,
        )
