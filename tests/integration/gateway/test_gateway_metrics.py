"""GET /metrics of a serving gateway, as a Prometheus server reads it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from examples.scripted_engine.engine import SCRIPTED_PATH
from paceline import telemetry
from paceline.config import TelemetryConfig
from paceline.local.patience import patient
from paceline.telemetry import names
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb

Samples = dict[str, list[tuple[dict[str, str], float]]]
POLICY = Path(__file__).parents[3] / "examples" / "demo" / "policy_start"


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    telemetry.setup("gateway", TelemetryConfig())
    yield
    telemetry.shutdown()


async def scrape(http: Any) -> Samples:
    response = await http.get("/metrics")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found: Samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def by_label(found: Samples, name: str, label: str) -> dict[str, float]:
    return {labels[label]: value for labels, value in found[f"paceline_engine_{name}"]}


async def complete(http: Any, count: int) -> None:
    for seed in range(count):
        body = {"prompt": "2+2=", "max_tokens": 24, "ignore_eos": True, "seed": seed}
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text


async def test_the_page_holds_what_requests_and_rounds_gave(
    serve_gateway: Any, script: dict[str, Any]
) -> None:
    script |= {"arms": ["off", "eagle:3_1_4"], "accept_lengths": {"eagle:3_1_4": 3.0}}
    script |= {"default_cost_s": 0.01, "costs_s": {}}
    async with serve_gateway() as served:
        await complete(served.http, 6)
        found = await scrape(served.http)
        status = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
    health = status.workers[0].health
    for name in ("time_to_first_token", "time_per_output_token"):
        buckets = by_label(found, f"{name}_seconds_bucket", "le")
        assert {"0.015", "0.05", "+Inf"} <= set(buckets)
        assert buckets["+Inf"] == 6
        assert by_label(found, f"{name}_seconds_count", "engine") == {SCRIPTED_PATH: 6}
    pulls = {one.arm: one.pulls for one in health.arms}
    assert by_label(found, "arm_rounds_total", "arm") == pulls
    assert set(pulls) == {"off", "eagle:3_1_4"}
    proposed = by_label(found, "drafts_proposed_total", "position")
    assert proposed == {str(position): pulls["eagle:3_1_4"] for position in (1, 2, 3)}
    accepted = by_label(found, "drafts_accepted_total", "position")
    assert accepted["1"] > accepted["3"] == 0
    # off gives 100 tokens/s, the chain up to 300; off was chosen, so throughput was lost.
    (regret,) = by_label(found, "regret", "worker").values()
    assert 0 < regret < 2 / 3
    stages = by_label(found, "round_time_seconds_total", "stage")
    assert set(stages) == {"forward"}  # a script spends no time elsewhere
    assert stages["forward"] == pytest.approx(0.01 * sum(pulls.values()))
    assert by_label(found, "rounds_total", "engine") == {SCRIPTED_PATH: sum(pulls.values())}
    assert by_label(found, "verified_tokens_total", "engine") == {
        SCRIPTED_PATH: pulls["off"] + 4 * pulls["eagle:3_1_4"]
    }
    assert by_label(found, "tokens_total", "worker") == {"0": 6 * 24}
    assert by_label(found, "busy_time_seconds_total", "worker")["0"] == pytest.approx(
        0.01 * sum(pulls.values())
    )
    assert by_label(found, "tokens_per_second", "worker")["0"] == pytest.approx(
        144 / stages["forward"]
    )
    assert not [name for name in found if "tflops" in name]  # a scripted engine has no device
    assert found["paceline_gateway_requests_total"][0][1] == 6


async def test_a_lost_worker_is_counted_from_zero_and_the_page_goes_on(serve_gateway: Any) -> None:
    async with serve_gateway() as served:
        await complete(served.http, 2)
        assert by_label(await scrape(served.http), "tokens_total", "worker") == {"0": 48}
        status = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
        os.kill(status.workers[0].pid, signal.SIGKILL)
        await complete(served.http, 3)
        found = await scrape(served.http)
    assert by_label(found, "tokens_total", "worker") == {"0": 120}
    assert found["paceline_gateway_worker_restarts_total"][0][1] == 1


@pytest.mark.slow
async def test_the_embedded_engine_tells_tokens_per_second_per_tflops(serve_gateway: Any) -> None:
    engine = {"kind": "embedded", "workers": 1, "max_sequence_tokens": 64}
    async with serve_gateway(model=str(POLICY), drafter="ngram", engine=engine) as served:
        await complete(served.http, 2)
        found = await scrape(served.http)
    tflops = by_label(found, "device_tflops", "worker")["0"]
    assert tflops > 0
    per_second = by_label(found, "tokens_per_second", "worker")["0"]
    assert by_label(found, "tokens_per_second_per_tflops", "worker")["0"] == pytest.approx(
        per_second / tflops
    )
    stages = by_label(found, "round_time_seconds_total", "stage")
    assert min(stages["prefill"], stages["forward"], stages["sample"], stages["keep"]) > 0
    assert 0 <= by_label(found, "kv_hit_rate", "worker")["0"] < 1


async def test_metrics_need_the_token_when_there_is_one(
    serve_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "secret")
    async with serve_gateway() as served:
        assert (await served.http.get("/metrics")).status_code == 401
        wrong = await served.http.get("/metrics", headers={"authorization": "Bearer other"})
        assert wrong.status_code == 401
        allowed = await served.http.get("/metrics", headers={"authorization": "Bearer secret"})
        assert allowed.status_code == 200


async def test_a_process_without_telemetry_refuses_its_metrics(serve_gateway: Any) -> None:
    telemetry.shutdown()
    async with serve_gateway() as served:
        response = await served.http.get("/metrics")
    assert response.status_code == 404
    assert "while telemetry runs" in response.json()["error"]["message"]


async def test_spans_of_requests_and_rollouts_tell_times_split_and_regret(
    serve_gateway: Any, tmp_path: Path
) -> None:
    telemetry.setup("gateway", TelemetryConfig(spans_dir=str(tmp_path / "spans")))
    async with serve_gateway(engine={"workers": 2}) as served:
        await complete(served.http, 1)
        request = served.tasks_request(purpose=tpb.PURPOSE_EVAL)
        news = [one async for one in served.stub.RunTasks(request, timeout=patient(20))]
        again = [one async for one in served.stub.RunTasks(request, timeout=patient(20))]
    telemetry.shutdown()
    (path,) = (tmp_path / "spans").glob("gateway-*.jsonl")
    spans = [json.loads(line) for line in path.read_text().splitlines()]
    asked = [span["attributes"] for span in spans if span["name"] == "engine.request"]
    assert len(asked) == 9
    for one in asked:
        assert one[names.GEN_AI_CACHED_TOKENS] == 0
        assert one[names.GEN_AI_FIRST_CHUNK_S] > 0
        assert one[names.TIME_PER_OUTPUT_TOKEN_S] >= 0
    first, second = [span["attributes"] for span in spans if span["name"] == "rollout.run_tasks"]
    finished = [each[-1].finished for each in (news, again)]
    assert [first[names.REGRET], second[names.REGRET]] == [one.regret for one in finished]
    for run, steps in ((first, asked), (second, asked[5:])):
        assert run[names.ROUNDS] <= sum(one[names.TARGET_STEPS] for one in steps)
        assert run[names.round_time_s("forward")] > 0
    # Arms are counted from the engines' start, the time split from the last measurement.
    whole = sum(count for name, count in second.items() if name.startswith(names.arm_rounds("")))
    assert first[names.ROUNDS] + second[names.ROUNDS] == whole
