"""A prompt of the whole context of a pretrained model of 135M parameters, and of one token more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.local.memory_plan import PROCESS, engine_plan
from paceline.local.patience import patient
from paceline.local.processes import usable_cores
from paceline.models.config import read_config
from paceline.v1 import rollout_pb2 as rpb

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]
CONTEXT = 8192


def next_token(model: Path, prompt: list[int]) -> int:
    """The likeliest next token of transformers' forward in float32."""
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1]
    torch.set_num_threads(threads)
    return int(logits.argmax())


async def test_a_prompt_of_all_but_one_token_of_the_context_is_answered_and_a_longer_one_refused(
    serve_gateway: Any, real_model: Path
) -> None:
    engine = {"kind": "embedded", "workers": 1, "threads": 0, "max_batch": 1}
    engine["max_sequence_tokens"] = CONTEXT + 1000  # longer than the model's context
    async with serve_gateway(model=str(real_model), engine=engine) as served:
        prompt = served.codec.encode(" ".join(map(str, range(CONTEXT))))[: CONTEXT - 1]

        async def ask(ids: list[int]) -> httpx.Response:
            body = {"prompt": ids, "temperature": 0, "max_tokens": 16, "return_token_ids": True}
            return await served.http.post("/v1/completions", json=body, timeout=patient(240))

        refused = await ask([*prompt, prompt[0]])
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "seen: 8192 tokens; allowed: 1 to 8191 tokens" in error["message"]

        answer = (await ask(prompt)).json()
        (choice,) = answer["choices"]
        assert (choice["finish_reason"], answer["usage"]["total_tokens"]) == ("length", CONTEXT)
        status = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
        taken = psutil.Process(status.workers[0].pid).memory_full_info().pss
        plan = engine_plan(read_config(real_model), served.config, 0)
        assert taken < plan.total + PROCESS  # with the request's keys and values, kept for reuse
    assert choice["token_ids"] == [next_token(real_model, prompt)]
