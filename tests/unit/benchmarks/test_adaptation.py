"""The adaptation bench: its conclusions on hand-made lengths, and how it resumes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import adaptation, demo_runs
from benchmarks.adaptation import BASE, compare
from paceline.errors import InvalidInput


def options(out: Path, settings: str) -> argparse.Namespace:
    return argparse.Namespace(seeds=2, steps=8, answers=5, settings=settings, out=out)


def test_the_demos_settings_are_judged_beside_the_best() -> None:
    result = compare({BASE: [{4: 2.0, 8: 3.0}, {4: 2.5, 8: 3.2}], "clip 2": [{4: 2.0, 8: 4.0}] * 2})
    assert result.rows[0] == {
        "settings": BASE,
        "4 steps": "2.00 2.50",
        "8 steps": "3.00 3.20",
        "median": 3.1,
    }
    (goal,) = result.goals
    assert (goal.goal, goal.value, goal.met) == (pytest.approx(0.98 * 4.0), 3.1, False)


async def test_a_setting_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no such setting"):
        await adaptation.run(options(tmp_path, "lr 7"))


def write_log(command: list[str]) -> None:
    folder = Path(command[command.index("--out") + 1])
    folder.mkdir()
    seed = int(command[command.index("--seed") + 1])
    lines = [{"step": step, "heldout": {"length": step + seed}} for step in (2, 4, 8)]
    (folder / "log.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


async def test_every_setting_trains_once_a_seed_and_finished_ones_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    async def pretend(command: list[str]) -> float:
        commands.append(command)
        if "train" in command:
            write_log(command)
        return 1.0

    monkeypatch.setattr(demo_runs, "run_to_end", pretend)
    result = await adaptation.run(options(tmp_path, f"{BASE};clip 2"))
    assert [row["8 steps"] for row in result.rows] == ["8.00 9.00"] * 2
    assert "--only-answers" in commands[0]
    trained = commands[1:]
    assert len(trained) == 4
    flags = [words[words.index("--clip-norm") + 1] for words in trained]
    assert sorted(flags) == ["0.5", "0.5", "2", "2"]
    commands.clear()
    await adaptation.run(options(tmp_path, f"{BASE};clip 2"))
    assert not [one for one in commands if "train" in one]
