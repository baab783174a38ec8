"""Spans, their file, their context on the wire, and log lines."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry._logs import SeverityNumber
from opentelemetry.metrics import CallbackOptions, NoOpMeter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from paceline import telemetry
from paceline.config import TelemetryConfig
from paceline.errors import NotFound
from paceline.telemetry.exporters import SpanFileExporter
from paceline.telemetry.log import exporting
from paceline.telemetry.metrics import Counter, Histogram, UpDownCounter


@pytest.fixture(autouse=True)
def _shut_down() -> Iterator[None]:
    yield
    telemetry.shutdown()


def start(directory: Path, **settings: Any) -> None:
    telemetry.setup("gateway", TelemetryConfig(spans_dir=str(directory), **settings))


def written(directory: Path) -> dict[str, dict[str, Any]]:
    telemetry.shutdown()
    (path,) = directory.glob("gateway-*.jsonl")
    return {record["name"]: record for record in map(json.loads, path.read_text().splitlines())}


def test_a_span_becomes_one_line_with_its_parent_links_and_attributes(tmp_path: Path) -> None:
    start(tmp_path)
    with telemetry.span("elsewhere"):
        link = telemetry.inject()["traceparent"]
    with (
        telemetry.span("step", {"step": 3, "names": ("a", "b")}, kind="server"),
        telemetry.span("inner", links=[link, "bad"]),
    ):
        pass
    spans = written(tmp_path)
    outer, inner = spans["step"], spans["inner"]
    keys = "trace_id span_id parent_id name kind service start_ns end_ns attributes links status"
    assert list(outer) == keys.split()
    assert (outer["kind"], outer["service"], outer["parent_id"], outer["status"]) == (
        "server",
        "gateway",
        "",
        "unset",
    )
    assert outer["attributes"] == {"step": 3, "names": ["a", "b"]}
    assert (inner["trace_id"], inner["parent_id"]) == (outer["trace_id"], outer["span_id"])
    assert inner["links"] == [link]
    assert outer["start_ns"] <= inner["start_ns"] <= inner["end_ns"] <= outer["end_ns"]


def test_a_span_is_linked_to_what_it_used_when_it_ends(tmp_path: Path) -> None:
    start(tmp_path)
    with telemetry.span("elsewhere"):
        link = telemetry.inject()["traceparent"]
    with telemetry.span("step"):
        telemetry.link_current({link, "bad"})
    telemetry.link_current({link})  # no span, no link
    assert written(tmp_path)["step"]["links"] == [link]


def test_an_exception_marks_the_span_and_passes_through(tmp_path: Path) -> None:
    start(tmp_path)
    with pytest.raises(ValueError, match="no good"), telemetry.span("fails"):
        raise ValueError("no good")
    record = written(tmp_path)["fails"]
    assert record["status"] == "error"
    assert record["attributes"] == {"error.type": "ValueError", "error.message": "no good"}


def test_the_context_survives_every_carrier(tmp_path: Path) -> None:
    start(tmp_path)
    with telemetry.span("here"):
        trace_id = telemetry.current_trace_id()
        carrier = telemetry.inject()
    contexts = {
        "fields": telemetry.extract({**carrier, "run": "local"}),
        "bytes": telemetry.extract({key: value.encode() for key, value in carrier.items()}),
        "metadata": telemetry.extract({"authorization": "x", **carrier}),
    }
    for name, context in contexts.items():
        with telemetry.span(name, parent=context):
            assert telemetry.current_trace_id() == trace_id
    spans = written(tmp_path)
    assert {spans[name]["parent_id"] for name in contexts} == {spans["here"]["span_id"]}


@pytest.mark.parametrize(
    "traceparent",
    [b"", b"garbage", b"\xff\xfe", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01"],
)
def test_a_broken_carrier_begins_a_new_trace(tmp_path: Path, traceparent: bytes) -> None:
    start(tmp_path)
    with telemetry.span("outer"):
        outer = telemetry.current_trace_id()
        context = telemetry.extract({"traceparent": traceparent})
        with telemetry.span("inner", parent=context):
            assert telemetry.current_trace_id() not in ("", outer)


def test_outside_any_span_there_is_no_trace() -> None:
    assert (telemetry.current_trace_id(), telemetry.inject()) == ("", {})


def test_ids_do_not_repeat_when_a_run_seeds_its_randomness(tmp_path: Path) -> None:
    start(tmp_path)
    seen = set()
    for _ in range(2):
        random.seed(0)
        with telemetry.span("seeded"):
            seen.add(telemetry.current_trace_id())
    assert len(seen) == 2


def test_setup_again_begins_new_providers(tmp_path: Path) -> None:
    start(tmp_path / "a")
    start(tmp_path / "b")
    with telemetry.span("second"):
        pass
    assert "second" in written(tmp_path / "b")


def test_a_file_at_its_limit_takes_no_more_and_says_what_it_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    telemetry.setup("x", TelemetryConfig(log_json=True))
    exporter = SpanFileExporter(tmp_path / "s.jsonl", "x", max_bytes=1000)
    for span in finished(10):
        exporter.export([span])
    exporter.shutdown()
    lines = (tmp_path / "s.jsonl").read_text().splitlines()
    assert 0 < len(lines) < 10
    assert (tmp_path / "s.jsonl").stat().st_size < 1000 + len(lines[0]) + 1
    assert json.loads(capsys.readouterr().err)["dropped"] == 10 - len(lines)


def test_a_span_file_is_continued_and_never_overwritten(tmp_path: Path) -> None:
    for _ in range(2):
        exporter = SpanFileExporter(tmp_path / "s.jsonl", "x")
        exporter.export(finished(2))
        exporter.shutdown()
    assert len((tmp_path / "s.jsonl").read_text().splitlines()) == 4


def test_attributes_that_json_lacks_become_text(tmp_path: Path) -> None:
    start(tmp_path)
    odd = {"value": float("nan"), "many": (1.0, float("inf")), "text": "\ud800"}
    with telemetry.span("odd", odd):
        pass
    assert written(tmp_path)["odd"]["attributes"] == {
        "value": "nan",
        "many": [1.0, "inf"],
        "text": "\ud800",
    }


def finished(count: int) -> list[ReadableSpan]:
    provider = TracerProvider(shutdown_on_exit=False)
    spans = [provider.get_tracer("test").start_span(f"s{index}") for index in range(count)]
    for span in spans:
        span.end()
    return [span for span in spans if isinstance(span, ReadableSpan)]


def test_json_log_lines_carry_service_source_and_trace(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.setup("gateway", TelemetryConfig(log_json=True, log_level="warning"))
    log = telemetry.get_logger("router")
    with telemetry.span("request"):
        trace_id = telemetry.current_trace_id()
        log.info("not shown")
        log.warning("shown", worker=2)
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert (record["event"], record["worker"], record["service"], record["source"]) == (
        "shown",
        2,
        "gateway",
        "router",
    )
    assert (record["trace_id"], record["level"]) == (trace_id, "warning")


@pytest.mark.parametrize("log_json", [True, False])
def test_a_logged_traceback_shows_no_local_variables(
    capsys: pytest.CaptureFixture[str], log_json: bool
) -> None:
    telemetry.setup("gateway", TelemetryConfig(log_json=log_json))
    password = "hunter2"
    try:
        raise KeyError(len(password))
    except KeyError:
        telemetry.get_logger("x").exception("failed")
    shown = capsys.readouterr().err
    assert "KeyError" in shown
    assert "Traceback" in shown
    assert shown.count("hunter2") == 0


TOKENS = Counter("paceline.tokens", "{token}", ("arm",))
"""tokens
by arm"""


def test_metrics_are_on_the_page_in_prometheus_names_and_gone_with_the_process(
    tmp_path: Path,
) -> None:
    start(tmp_path)
    TOKENS.record(5, arm="off")
    Histogram("paceline.wait", "s", (), (0.015, 0.05)).record(0.02)
    lines = telemetry.prometheus_page().decode().splitlines()
    assert 'paceline_tokens_total{arm="off"} 5.0' in lines
    assert "# HELP paceline_tokens_total tokens by arm" in lines
    buckets = [line for line in lines if line.startswith("paceline_wait_seconds_bucket")]
    counts = {"0.015": 0.0, "0.05": 1.0, "+Inf": 1.0}
    assert buckets == [
        f'paceline_wait_seconds_bucket{{le="{le}"}} {count}' for le, count in counts.items()
    ]
    start(tmp_path)
    assert "paceline_tokens" not in telemetry.prometheus_page().decode()
    TOKENS.record(1, arm="off")
    assert 'paceline_tokens_total{arm="off"} 1.0' in telemetry.prometheus_page().decode()
    telemetry.shutdown()
    with pytest.raises(NotFound, match="has no metrics"):
        telemetry.prometheus_page()


def test_a_reader_may_call_an_instrument_while_it_is_made() -> None:
    read: list[Any] = []

    class Eager(NoOpMeter):
        """A meter that is read at each new instrument, as from another thread."""

        def create_observable_up_down_counter(self, *args: Any, **named: Any) -> Any:
            (callback,) = named["callbacks"]
            read.append(callback(CallbackOptions()))

    metric = UpDownCounter("paceline.waiting", "{request}")
    metric.instrument(Eager("test"), {"name": "paceline.waiting"})(1, {})
    assert read == [[]]


def test_a_process_that_exports_no_spans_has_traces_and_passes_on_its_callers() -> None:
    telemetry.setup("gateway", TelemetryConfig())
    with telemetry.span("alone") as alone:
        own = telemetry.inject()
        assert own["traceparent"].endswith("-01")
        assert telemetry.current_trace_id() in own["traceparent"]
    with telemetry.span("next"):
        assert telemetry.current_trace_id() not in own["traceparent"]
    for flags in ("00", "01"):
        caller = {"traceparent": f"00-{7:032x}-{9:016x}-{flags}"}
        with telemetry.span("step", {"step": 3}, parent=telemetry.extract(caller)) as step:
            with telemetry.span("inner", links=[caller["traceparent"]]) as inner:
                inner.set_attribute("tokens", 4)
                assert telemetry.inject() == caller
            assert telemetry.inject() == caller
    assert not any(one.is_recording() for one in (alone, step, inner))


def test_the_last_span_is_known_while_spans_are_exported(tmp_path: Path) -> None:
    start(tmp_path)
    with telemetry.span("step"), telemetry.span("inner"):
        pass
    with telemetry.span("ProgressService.GetProgress"):
        pass
    name, ago_s = telemetry.last_span()
    assert (name, ago_s < 60) == ("step", True)


@pytest.mark.parametrize(
    ("level", "number"),
    [
        ("warning", SeverityNumber.WARN),
        ("error", SeverityNumber.ERROR),
        ("critical", SeverityNumber.FATAL),
        ("notice", SeverityNumber.INFO),  # of a library
    ],
)
def test_each_level_of_a_log_line_has_a_severity(level: str, number: SeverityNumber) -> None:
    kept, provider = InMemoryLogRecordExporter(), LoggerProvider()
    provider.add_log_record_processor(SimpleLogRecordProcessor(kept))
    exporting(provider)(None, "", {"event": "a line", "level": level})
    (line,) = kept.get_finished_logs()
    assert line.log_record.severity_number == number
