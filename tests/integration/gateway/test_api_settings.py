"""Gateway settings for untrainable sampling, names of models, and browsers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from integration.gateway.http_agent import Agent, claimed, opened, task_run, user

from paceline.local.patience import patient
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb

OVERRIDE = {"sessions": {"untrainable": "override", "temperature": 0.75}}
FRAMEWORK = {"temperature": 0.2, "top_p": 0.5, "top_k": 40}
TOLD = "x-paceline-overridden"
ALL_CHANGED = "temperature=0.75, top_p=1, top_k=0"
PAGE = "https://console.example"
PATHS = {
    "/v1/chat/completions": {"messages": [user("2+2=")]},
    "/v1/completions": {"prompt": "2+2="},
    "/v1/responses": {"input": "2+2="},
    "/v1/messages": {"messages": [user("2+2=")], "max_tokens": 64},
}


async def ask(agent: Agent, path: str, **body: Any) -> httpx.Response:
    return await agent.http.post(path, json={**PATHS[path], **body}, headers=agent.headers)


async def temperatures(served: Any, agent: Agent) -> list[float]:
    return [sample["temperature"] for sample in await agent.export("samples")]


async def test_a_gateway_set_to_override_draws_with_the_runs_sampling_and_says_so(
    serve_gateway: Any,
) -> None:
    async with serve_gateway(**OVERRIDE) as served:
        agent = await opened(served)
        for path in PATHS:
            asked = {"temperature": 0.2, "top_p": 0.5}
            for stream in (False, True):
                answer = await ask(agent, path, **asked, stream=stream)
                assert answer.status_code == 200, answer.text
                assert answer.headers[TOLD] == "temperature=0.75, top_p=1"
        assert (await ask(agent, "/v1/completions", **FRAMEWORK)).headers[TOLD] == ALL_CHANGED
        assert TOLD not in (await ask(agent, "/v1/completions", temperature=0.75)).headers
        assert set(await temperatures(served, agent)) == {0.75}
        assert (await agent.show())["override_sampling"] is True
        said = rpb.GenerateRequest(
            session_id=agent.id,
            text="1+1=",
            sampling=tpb.SamplingParams(temperature=0.2, top_k=3, max_tokens=64),
        )
        news = [one async for one in served.stub.Generate(said, timeout=patient(10))]
        assert [*news[-1].overridden] == ["temperature=0.75", "top_k=0"]


async def test_a_session_says_itself_whether_it_overrides(serve_gateway: Any) -> None:
    async with serve_gateway() as served:
        refusing, willing = await opened(served), await opened(served, override_sampling=True)
        free = await opened(served, override_sampling=True, trainable=False)
        assert (await ask(refusing, "/v1/completions", **FRAMEWORK)).status_code == 400
        answer = await ask(willing, "/v1/completions", **FRAMEWORK)
        assert answer.headers[TOLD] == "temperature=1, top_p=1, top_k=0"
        answer = await ask(free, "/v1/completions", **FRAMEWORK)
        assert answer.status_code == 200
        assert TOLD not in answer.headers
    async with serve_gateway(**OVERRIDE) as served:
        refusing = await opened(served, override_sampling=False)
        assert (await ask(refusing, "/v1/completions", **FRAMEWORK)).status_code == 400


async def test_a_claimed_task_is_drawn_with_the_temperature_of_its_run(serve_gateway: Any) -> None:
    async with serve_gateway() as served:
        request = served.tasks_request(environment="external", reward="agent", samples_per_task=1)
        async with task_run(served, request):
            willing = await claimed(served, override_sampling=True)
            refusing = await claimed(served)
            assert willing is not None
            assert refusing is not None
            answer = await ask(willing, "/v1/completions", **FRAMEWORK)
            assert answer.headers[TOLD] == "temperature=1, top_p=1, top_k=0"
            assert await temperatures(served, willing) == [1.0]
            assert (await ask(refusing, "/v1/completions", **FRAMEWORK)).status_code == 400
            for agent in (willing, refusing):
                await ask(agent, "/v1/completions")
                await agent.act("complete", {"reward": 1.0})


async def test_a_conversation_without_a_session_is_trained_where_sampling_is_overridden(
    serve_gateway: Any,
) -> None:
    for keys, told in ((OVERRIDE, ALL_CHANGED), ({}, None)):
        async with serve_gateway(**keys) as served:
            body = {**PATHS["/v1/chat/completions"], **FRAMEWORK}
            answer = await served.http.post("/v1/chat/completions", json=body)
            assert answer.headers.get(TOLD) == told
            reward = {"completion_id": answer.json()["id"], "value": 1.0}
            session = await served.http.post("/v1/rewards", json=reward)
            assert session.json()["trainable"] is bool(told)


async def test_a_model_has_its_names_and_no_other(serve_gateway: Any) -> None:
    async with serve_gateway(api={"model_names": ["gpt-4o"]}) as served:
        listed = (await served.http.get("/v1/models")).json()["data"]
        assert [one["id"] for one in listed] == ["tiny-model", "gpt-4o"]
        assert (await served.http.get("/v1/models/gpt-4o")).json()["id"] == "gpt-4o"
        assert (await served.http.get("/v1/models/gpt-5")).status_code == 404
        for path, body in PATHS.items():
            for name in ("tiny-model", "gpt-4o", served.config.model, None):
                answer = await served.http.post(path, json={**body, "model": name})
                assert answer.status_code == 200, answer.text
            answer = await served.http.post(path, json={**body, "model": "x" * 500})
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert error["message"].endswith("allowed: tiny-model, gpt-4o")
            assert len(error["message"]) < 300
            kind = "not_found_error" if path == "/v1/messages" else "invalid_request_error"
            assert error["type"] == kind
            assert error.get("code", "model_not_found") == "model_not_found"
    async with serve_gateway(api={"model_names": ["*"]}) as served:
        answer = await served.http.post("/v1/completions", json={"prompt": "1+1=", "model": "any"})
        assert (answer.status_code, answer.json()["model"]) == (200, "tiny-model")


async def test_pages_of_the_origins_that_are_set_are_let_in_and_no_others(
    serve_gateway: Any,
) -> None:
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    body = {"prompt": "1+1=", "user": "me"}
    async with serve_gateway(api={"cors_origins": [PAGE]}) as served:
        http = served.http
        may = await http.options("/v1/completions", headers={"origin": PAGE, **preflight})
        assert may.status_code == 200
        assert may.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in may.headers["access-control-allow-headers"]
        answer = await http.post("/v1/completions", json=body, headers={"origin": PAGE})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        shown = answer.headers["access-control-expose-headers"]
        assert {"x-request-id", "x-paceline-ignored"} <= set(shown.split(", "))
        for origin in ("https://other.example", "null", f"{PAGE}.evil"):
            headers = {"origin": origin, **preflight}
            assert (await http.options("/v1/completions", headers=headers)).status_code == 400
            answer = await http.post("/v1/completions", json=body, headers={"origin": origin})
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers
        rebound = {"origin": PAGE, "host": "console.example"}
        assert (await http.get("/v1/models", headers=rebound)).status_code == 403
    async with serve_gateway() as served:
        may = await served.http.options("/v1/completions", headers={"origin": PAGE, **preflight})
        assert may.status_code == 403
        assert "access-control-allow-origin" not in may.headers
    async with serve_gateway(api={"cors_origins": ["*"]}) as served:
        answer = await served.http.get("/v1/models", headers={"origin": "https://any.example"})
        assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("value", ["refused", 1])
async def test_another_way_with_sampling_that_cannot_be_trained_is_refused(
    serve_gateway: Any, value: object
) -> None:
    with pytest.raises(ValueError, match=r"sessions\.untrainable|untrainable"):
        async with serve_gateway(sessions={"untrainable": value}):
            pass
