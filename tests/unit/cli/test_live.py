"""The display of a run in a terminal and in a pipe."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from paceline.cli.live import RunView, step_line
from paceline.config import ServiceConfig
from paceline.local.launch import ChildEvent
from paceline.v1 import coordinator_pb2 as pb
from paceline.v1.trajectory_pb2 import CommandContext, VersionSet


def record(step: int, **more: object) -> pb.StepRecord:
    return pb.StepRecord(
        step=step,
        versions=VersionSet(policy=step, drafter=step // 5),
        reward_mean=0.5,
        response_tokens=4000,
        rollout_s=2.0,
        step_s=4.0,
        accept_length=1.5 + step,
        arm_rounds={"off": 30, "eagle:3_1_4": 10},
        drafter_steps=2,
        **more,  # type: ignore[arg-type]
    )


def slot_fact(slot: int, holder: int) -> pb.Fact:
    slots = pb.SlotRange(first=slot, count=1, holder=holder)
    return pb.Fact(context=CommandContext(step=1), slots=[slots])


def finished(step: int, **more: object) -> pb.Fact:
    return pb.Fact(
        context=CommandContext(step=step),
        step_finished=pb.StepFinished(record=record(step, **more)),
    )


def shown(*, terminal: bool, width: int = 110) -> str:
    """A run of ten steps at its third, as a console shows it."""
    output = StringIO()
    console = Console(width=width, file=output, force_terminal=terminal)
    view = RunView("demo-0-1", 10, console)
    with view:
        view.show_event(ChildEvent("redis", "healthy", 1))
        view.show_services(ServiceConfig())
        view.show_event(ChildEvent("gateway", "started", 2))
        for step in (0, 2, 1):
            view.state.apply_fact(finished(step))
        view.state.apply_fact(slot_fact(0, pb.HOLDER_DRAFTER))
        view.show_event(ChildEvent("gateway", "died", 2, "was killed by SIGKILL"))
        view.show_event(ChildEvent("gateway", "impaired", 2, "engine worker [1] died"))
        view.show_event(ChildEvent("gateway", "recovered", 2, "engine worker [1]"))
        view.refresh()
    return output.getvalue()


def test_a_pipe_gets_plain_lines_alone() -> None:
    lines = shown(terminal=False).splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == [
        "step 1/10",
        "step 3/10",
        "step 2/10",
    ]
    assert "redis healthy (pid 1)" in lines
    assert "gateway died: was killed by SIGKILL (pid 2)" in lines
    assert "gateway impaired: engine worker [1] died (pid 2)" in lines
    assert "gateway recovered: engine worker [1] (pid 2)" in lines
    assert not [line for line in lines if "gateway started" in line or "\x1b" in line]
    assert "everything serves" in lines[1]
    assert lines[2].startswith("  paceline page ")
    assert lines[3].startswith("  curl http://127.0.0.1:")
    assert lines[4] == "the steps begin"
    assert len(lines) == 11


@pytest.mark.parametrize("width", [60, 110, 200])
def test_a_terminal_gets_the_same_lines_above_a_bar(width: int) -> None:
    text = Console(file=StringIO()).render_str(shown(terminal=True, width=width)).plain
    assert "step 2/10" in text
    assert "of 10" in text
    assert "gateway died" in text


def test_the_bar_shows_steps_phase_and_who_holds_the_slots() -> None:
    text = shown(terminal=True)
    bar = text.rsplit("step ", 1)[1]
    for part in ("of 10", "rollout, drafter training", "slots: drafter"):
        assert part in bar


def test_a_finished_step_is_one_line() -> None:
    line = step_line(record(4, evaluations={"accuracy": 0.5}), 10)
    assert "\n" not in line
    for part in (
        "step 5/10",
        "reward 0.500",
        "2,000 tokens/s",
        "acceptance 5.50",
        "off 75%",
        "p4.d0",
        "held-out accuracy 0.500",
    ):
        assert part in line


def test_services_that_are_away_are_named_once_with_what_the_run_does() -> None:
    output = StringIO()
    view = RunView("demo-0-1", 10, Console(width=110, file=output))
    with view:
        for services in (["drafter_trainer"], ["drafter_trainer"], ["gateway"], []):
            view.state.apply_fact(pb.Fact(services_away=pb.ServicesAway(services=services)))
        view.state.apply_snapshot(pb.GetSnapshotResponse(phase="rollout", away=["drafter_trainer"]))
    assert output.getvalue().splitlines() == [
        "away: drafter_trainer; the run goes on without it",
        "away: gateway; the run waits",
        "all services answer again",
        "away: drafter_trainer; the run goes on without it",
    ]


def test_of_several_samples_a_step_shows_accuracy_and_the_widest_pass() -> None:
    told = {"accuracy": 0.5, "pass@2": 0.6, "pass@16": 0.9, "pass@4": 0.7, "accuracy_se": 0.01}
    line = step_line(record(4, evaluations=told), 10)
    assert line.endswith("held-out accuracy 0.500  pass@16 0.900")


def test_a_program_gets_an_object_a_line_on_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = RunView("demo-0-1", 10, Console(), as_json=True)
    with view:
        view.show_start(Path("/runs/demo-0-1"), ["policy_trainer: 1 of 24 GiB"])
        view.show_event(ChildEvent("redis", "healthy", 1))
        view.show_services(ServiceConfig())
        view.state.apply_fact(finished(0))
        view.state.apply_fact(pb.Fact(services_away=pb.ServicesAway(services=["gateway"])))
        view.show_phase("writing the report")
        view.show_line("a line [in brackets]")
        view.show("failed", "[red]no memory[/]", message="no memory")
        view.refresh()
    said, errors = capsys.readouterr()
    assert errors == ""
    objects = [json.loads(line) for line in said.splitlines()]
    kinds = " ".join(one["kind"] for one in objects)
    assert kinds == "run process serving phase step away phase line failed"
    assert all(one["at"] > 1e9 for one in objects)
    assert objects[0]["directory"] == "/runs/demo-0-1"
    assert (objects[1]["name"], objects[1]["pid"]) == ("redis", 1)
    assert objects[3]["phase"] == "the steps begin"
    assert objects[4]["reward_mean"] == 0.5
    assert objects[5]["services"] == ["gateway"]
    assert objects[7]["text"] == "a line [in brackets]"
    assert objects[8]["message"] == "no memory"
