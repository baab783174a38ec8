"""Spans, metrics and log records reach an OTLP collector only when the standard variable names a
collector.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from ipv6 import LOOPBACK_HOSTS
from otlp_receiver import VARIABLES, OtlpReceiver, receiving

from paceline import telemetry
from paceline.config import TelemetryConfig
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.telemetry.metrics import Counter


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    with receiving() as started:
        yield started


@pytest.fixture
def wanted(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> OtlpReceiver:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    return receiver


def work() -> str:
    """A process's work; returns the id of its span."""
    telemetry.setup("gateway", TelemetryConfig(log_level="info"))
    Counter("tokens", "1").record(5)
    log = telemetry.get_logger("router")
    log.debug("too little to tell")
    with telemetry.span("step", {"step": 1}) as step:
        log.info("a worker is gone", worker=2, share=0.5, reason=ValueError("no good"))
        span_id = f"{step.get_span_context().span_id:016x}"
    telemetry.shutdown()
    return span_id


def test_spans_and_metrics_are_exported_under_the_services_name(wanted: OtlpReceiver) -> None:
    span_id = work()
    (span,) = wanted.spans
    assert (span.service, span.name, span.span_id) == ("gateway", "step", span_id)
    assert span.attributes == {"step": 1}
    (counter,) = wanted.metrics["gateway"]
    assert (counter.name, counter.sum.data_points[0].as_int) == ("tokens", 5)


def test_log_records_are_exported_with_the_trace_and_span_they_were_written_in(
    wanted: OtlpReceiver,
) -> None:
    span_id = work()
    (record,) = wanted.logs
    assert (record.service, record.body, record.level) == ("gateway", "a worker is gone", "info")
    assert (record.trace_id, record.span_id) == (wanted.spans[0].trace_id, span_id)
    assert record.attributes == {
        "source": "router",
        "worker": 2,
        "share": 0.5,
        "reason": "no good",
    }


def test_an_exception_goes_along_and_those_of_libraries_from_warning_on(
    wanted: OtlpReceiver, capsys: pytest.CaptureFixture[str]
) -> None:
    telemetry.setup("gateway", TelemetryConfig())
    try:
        raise KeyError("lost")
    except KeyError:
        telemetry.get_logger("x").exception("failed")
        logging.getLogger("library").exception("failed too")
    logging.getLogger("library").info("not told")
    logging.getLogger("opentelemetry.sdk").warning("of the export itself")
    telemetry.shutdown()
    assert [one.body for one in wanted.logs] == ["failed", "failed too"]
    for one in wanted.logs:
        assert one.attributes["exception.type"] == "KeyError"
        assert "raise KeyError" in one.attributes["exception.stacktrace"]
    assert wanted.logs[1].attributes["source"] == "library"
    shown = capsys.readouterr().err
    assert shown.count("Traceback") == 2  # stderr shows both exceptions as before
    assert "of the export itself" in shown


def test_one_signal_can_have_an_endpoint_of_its_own(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", receiver.endpoint)
    work()
    assert len(receiver.logs) == 1
    assert receiver.spans == []
    assert receiver.metrics == {}


def test_a_log_after_the_end_is_written_and_breaks_nothing(
    wanted: OtlpReceiver, capsys: pytest.CaptureFixture[str]
) -> None:
    work()
    telemetry.get_logger("router").warning("last words")
    assert "last words" in capsys.readouterr().err
    assert wanted.until(lambda: len(wanted.logs) == 1, patient(5))


def test_nothing_is_exported_unless_asked(receiver: OtlpReceiver) -> None:
    work()
    assert (receiver.spans, receiver.logs, receiver.metrics) == ([], [], {})


@pytest.fixture(params=["refuses", "is silent"])
def dead_endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of an absent or silent collector."""
    if request.param == "refuses":
        yield f"http://127.0.0.1:{free_port()}"
        return
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"http://127.0.0.1:{silent.getsockname()[1]}"


@pytest.mark.parametrize("tried_before", [False, True])
def test_a_dead_collector_delays_the_end_by_two_seconds_at_most_and_costs_one_warning(
    dead_endpoint: str,
    tried_before: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", dead_endpoint)
    if tried_before:  # an export and its backoff are under way at the end
        for variable in ("OTEL_BSP_SCHEDULE_DELAY", "OTEL_BLRP_SCHEDULE_DELAY"):
            monkeypatch.setenv(variable, "1")
    telemetry.setup("gateway", TelemetryConfig(log_level="info"))
    Counter("tokens", "1").record(5)
    with telemetry.span("step"):
        telemetry.get_logger("router").info("a worker is gone")
    began = time.monotonic()
    telemetry.shutdown()
    assert time.monotonic() - began < patient(3.0)
    lines = capsys.readouterr().err.splitlines()
    about = [line for line in lines if "opentelemetry" in line]
    assert len(about) == 1, lines
    assert "warning" in about[0]
    assert not any("Traceback" in line for line in lines)


PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


@pytest.mark.parametrize("spell", [str.lower, str.upper])
def test_a_collector_on_this_machine_is_reached_without_a_proxy(
    wanted: OtlpReceiver, spell: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PROXIES:
        monkeypatch.setenv(spell(name), "http://127.0.0.1:9")
    span_id = work()
    assert [span.span_id for span in wanted.spans] == [span_id]
    assert wanted.logs
    assert wanted.metrics["gateway"]


@pytest.mark.parametrize("host", LOOPBACK_HOSTS)
def test_a_collector_is_reached_over_ipv4_and_ipv6(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving(host) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        span_id = work()
        assert [span.span_id for span in receiver.spans] == [span_id]
