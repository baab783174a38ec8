"""The comparison of drafters: its conclusions on hand-made runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from benchmarks import demo_runs, drafter
from benchmarks.demo_runs import DemoRun, demo_folder, two_digits
from benchmarks.drafter import from_scratch, goals, planner, recovery, second_plans, write_mixes
from benchmarks.result import Goal
from paceline.tasks.file import read_tasks

SHIFT = 30


def run(
    arm: str, probes: list[float], *, rate: float = 1000.0, step_s: float = 1.0, wait: float = 0.0
) -> DemoRun:
    steps: list[dict[str, Any]] = [
        {
            "step": str(i),
            "response_tokens": "2000",
            "rollout_s": 2000 / rate,
            "step_s": step_s,
            "drafter_slot_s": 0.5,
            "evaluations": {"accept_length_probe": value} if value else {},
        }
        for i, value in enumerate(probes)
    ]
    summary = {"preempt_wait_share": wait, "drafter_steps_per_rl_step": 6.0, "wall_s": 60.0}
    return DemoRun(0, arm, summary, steps, 1.0)


RECOVERS = [2.0] * 20 + [4.0] * 10 + [2.0, 2.5, 3.0, 3.9] + [4.4] * 26
FROZEN = [4.2] * 30 + [1.5] * 30


def runs(wait: float = 0.01) -> dict[str, DemoRun]:
    return {
        "harvested": run("harvested", RECOVERS, rate=1500.0, wait=wait),
        "serial": run("serial", RECOVERS, rate=1500.0, step_s=1.2),
        "frozen": run("frozen", FROZEN, rate=1200.0),
        "ngram": run("ngram", [2.0] * 60, rate=1250.0),
        "none": run("none", [0.0] * 60),
    }


def found(wait: float = 0.01, scratch: float = 4.0, packing: float = 2.2) -> dict[str, Goal]:
    return {
        goal.name.partition(" 1.")[0]: goal for goal in goals(runs(wait), SHIFT, scratch, packing)
    }


def test_recovery_counts_the_steps_from_the_shift_to_95_percent() -> None:
    assert recovery(runs()["harvested"], SHIFT) == (4.0, 2.0, 4)
    assert recovery(runs()["frozen"], SHIFT) == (pytest.approx(4.2), 1.5, None)


def test_goals_compare_equal_steps_and_settled_acceptance() -> None:
    named = found()
    assert named["steps back to 95 % of the acceptance before the shift"].value == 4
    assert named["tokens/s, harvested / none"].value == pytest.approx(1.5)
    assert named["tokens/s, harvested / frozen"].value == pytest.approx(1.25)
    assert named["step seconds, serial / harvested"].value == pytest.approx(1.2)
    assert named["acceptance at the end, harvested from cold / frozen warm"].value == pytest.approx(
        4.4 / 1.5
    )
    assert named[
        "acceptance at the end, harvested / from scratch on the last policy"
    ].value == pytest.approx(4.4 / 4.0)
    assert all(goal.met for goal in named.values())


def test_a_goal_that_is_missed_says_so() -> None:
    named = found(wait=0.05, scratch=5.0, packing=1.5)
    missed = [name for name, goal in named.items() if goal.met is False]
    assert [name.partition(" ")[0] for name in missed] == ["step", "acceptance", "packed"]


def test_an_arm_without_probes_has_no_acceptance() -> None:
    row = drafter._row("none", runs()["none"], SHIFT)
    assert (row["E[len] before"], row["steps to 95 %"], row["E[len] last"]) == (None, None, None)


def test_the_mixes_ask_for_one_style_each_and_keep_the_answers(tmp_path: Path) -> None:
    mixes = write_mixes(tmp_path)
    first, second = read_tasks(mixes.first), read_tasks(mixes.second)
    assert {task.prompt[-2:] for task in first} == {"=-"}
    assert {task.prompt[-2:] for task in second} == {"=%"}
    assert [task.answer for task in first] == [task.answer for task in second]
    assert len(read_tasks(mixes.second_heldout)) == 512


async def test_drafters_of_a_fixed_policy_are_made_by_words_that_their_script_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = demo_folder() / "make_drafter.py"
    spec = importlib.util.spec_from_file_location("make_drafter", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    given: list[Any] = []

    async def pretend(command: list[str]) -> float:
        if command[1] == str(script):
            given.append(module.options_of(command[2:]))
            given[-1].out.mkdir()
            (given[-1].out / "probe.json").write_text('{"accept_length": 3.5}')
        return 1.0

    monkeypatch.setattr(demo_runs, "run_to_end", pretend)
    mixes, harvested = write_mixes(tmp_path), run("harvested", RECOVERS)
    harvested.summary.update(drafter_steps=300, drafter_tokens=60_000)  # type: ignore[attr-defined]
    _, frozen = second_plans(planner(tmp_path, 0, 60, ()), mixes, harvested)
    assert await frozen.flags() == ("--frozen-drafter", str(given[0].out))
    assert await from_scratch(tmp_path, 0, harvested, mixes) == 3.5
    assert [one.model for one in given] == [
        two_digits().parent / "policy_start",
        tmp_path / "last-policy",
    ]
    assert [one.tasks for one in given] == [mixes.first, mixes.second]
    assert [(one.steps, one.tokens, one.answers) for one in given] == [(300, 60_000, 1024)] * 2
