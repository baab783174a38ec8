"""SGLang on the CPU serves a pretrained model of 135M parameters, with EAGLE chains of 3 drafts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_served import stock
from transformers import AutoTokenizer

from paceline.local.patience import patient
from paceline.models.config import read_config
from paceline.speculators.eagle import EagleNet
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb

pytestmark = [pytest.mark.real, pytest.mark.sglang, pytest.mark.timeout(600)]
CHAIN = "eagle:3_1_4"
QUESTIONS = ("Why is the sky blue?", "Write the word ha thirty times: " + "ha " * 15)
TOKENS = 32


def save_echo(model: Path, folder: Path) -> None:
    """An EAGLE drafter that drafts the newest token again, so that repeated words are accepted."""
    net = EagleNet(read_config(model))
    with torch.no_grad():
        for weight in net.parameters():
            weight.zero_()
        width = net.config.hidden_size
        net.fc.weight[:, width:] = torch.eye(width)  # the next state equals this state
    net.save(folder)


async def test_sglang_drafts_by_three_tokens_and_answers_as_without_drafts(
    serve_gateway: Any, real_model: Path, tmp_path: Path
) -> None:
    save_echo(real_model, tmp_path / "echo")
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]
    plain = {"model_path": str(real_model)}  # the unpatched SGLang without drafts
    expected = asyncio.create_task(asyncio.to_thread(stock, plain, prompts, TOKENS))
    engine = {"kind": "sglang", "max_batch": 4, "max_sequence_tokens": 256}
    settings = {"model": str(real_model), "drafter": str(tmp_path / "echo"), "engine": engine}
    async with serve_gateway(**settings, speculation={"arms": [CHAIN]}) as served:

        async def chat(messages: list[dict[str, str]]) -> list[int]:
            body = {"messages": messages, "temperature": 0, "max_tokens": TOKENS}
            body |= {"ignore_eos": True, "return_token_ids": True}
            answer = await served.http.post("/v1/chat/completions", json=body, timeout=patient(120))
            assert answer.status_code == 200, answer.text
            return list(answer.json()["choices"][0]["token_ids"])

        async def drafted(prompt: list[int]) -> tuple[list[int], tpb.SpeculationStats]:
            sampling = tpb.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
            ids = rpb.TokenIds(ids=prompt)
            request = rpb.GenerateRequest(token_ids=ids, sampling=sampling, forced_arm=CHAIN)
            pieces = [one async for one in served.stub.Generate(request, timeout=patient(120))]
            tokens = [token for piece in pieces for token in piece.chunk.token_ids]
            return tokens, pieces[-1].chunk.speculation

        chosen = await asyncio.gather(*map(chat, chats))
        forced = await asyncio.gather(*map(drafted, prompts))
        status = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
    wanted = (await expected)["tokens"]
    assert chosen == wanted
    assert [tokens for tokens, _ in forced] == wanted
    prose, repeated = (stats for _, stats in forced)
    assert list(prose.proposed_at) == [prose.drafted_rounds] * 3
    assert prose.accepted_tokens < prose.drafted_rounds / 2  # most chains are rejected whole
    assert min(repeated.accepted_at) > 3  # whole chains are accepted
    for stats in (prose, repeated):
        assert dict(stats.arm_drafted_rounds) == {CHAIN: stats.drafted_rounds}
    rounds = [one for one in status.workers[0].health.arms if one.arm == CHAIN]
    assert sum(one.pulls for one in rounds) >= prose.drafted_rounds
    assert max(one.mean_accept_length for one in rounds) > 1
