"""Latencies per edge."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from paceline.report import spans as spans_module
from paceline.report.spans import SpanReport, read_report


def edge(report: SpanReport, transport: str) -> spans_module.Edge:
    return next(one for one in report.edges if one.transport == transport)


def test_a_call_is_timed_as_its_caller_saw_it(spans: SpanReport) -> None:
    call = edge(spans, "gRPC")
    assert (call.source, call.target, call.method, call.count) == (
        "coordinator",
        "gateway",
        "RolloutService.RunTasks",
        100,
    )
    expected = np.quantile(np.arange(1, 101) / 1e3, [0.5, 0.95, 0.99])
    assert call.quantiles_s == pytest.approx(expected, abs=1e-6)


def test_a_redis_hop_is_the_time_from_the_end_of_the_append_to_the_read(spans: SpanReport) -> None:
    hop = edge(spans, "Redis")
    assert (hop.source, hop.target, hop.count) == ("gateway", "policy_trainer", 100)
    expected = np.quantile(np.arange(1, 101) / 1e3, [0.5, 0.95, 0.99])
    assert hop.quantiles_s == pytest.approx(expected, abs=1e-6)


def test_an_entry_read_by_a_waiting_reader_waited_nothing(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    lines = [
        synthetic.span("trajectory.append", "gateway", 1, 5, 9, kind="producer"),
        synthetic.span("trajectory.read", "policy_trainer", 2, 2, 10, kind="consumer", links=[1]),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    assert edge(read_report(tmp_path), "Redis").quantiles_s[2] == 0.0


def test_lines_cut_by_a_kill_are_left_out(tmp_path: Path, synthetic: ModuleType) -> None:
    whole = json.dumps(synthetic.span("step", "coordinator", 1, 0, 5))
    (tmp_path / "a.jsonl").write_text(whole + "\n" + whole[: len(whole) // 2] + "\n[1]\n")
    assert read_report(tmp_path).spans == 1


def test_memory_is_bounded_and_what_is_left_out_is_counted(
    tmp_path: Path, synthetic: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans_module, "_INDEXED", 10)
    synthetic.write_spans(tmp_path)
    report = read_report(tmp_path)
    assert report.left_out == 190  # 100 callers and 100 producers, 10 remembered
    assert edge(report, "gRPC").count == 10
    assert edge(report, "gRPC").quantiles_s[2] <= 0.010


def test_a_run_without_spans_has_an_empty_report(tmp_path: Path) -> None:
    assert read_report(tmp_path / "missing") == SpanReport()
