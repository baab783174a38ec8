"""Reasons for a step's duration: synthetic spans with one planted culprit."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doc_pages import ROOT, blocks_of, reader
from rich.console import Console

from paceline.cli.report import show_why
from paceline.errors import NotFound
from paceline.report import why
from paceline.report.why import explain
from paceline.telemetry import names


def trace_of(step: int) -> str:
    return f"{step + 1:06x}{'a' * 26}"


def span(
    trace: str, name: str, span_id: int, start_s: float, end_s: float, **more: Any
) -> dict[str, Any]:
    parent = more.pop("parent", 0)
    known = {"kind": "internal", "service": "gateway", "attributes": {}, "links": [], **more}
    return {
        "trace_id": trace,
        "span_id": f"{span_id:016x}",
        "parent_id": f"{parent:016x}" if parent else "",
        "name": name,
        "start_ns": int(start_s * 1e9),
        "end_ns": int(end_s * 1e9),
        **known,
    }


def step_spans(step: int, decode_s: float, train_s: float) -> list[dict[str, Any]]:
    """A step of a rollout and an optimiser step, with 0.1 s of the coordinator's between."""
    trace, at, first = trace_of(step), 100.0 * step, 100 * (step + 1)
    trained = at + decode_s + 0.1
    call = {"kind": "client", "service": "coordinator"}
    return [
        span(
            trace,
            names.STEP,
            first,
            at,
            trained + train_s,
            service="coordinator",
            attributes={names.RL_STEP: step},
        ),
        span(trace, "RolloutService.RunTasks", first + 1, at, at + decode_s, parent=first, **call),
        span(
            trace,
            "RolloutService.RunTasks",
            first + 2,
            at,
            at + decode_s,
            parent=first + 1,
            kind="server",
        ),
        span(
            trace,
            names.SESSION,
            first + 3,
            at,
            at + decode_s,
            parent=first + 2,
            attributes={names.SESSION_ID: f"{step}-hard-0"},
        ),
        span(
            trace,
            "engine.decode",
            first + 4,
            at,
            at + decode_s,
            parent=first + 3,
            attributes={names.WORKER: 1},
        ),
        span(
            trace,
            "PolicyService.TrainStep",
            first + 5,
            trained,
            trained + train_s,
            parent=first,
            **call,
        ),
        span(
            trace,
            "PolicyService.TrainStep",
            first + 6,
            trained,
            trained + train_s,
            parent=first + 5,
            kind="server",
            service="policy_trainer",
        ),
        span(
            trace,
            names.OPTIMIZER_STEP,
            first + 7,
            trained,
            trained + train_s,
            parent=first + 6,
            service="policy_trainer",
        ),
    ]


def write(directory: Path, spans: list[dict[str, Any]]) -> Path:
    folder = directory / "spans"
    folder.mkdir(exist_ok=True)
    by_service: dict[str, str] = {}
    for one in spans:
        by_service[one["service"]] = by_service.get(one["service"], "") + json.dumps(one) + "\n"
    for service, text in by_service.items():
        (folder / f"{service}-1.jsonl").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def spans(tmp_path: Path) -> Path:
    """Five steps of 1.0 s in the engine and 0.5 s of training, one of which trains for 2.5 s."""
    found = [one for step in range(5) for one in step_spans(step, 1.0, 2.5 if step == 3 else 0.5)]
    return write(tmp_path, found)


CALL = "coordinator → policy_trainer PolicyService.TrainStep"


def test_the_cause_of_a_slow_step_is_what_took_longer_than_in_the_median_step(spans: Path) -> None:
    found = explain(spans, 3)
    assert (found.step, found.peers) == (3, 4)
    assert found.seconds == pytest.approx(3.6)
    assert found.median_s == pytest.approx(1.6)
    assert found.cause == (
        "step 3 took 3.60 s, 2.00 s more than the median, and 2.00 s more of it went to "
        f"policy.optimizer_step ({CALL})"
    )
    train, rollout, own = found.parts
    assert (train.edge, train.name) == (CALL, names.OPTIMIZER_STEP)
    assert (train.seconds, train.median_s) == (pytest.approx(2.5), pytest.approx(0.5))
    assert (rollout.seconds, rollout.more_s) == (pytest.approx(1.0), pytest.approx(0.0))
    assert (own.edge, own.seconds) == ("coordinator", pytest.approx(0.1))


def test_without_a_number_the_slowest_step_is_explained(spans: Path) -> None:
    assert explain(spans).step == 3


def test_of_a_usual_step_it_says_what_it_consists_of(spans: Path) -> None:
    assert explain(spans, 2).cause == (
        "step 2 took 1.60 s (median 1.60 s), and 62% of it went to engine.decode "
        "(coordinator → gateway RolloutService.RunTasks)"
    )


def test_the_only_step_is_compared_with_nothing(tmp_path: Path) -> None:
    found = explain(write(tmp_path, step_spans(0, 1.0, 0.5)), 0)
    assert (found.median_s, found.peers) == (None, 0)
    assert found.cause.startswith("step 0 took 1.60 s, and 62% of it went to engine.decode")


def test_lines_that_are_no_spans_are_passed_over(spans: Path) -> None:
    with (spans / "gateway-1.jsonl").open("a") as lines:
        lines.write('{"name": "step", "trace_id": "' + trace_of(3) + '", cut off')
    assert explain(spans, 3).seconds == pytest.approx(3.6)


def test_the_span_of_a_step_is_kept_behind_very_many_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(why, "_SPANS", 1)
    first, *others = step_spans(0, 1.0, 0.5)
    assert explain(write(tmp_path, [*others, {**first, "service": "z"}]), 0).seconds == 1.6


def test_a_step_without_a_span_is_named_with_the_steps_there_are(spans: Path) -> None:
    with pytest.raises(NotFound, match="seen: 7; allowed: 0 to 4"):
        explain(spans, 7)


def test_a_run_without_spans_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no step of the run has a span"):
        explain(tmp_path / "none")


def run_of(tmp_path: Path, folder: Path) -> str:
    (tmp_path / "config.toml").write_text(f'[telemetry]\nspans_dir = "{folder}"\n')
    return str(tmp_path)


def test_the_command_prints_the_cause_and_a_table(tmp_path: Path, spans: Path) -> None:
    shown = io.StringIO()
    show_why(run_of(tmp_path, spans), 3, Console(file=shown, width=140))
    text = shown.getvalue()
    assert text.startswith("step 3 took 3.60 s, 2.00 s more than the median")
    assert CALL in text
    assert "+2.000" in text
    assert "median of 4" in text


@pytest.mark.slow
def test_the_page_shows_what_the_command_says_of_such_a_run(tmp_path: Path) -> None:
    (run := tmp_path / "runs/demo-0-1").mkdir(parents=True)
    found = [
        one for step in range(5) for one in step_spans(step, 1.94, 2.58 if step == 2 else 0.55)
    ]
    run_of(run, write(run, found))
    (block,) = [
        one for one in blocks_of(ROOT / "docs/telemetry.md") if __name__.split(".")[-1] in one.what
    ]
    with reader(tmp_path, str) as one:
        one.play(replace(block, how=""))
