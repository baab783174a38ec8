"""The serving bench: its figures on times made by hand, and once with a real worker."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import uvloop

from benchmarks import serving
from benchmarks.bench_worker import EndedRequest
from benchmarks.serving_tables import EngineFound, Reused, Served, measures, served_of, table_rows
from paceline.errors import InvalidInput
from paceline.v1 import engine_pb2 as pb


def ended(tokens: int, first_s: float, after_s: float) -> EndedRequest:
    chunk = pb.TokenChunk(token_ids=range(tokens), time_to_first_token_s=first_s)
    return EndedRequest(chunk, after_s)


def runs(batch: int, per_token_s: float, rate: float) -> list[Served]:
    """Return one run of `batch` requests, with 10 tokens each after the first."""
    decoded = 10 * batch
    return [Served((0.1,) * batch, (per_token_s,) * batch, decoded, decoded / rate, ())]


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serving.add_arguments(parser)
    return parser.parse_args(words)


def test_prompts_are_no_part_of_the_seconds_of_decoding() -> None:
    found = served_of([ended(11, 0.5, 2.5), ended(5, 0.75, 1.75), ended(1, 0.25, 0.25)])
    assert found.first_s == (0.5, 0.75, 0.25)
    assert found.per_token_s == pytest.approx((0.2, 0.25))  # one token alone has no time per token
    assert (found.decoded, found.decoding_s) == (14, 1.75)
    assert found.decode_rate == pytest.approx(8.0)


def test_a_level_holds_with_the_fastest_batch_that_keeps_it() -> None:
    served = {1: runs(1, 0.004, 250.0), 8: runs(8, 0.014, 500.0), 32: runs(32, 0.06, 700.0)}
    one = EngineFound(0.5, 3000.0, {"off": served}, {})
    found = measures(one, "off", 0.5)
    assert found["prefill tokens/s per TFLOPS"] == 6000
    for level in ("50", "15"):
        assert found[f"TPOT <= {level} ms: decode tokens/s"] == 500
        assert found[f"TPOT <= {level} ms: per TFLOPS"] == 1000
        assert found[f"TPOT <= {level} ms: requests at once"] == 8


def test_a_level_that_no_batch_keeps_has_no_throughput() -> None:
    one = EngineFound(0.5, 3000.0, {"off": {1: runs(1, 0.02, 50.0)}}, {})
    found = measures(one, "off", 0.0)
    assert found["TPOT <= 15 ms: decode tokens/s"] == "none"
    assert found["TPOT <= 50 ms: decode tokens/s"] == 50
    assert found["TPOT <= 50 ms: per TFLOPS"] is None


def test_engines_stand_beside_each_other_and_share_the_peak() -> None:
    reused = {0.5: [Reused(0.2, 128, 1e-4, 2e-4)]}
    found = {
        "embedded": EngineFound(0.5, 3000.0, {"off": {1: runs(1, 0.004, 250.0)}}, reused),
        "sglang": EngineFound(0.4, 1500.0, {"off": {1: runs(1, 0.01, 100.0)}}, reused),
    }
    rows = table_rows(found, 0.5)
    (prefill,) = [row for row in rows if row.get("measure") == "prefill tokens/s per TFLOPS"]
    assert (prefill["embedded, off"], prefill["sglang, off"]) == (6000, 3000)
    cached = [row for row in rows if row.get("tier") == "device"]
    assert [row["engine"] for row in cached] == ["embedded", "sglang"]
    assert cached[0]["lookup us"] == pytest.approx(100.0)


@pytest.mark.parametrize("words", [["--engine", "vllm"], ["--engine", ""]])
def test_an_engine_that_is_none_is_refused(words: list[str]) -> None:
    with pytest.raises(InvalidInput, match="embedded, sglang"):
        serving.engines_of(options(*words).engine)


def test_more_tokens_than_the_model_takes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="<= 512"):
        serving.plan_of(options("--prompt-tokens", "500"))


@pytest.mark.parametrize("words", [["--tflops", "0"], ["--batches", "0,2"], ["--repeats", "x"]])
def test_numbers_that_cannot_be_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        options(*words)


@pytest.mark.slow
@pytest.mark.usefixtures("own_forkserver")
def test_a_real_worker_is_measured_and_its_tokens_are_the_same_with_all_arms(
    tmp_path: Path,
) -> None:
    words = ["--engine", "embedded", "--quick", "--tflops", "0.5", "--response-tokens", "16"]
    result = uvloop.run(serving.run(options(*words)))
    (goal,) = result.goals
    assert goal.met
    figures = {row["measure"]: row for row in result.rows if "measure" in row}
    prefill = figures["prefill tokens/s"]["embedded, off"]
    assert isinstance(prefill, int)
    assert figures["prefill tokens/s per TFLOPS"]["embedded, off"] == pytest.approx(
        prefill / 0.5, abs=2
    )
    found = [row["tokens found"] for row in result.rows if "tier" in row]
    assert found == [0, 128, 230]  # of 256: none, half, nine tenths
