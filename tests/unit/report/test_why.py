"""Why a step took as long as it did: runs of synthetic spans with a culprit that is known."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doc_pages import ROOT, blocks_of, reader
from rich.console import Console

from paceline.cli.why import show_why
from paceline.errors import InvalidInput, NotFound
from paceline.report.why import explain
from paceline.telemetry import names

AGENT = "c0ffee" + "0" * 26


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


def test_the_culprit_of_a_slow_step_is_what_took_longer_than_in_the_median_step(
    spans: Path,
) -> None:
    told = explain(spans, "3")
    assert (told.title, told.peers) == ("step 3", 4)
    assert told.seconds == pytest.approx(3.6)
    assert told.median_s == pytest.approx(1.6)
    assert told.culprit == (
        "step 3 took 3.60 s, 2.00 s more than the median, and 2.00 s more of it went to "
        "policy.optimizer_step in policy_trainer (longest piece 2.50 s)"
    )
    train, rollout, own = told.edges
    assert train.edge == "coordinator → policy_trainer PolicyService.TrainStep"
    assert (train.seconds, train.median_s) == (pytest.approx(2.5), pytest.approx(0.5))
    assert train.share == pytest.approx(2.5 / 3.6)
    assert (rollout.seconds, rollout.more_s) == (pytest.approx(1.0), pytest.approx(0.0))
    assert (own.edge, own.seconds) == ("coordinator", pytest.approx(0.1))
    assert [one.span.name for one in told.path] == [
        "engine.decode",
        names.STEP,
        names.OPTIMIZER_STEP,
    ]


def test_without_a_name_the_slowest_step_is_explained(spans: Path) -> None:
    assert explain(spans).title == "step 3"


def test_of_a_usual_step_it_says_what_it_consists_of(spans: Path) -> None:
    assert explain(spans, "2").culprit == (
        "step 2 took 1.60 s, as long as others (median 1.60 s), and 62% of it is engine.decode in "
        "gateway (longest piece 1.00 s: session 2-hard-0, worker 1)"
    )


def test_of_a_quick_step_it_says_by_how_much(tmp_path: Path) -> None:
    found = [one for step in range(3) for one in step_spans(step, 0.4 if step == 1 else 1.0, 0.5)]
    assert ", 0.60 s less than the median, and " in explain(write(tmp_path, found), "1").culprit


def test_the_only_step_is_compared_with_nothing(tmp_path: Path) -> None:
    told = explain(write(tmp_path, step_spans(0, 1.0, 0.5)), "0")
    assert (told.median_s, told.peers) == (None, 0)
    assert told.culprit.startswith("step 0 took 1.60 s, and 62% of it is engine.decode in gateway")


def test_a_step_is_found_by_its_trace_too(spans: Path) -> None:
    assert explain(spans, trace_of(3)[:8]).culprit == explain(spans, "3").culprit
    assert explain(spans, trace_of(3)).title == "step 3"


def test_an_agents_trace_is_compared_with_others_of_its_kind(tmp_path: Path) -> None:
    calls = [
        span(f"{number:06x}{'b' * 26}", names.HTTP_REQUEST, number, number, number + 1)
        for number in range(1, 5)
    ]
    slow = span(AGENT, names.HTTP_REQUEST, 90, 50, 53)
    inner = span(AGENT, names.ENGINE_REQUEST, 91, 50, 52.9, parent=90)
    told = explain(write(tmp_path, [*calls, slow, inner]), "c0ffee")
    assert (told.title, told.peers, told.median_s) == ("trace c0ffee00", 4, 1.0)
    assert "2.90 s more of it went to engine.request in gateway" in told.culprit


def test_calls_below_an_agents_own_span_are_one_trace_of_a_caller(tmp_path: Path) -> None:
    calls = [span(AGENT, names.HTTP_REQUEST, n, n, n + 0.5, parent=77) for n in range(1, 4)]
    told = explain(write(tmp_path, calls), AGENT)
    assert (told.seconds, told.peers) == (2.5, 0)
    assert {one.edge for one in told.edges} == {"caller"}


def test_what_an_agent_asked_of_the_engine_is_part_of_the_step_that_has_its_session(
    tmp_path: Path,
) -> None:
    spans = step_spans(0, 1.0, 0.5)
    session = next(one for one in spans if one["name"] == names.SESSION)
    spans = [one for one in spans if one["name"] != "engine.decode"]
    link = f"00-{AGENT}-{88:016x}-01"
    session["links"] = [link]
    spans += [
        span(AGENT, names.AGENT_SESSION, 88, 0, 1),
        span(AGENT, names.ENGINE_REQUEST, 89, 0.2, 1.0, links=[link]),
        span(AGENT, "engine.decode", 90, 0.3, 1.0, parent=89),
        span(AGENT, names.ENGINE_REQUEST, 91, 0.2, 1.0),  # of another session
    ]
    told = explain(write(tmp_path, spans), "0")
    by_name = {one.name: one.seconds for one in told.parts}
    assert by_name["engine.decode"] == pytest.approx(0.7)
    assert by_name[names.SESSION] == pytest.approx(0.2)  # the agent's own time


def test_lines_that_are_no_spans_are_passed_over(spans: Path) -> None:
    with (spans / "gateway-1.jsonl").open("a") as lines:
        lines.write('{"name": "step", "trace_id": "' + trace_of(3) + '", cut off')
    assert explain(spans, "3").seconds == pytest.approx(3.6)


@pytest.mark.parametrize(
    ("which", "error", "said"),
    [
        ("7", NotFound, "seen: 7; allowed: 0 to 4"),
        ("123456789012", NotFound, "no span of such a trace"),
        ("deadbeef", NotFound, "no span of such a trace"),
        ("step", InvalidInput, "a step's number, or at least 6 hex digits"),
        ("abc", InvalidInput, "a step's number, or at least 6 hex digits"),
        ("-1", InvalidInput, "a step's number"),
        ("00000", NotFound, None),
        ("²", InvalidInput, "a step's number"),
    ],
)
def test_what_names_no_trace_is_refused_with_what_there_is(
    spans: Path, which: str, error: type[Exception], said: str | None
) -> None:
    if said is None:
        assert explain(spans, which).title == "step 0"
        return
    with pytest.raises(error, match=said):
        explain(spans, which)


def test_a_run_without_spans_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="keeps no spans"):
        explain(tmp_path / "none")


def test_the_beginning_of_several_traces_names_none(tmp_path: Path) -> None:
    two = [span("c0ffee" + digit * 26, "a", 1, 0, 1) for digit in "12"]
    with pytest.raises(InvalidInput, match="several traces begin so"):
        explain(write(tmp_path, two), "c0ffee")


def run_of(tmp_path: Path, folder: Path) -> str:
    (tmp_path / "config.toml").write_text(f'[telemetry]\nspans_dir = "{folder}"\n')
    return str(tmp_path)


def test_the_command_prints_tables_and_one_json_object(tmp_path: Path, spans: Path) -> None:
    shown = io.StringIO()
    show_why(run_of(tmp_path, spans), "3", Console(file=shown, width=140), as_json=False)
    text = shown.getvalue()
    assert text.startswith("step 3 took 3.60 s, 2.00 s more than the median")
    assert "critical path of step 3, 3.60 s: share by edge" in text
    assert "coordinator → policy_trainer PolicyService.TrainStep" in text
    assert "+2.000" in text
    told = io.StringIO()
    show_why(run_of(tmp_path, spans), "3", Console(file=told, width=80), as_json=True)
    found = json.loads(told.getvalue())
    assert found["culprit"] == explain(spans, "3").culprit
    assert [one["at_s"] for one in found["path"]] == pytest.approx([0.0, 1.0, 1.1])
    assert sum(one["seconds"] for one in found["path"]) == pytest.approx(found["seconds"])
    assert found["path"][0]["about"] == {"session": "3-hard-0", "worker": 1}


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
