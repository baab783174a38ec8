"""Generations over gRPC, inside sessions that were opened over HTTP and outside."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from integration.gateway.http_agent import (
    SLOW,
    Oracle,
    loads,
    message_of,
    opened,
    prompt_of,
    until_running,
    user,
)

from paceline.local.patience import patient
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub

ONE = {"engine": {"workers": 1}}


def asked(**fields: Any) -> rpb.GenerateRequest:
    """A request with sampling that can be trained."""
    sampling = {"temperature": 1.0, "max_tokens": 64, **fields.pop("sampling", {})}
    return rpb.GenerateRequest(sampling=tpb.SamplingParams(**sampling), **fields)


async def whole(
    served: Any, request: rpb.GenerateRequest
) -> tuple[list[int], rpb.GenerateResponse, str]:
    """All tokens, the last chunk, the whole text."""
    pieces = [piece async for piece in served.stub.Generate(request, timeout=patient(20))]
    tokens = [token for piece in pieces for token in piece.chunk.token_ids]
    return tokens, pieces[-1], "".join(piece.text for piece in pieces)


async def refused(call: Any, code: grpc.StatusCode, match: str) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError, match=match) as raised:
        await call
    assert raised.value.code() == code
    return raised.value


async def test_a_message_tokens_and_text_extend_one_session(serve_gateway: Any) -> None:
    async with serve_gateway(**ONE) as served:
        agent = await opened(served)
        answer = await agent.chat([user("2+2=")])
        assert message_of(answer)["content"] == "2+2=5 #5"
        (begun,) = await agent.export("tree")
        first = begun["response_ids"]
        ids = [*served.codec.encode("2+2="), *first, 7, 8]
        second, by_ids, _ = await whole(
            served, asked(session_id=agent.id, token_ids=rpb.TokenIds(ids=ids))
        )
        third, by_text, said = await whole(served, asked(session_id=agent.id, text="1+1="))
        tree = await agent.export("tree")
        names = [answer["id"], by_ids.completion_id, by_text.completion_id]
        assert [turn["completion_id"] for turn in tree] == names
        assert [turn["parent"] for turn in tree] == [None, names[0], None]
        assert [turn["response_ids"] for turn in tree] == [first, second, third]
        oracle = Oracle(served)
        for turn in tree:
            assert turn["response_ids"] == oracle.said(
                prompt_of(tree, turn["completion_id"]), turn["seed"]
            )
        line, other = await agent.export("samples")
        assert line["token_ids"] == [*ids, *second]
        assert sum(line["loss_mask"]) == len(first) + len(second)
        assert (sum(other["loss_mask"]), said in ("1+1=2 #2", "1+1=3 #3")) == (len(third), True)
        rewarded = await agent.reward(1.0, completion_id=by_ids.completion_id)
        assert rewarded["state"] == "open"


async def test_a_text_that_goes_on_from_a_known_one_keeps_its_tokens(serve_gateway: Any) -> None:
    async with serve_gateway(**ONE) as served:
        agent = await opened(served)
        _, first, text = await whole(served, asked(session_id=agent.id, text="1+1="))
        await whole(served, asked(session_id=agent.id, text=f"1+1={text} so"))
        tree = await agent.export("tree")
        assert [turn["parent"] for turn in tree] == [None, first.completion_id]
        assert tree[1]["prompt_ids"] == list(served.codec.encode_piece(" so"))


async def test_outside_a_session_text_and_tokens_leave_nothing(serve_gateway: Any) -> None:
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


async def test_a_request_without_a_place_or_a_prompt_is_refused(serve_gateway: Any) -> None:
    async with serve_gateway(**ONE) as served:
        session = (await opened(served)).id
        bad = {
            "no prompt": asked(session_id=session),
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


@pytest.mark.slow
async def test_pieces_of_a_reader_that_stops_are_merged(
    serve_gateway: Any, script: dict[str, Any]
) -> None:
    tokens = 20_000
    script |= {"max_sequence_tokens": tokens + 10, "costs_s": {}, "arms": ["off"]}
    async with serve_gateway(**ONE) as served:
        session = (agent := await opened(served)).id
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
        (turn,) = await agent.export("tree")
        assert said == turn["response_ids"]
        assert len(said) == tokens
        assert max(len(piece.chunk.token_ids) for piece in rest) > tokens / 2  # a round gives one
        assert "".join([first.text, *(piece.text for piece in rest)]) == served.codec.decode(said)


async def test_a_cancelled_generation_frees_its_place_and_leaves_no_turn(
    serve_gateway: Any, script: dict[str, Any]
) -> None:
    script |= SLOW
    async with serve_gateway(**ONE, sessions={"max_parallel": 1}) as served:
        session = (agent := await opened(served)).id
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
        tree = await agent.export("tree")
        assert [turn["response_ids"] for turn in tree] == [tokens]
