"""Calls that cannot work: clear errors, and the client goes on as if they had not been sent."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from integration.tinker import data
from integration.tinker.test_training import steps

from benchmarks.tinker_loop import MODEL, TinkerServer


def refused(future: Any) -> Any:
    """The error of a call that its caller caused."""
    import tinker
    from tinker.types import RequestErrorCategory

    with pytest.raises(tinker.RequestFailedError) as caught:
        future.result()
    assert caught.value.category is RequestErrorCategory.User
    return caught


def test_wrong_calls_are_refused_and_lose_nothing(client: Any) -> None:
    import tinker

    training = client.create_lora_training_client(str(MODEL), rank=4, seed=11).result()
    expected = steps(training, 1)
    ids = data.sequences()[0]
    plain = data.datum(ids)
    count = len(ids) - 1
    cases = {
        "loss_fn is not served": ([plain], "gspo", None),
        "target_tokens do not fit": ([data.datum(ids, weights=[1.0])], "cross_entropy", None),
        "weights does not fit target_tokens": (
            [data.datum(ids, weights=[1.0] * (count - 1))],
            "cross_entropy",
            None,
        ),
        "the loss has other inputs": ([plain], "ppo", None),
        "loss_fn_config has unknown keys": ([plain], "cross_entropy", {"beta": 1.0}),
        "not in the vocabulary": ([data.datum([*ids[:-1], 9999])], "cross_entropy", None),
        "not finite": (
            [data.datum(ids, weights=[float("nan")] * count)],
            "cross_entropy",
            None,
        ),
    }
    short = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[2:], "weights": [1.0] * (count - 1)},
    )
    cases["target_tokens do not fit"] = ([short], "cross_entropy", None)
    for message, (batch, loss, options) in cases.items():
        caught = refused(training.forward_backward(batch, loss, options))
        assert message in str(caught.value)
    assert "betas" not in str(refused(training.optim_step(tinker.AdamParams(beta1=1.0))).value)
    training.load_state_with_optimizer  # noqa: B018  the call below names no saved state
    for path in ("tinker://nobody/weights/none", "tinker://../weights/x", "tinker://a/b/../../c"):
        refused(training.load_state(path))
    for name in ("../up", "a/b", ""):
        refused(training.save_state(name))
    training.save_state("once").result()
    refused(training.save_state("once"))
    training.save_state("once", overwrite=True).result()
    again = steps(training, 1)
    assert again[0] < expected[0], "the first step was kept"


def test_a_rank_of_zero_and_other_models_are_refused(client: Any) -> None:
    refused(client.create_lora_training_client(str(MODEL), rank=0))
    refused(client.create_lora_training_client("meta-llama/Llama-3.2-1B", rank=8))
    refused(
        client.create_lora_training_client(
            str(MODEL), train_mlp=False, train_attn=False, train_unembed=True
        )
    )
    import tinker

    with pytest.raises(tinker.NotFoundError, match="nothing is saved there"):
        client.create_sampling_client(model_path="tinker://x/sampler_weights/y").result()


def test_unserved_sampling_options_are_refused_by_name(client: Any) -> None:
    import tinker

    sampling = client.create_sampling_client(base_model=str(MODEL)).result()
    prompt = tinker.ModelInput.from_ints([5, 6])
    params = tinker.SamplingParams(max_tokens=2)
    with pytest.raises(tinker.BadRequestError, match="topk_prompt_logprobs"):
        sampling.sample(prompt, 1, params, topk_prompt_logprobs=3).result()
    with pytest.raises(tinker.RequestFailedError, match="temperature"):
        sampling.sample(prompt, 1, tinker.SamplingParams(max_tokens=2, temperature=-1)).result()
    assert sampling.sample(prompt, 1, params).result().sequences


async def test_calls_run_in_the_order_of_their_numbers(served: TinkerServer, client: Any) -> None:
    training = client.create_lora_training_client(str(MODEL), rank=4, seed=12).result()
    model_id = training.model_id
    headers = {"x-api-key": served.key}
    async with httpx.AsyncClient(base_url=served.url, headers=headers, timeout=60) as http:

        async def send(seq: object, call: str, **more: object) -> httpx.Response:
            body = {"model_id": model_id, "seq_id": seq, **more}
            return await http.post(f"/api/v1/{call}", json=body)

        async def result(answer: httpx.Response) -> Any:
            body = {"request_id": answer.json()["request_id"]}
            return (await http.post("/api/v1/retrieve_future", json=body)).json()

        later = await send(2, "save_weights", path="later")
        waiting = asyncio.create_task(result(later))
        first = await send(1, "optim_step", adam_params={"learning_rate": 0.1})
        assert "metrics" in await result(first)
        assert (await waiting)["path"].endswith("/weights/later")
        repeated = await send(2, "save_weights", path="later")
        assert repeated.json()["request_id"] == later.json()["request_id"]
        for seq in (0, None, "x"):
            answer = await send(seq, "optim_step", adam_params={})
            assert answer.status_code == 400
            assert "seq_id" in answer.json()["detail"]
        unknown = await send(3, "optim_step", adam_params={"momentum": 1})
        failure = await result(unknown)
        assert failure["category"] == "user"
        assert "momentum" in failure["error"]


async def test_telemetry_of_the_sdk_is_accepted_and_dropped(served: TinkerServer) -> None:
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        body = {"events": [], "platform": "linux", "sdk_version": "1", "session_id": "unknown"}
        answer = await http.post("/api/v1/telemetry", json=body, headers={"x-api-key": served.key})
        assert (answer.status_code, answer.json()) == (200, {"status": "accepted"})


async def test_strangers_and_large_bodies_are_refused(served: TinkerServer) -> None:
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        path, key = "/api/v1/create_session", {"x-api-key": served.key}
        for headers in ({}, {"x-api-key": "tml-wrong"}, {"authorization": "Bearer wrong"}):
            assert (await http.post(path, json={}, headers=headers)).status_code == 401
        assert (await http.post(path, json={}, headers=key)).status_code == 200
        strange = [{"host": "evil.example"}, {"origin": "http://evil.example"}]
        for odd in (*strange, {"origin": served.url}):
            assert (await http.post(path, json={}, headers={**key, **odd})).status_code == 403
        large = await http.post(path, content=b" " * (9 << 20), headers=key)
        assert large.status_code == 413
        wrong = await http.post("/api/v1/get_info", content=b"[1]", headers=key)
        assert wrong.status_code == 400
        missing = await http.post("/api/v1/retrieve_future", json={"request_id": "x"}, headers=key)
        assert missing.status_code == 404
