"""The comparison of runs: its conclusions on hand-made runs."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import demo_runs, e2e, turns
from benchmarks.demo_runs import DemoRun, read_run
from benchmarks.e2e import chosen_arms, compare, first_difference, pictures, speed_ratio
from paceline.errors import InvalidInput

REAL = e2e.WORKLOADS["real"]


def steps(
    rate: float, *, differs_at: int = 0, probe: float | None = None, count: int = 30
) -> list[dict[str, Any]]:
    made = []
    for i in range(count):
        flipped = bool(differs_at) and i + 1 >= differs_at
        step: dict[str, Any] = {
            "step": str(i),
            "response_tokens": "2000",
            "rollout_s": 2000 / (rate * (1 + 0.01 * (i % 3))),
            "step_s": 1 + 1000 / rate,
            "tokens_hash": f"{'f' if flipped else 'a'}{i}",
            "reward_mean": 0.5 + 0.01 * i + (0.1 if flipped else 0.0),
            "drafted_rounds": "500",
            "accept_length": 3.0,
        }
        if probe is not None and i % 10 == 9:
            step["evaluations"] = {"accept_length_probe": probe + 0.1 * (i // 10)}
        made.append(step)
    return made


def run(
    seed: int,
    arm: str,
    rate: float,
    *,
    last: float = 0.9,
    probe: float | None = None,
    differs_at: int = 0,
) -> DemoRun:
    summary = {
        "accuracy_first": 0.5,
        "accept_len_first": 3.0,
        "accuracy_last": last,
        "drafter_steps_per_rl_step": 2.0,
        "preempt_wait_share": 0.01,
        "near_ties": 3,
        "wall_s": 60.0,
        "steps": 30,
        "phase": "finished",
        "drafter_steps": 60,
        "drafter_tokens": 900,
    }
    return DemoRun(seed, arm, summary, steps(rate, differs_at=differs_at, probe=probe), 100.0)


def runs() -> list[DemoRun]:
    made = []
    for seed, last in ((0, 0.7), (1, 0.85), (2, 0.95)):
        made += [
            run(seed, "none", 1000.0, last=last),
            run(seed, "ngram", 1300.0, last=last, probe=2.2),
            run(seed, "cotrained", 1500.0, last=last, probe=3.0, differs_at=21),
            run(seed, "frozen", 1200.0, last=last, probe=2.5),
        ]
    return made


def goals() -> dict[str, tuple[float, bool | None]]:
    return {
        goal.name.partition(" 1.")[0]: (goal.value, goal.met) for goal in compare(runs(), "t").goals
    }


def test_goals_are_medians_over_seeds() -> None:
    found = goals()
    assert found["rise in held-out accuracy"] == (pytest.approx(0.35), True)
    assert found["acceptance length, last third of the steps"] == (pytest.approx(3.2), False)
    # 500 rounds of 3 tokens and 500 of one
    ngrams = "minus tokens a round of n-grams, last third of the steps"
    assert found[ngrams] == (pytest.approx(-2.0), True)
    assert found["fall of the frozen drafter's acceptance"] == (pytest.approx(0.1), False)
    assert found["step time not spent waiting for the drafter"] == (pytest.approx(0.99), True)


def test_speed_is_compared_step_by_step() -> None:
    ratio = speed_ratio(runs(), "none")
    assert ratio is not None
    assert (ratio.value, ratio.pairs) == (pytest.approx(1.5), 3 * 10)
    assert ratio.resolved
    assert goals()["rollout tokens/s, cotrained / none"] == (pytest.approx(1.5), True)
    assert goals()["rollout tokens/s, cotrained / frozen"] == (pytest.approx(1.25), True)
    assert goals()["rollout tokens/s, cotrained / ngram"] == (pytest.approx(1.5 / 1.3), False)
    assert goals()["RL steps/s, cotrained / none"] == (pytest.approx(2 / (5 / 3)), True)
    assert speed_ratio(runs()[:1], "none") is None


def test_a_ratio_that_is_not_resolved_is_neither_met_nor_missed() -> None:
    noisy = run(0, "cotrained", 1500.0)
    for i, step in enumerate(noisy.steps):
        step["rollout_s"] *= (1.0, 2.0, 0.5, 3.0)[i % 4]  # type: ignore[index]
    result = compare([run(0, "none", 1000.0), noisy], "t")
    assert next(one for one in result.goals if "tokens/s" in one.name).met is None


def test_the_first_step_with_other_tokens_is_named_and_rewards_until_then_are_compared() -> None:
    baseline, other = run(0, "none", 1000.0), run(0, "cotrained", 1500.0, differs_at=21)
    assert first_difference(other, baseline) == 21
    assert first_difference(baseline, baseline) is None
    row = compare([baseline, other], "t").rows[1]
    assert (row["tokens differ at"], row["rewards equal"], row["near-ties"]) == ("21", "yes", 3)
    other.steps[3]["reward_mean"] = 0.0  # type: ignore[index]
    assert compare([baseline, other], "t").rows[1]["rewards equal"] == "no"


def test_without_a_run_that_drafts_nothing_tokens_are_compared_with_the_first_arm() -> None:
    ours, frozen = run(0, "cotrained", 1500.0), run(0, "frozen", 1200.0, differs_at=7)
    rows = compare([ours, frozen], "t").rows
    assert [row["tokens differ at"] for row in rows] == ["", "7"]
    assert [row["rewards equal"] for row in rows] == ["", "yes"]


@pytest.mark.parametrize("text", ["none,fast", "none,", ""])
def test_an_arm_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        chosen_arms(text)


def test_arms_run_in_the_order_of_the_table() -> None:
    assert chosen_arms("frozen,none,cotrained") == ("none", "cotrained", "frozen")


def write(directory: Path, one: DemoRun, **cost: Any) -> None:
    directory.mkdir(parents=True)
    (directory / "summary.json").write_text(json.dumps(one.summary))
    (directory / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in one.steps))
    (directory / "bench.json").write_text(json.dumps(cost))


def options(out: Path, count: int = 30) -> argparse.Namespace:
    return argparse.Namespace(
        quick=False,
        seeds=1,
        steps=count,
        arms="none,cotrained",
        workload="demo",
        at_once=None,
        frozen_steps=None,
        out=out,
        overrides=[],
    )


async def test_finished_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(command: list[str], log: Path | None = None) -> float:
        pytest.fail(f"started {command}")

    monkeypatch.setattr(turns, "run_to_end", refuse)
    for one in (runs()[0], runs()[2]):
        write(tmp_path / f"{one.arm}-0" / "demo-0-1", one, cpu_s=12.5, resumed=False)
    result = await e2e.run(options(tmp_path))
    assert [row["CPU s"] for row in result.rows] == [12.5, 12.5]
    assert "PACELINE_TOKEN" not in os.environ
    with pytest.raises(InvalidInput, match="another length"):
        await e2e.run(options(tmp_path, count=40))


def test_a_run_that_was_broken_off_is_not_finished(tmp_path: Path) -> None:
    one = runs()[0]
    plan = e2e._plan(options(tmp_path), 0, one.arm, 30)
    write(plan.directory, one, cpu_s=1.0, resumed=False)
    assert plan.is_finished()
    broken = {**one.summary, "steps": 12, "phase": "paused"}
    (plan.directory / "summary.json").write_text(json.dumps(broken))
    assert not plan.is_finished()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands of the drafters that a bench has trained, each of which did nothing."""
    commands: list[list[str]] = []

    async def pretend(command: list[str]) -> float:
        commands.append(command)
        (folder := Path(command[command.index("--out") + 1])).mkdir()
        (folder / "model.safetensors").touch()
        return 1.0

    monkeypatch.setattr(demo_runs, "run_to_end", pretend)
    return commands


async def test_the_frozen_drafter_is_one_of_the_start_policy_that_learned_for_longer(
    tmp_path: Path, made: list[list[str]]
) -> None:
    for seed in (0, 1):
        flags = await e2e._plan(options(tmp_path), seed, "frozen", 30).flags()
        assert flags == ("--frozen-drafter", str(tmp_path / "drafter-3200"))
    ((_, script, *words),) = made
    assert Path(script).name == "make_drafter.py"
    said = dict(zip(words[::2], words[1::2], strict=True))
    assert (said["--steps"], said["--tokens"], said["--seed"]) == ("3200", "819200", "0")


async def test_the_block_parallel_arm_begins_with_as_much_training_as_the_demos_start_drafter(
    tmp_path: Path, made: list[list[str]]
) -> None:
    plan = e2e._plan(options(tmp_path), 0, "dflash", 30)
    folder = tmp_path / "drafter-dflash"
    assert list(await plan.flags()) == [
        f"gateway.drafter={folder}",
        f"drafter_trainer.drafter={folder}",
    ]
    assert any("dflash:7_1_8" in one for one in plan.settings)
    ((_, _, *words),) = made
    said = dict(zip(words[::2], words[1::2], strict=True))
    assert (said["--steps"], said["--speculator"]) == ("2000", "dflash")


def real_options(out: Path, arms: str) -> argparse.Namespace:
    chosen = options(out, count=20)
    chosen.workload, chosen.arms = "real", arms
    return chosen


async def test_the_frozen_drafter_of_the_pretrained_model_learns_from_its_answers_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = demo_runs.demo_folder() / "make_drafter.py"
    spec = importlib.util.spec_from_file_location("make_drafter", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn: list[Any] = []
    trained: list[dict[str, str]] = []

    async def pretend(command: list[str]) -> float:
        if command[1] == str(script):
            drawn.append(module.options_of(command[2:]))
            drawn[-1].only_answers.touch()
        else:
            assert command[2:5] == ["paceline.cli.main", "drafter", "train"]
            trained.append(dict(zip(command[5::2], command[6::2], strict=True)))
        return 1.0

    monkeypatch.setattr(demo_runs, "run_to_end", pretend)
    one = real_options(tmp_path, "frozen")
    learned = tmp_path / "drafter-100/checkpoint/speculator"
    assert await e2e._plan(one, 0, "frozen", 20).flags() == ("--frozen-drafter", str(learned))
    co_trained = await e2e._plan(one, 1, "cotrained", 20).flags()
    assert co_trained == (f"gateway.drafter={learned}", f"drafter_trainer.drafter={learned}")
    (answered,), (words,) = drawn, trained
    assert answered.model.name == "SmolLM2-135M-Instruct"
    assert (answered.max_tokens, answered.system) == (24, "Reply with the number alone.")
    assert (words["--steps"], words["--model"]) == ("100", str(answered.model))
    assert Path(words["--data"]).parent == Path(words["--out"])


async def test_as_many_runs_take_turns_as_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[list[str]] = []

    async def pretend(plans: list[demo_runs.DemoPlan]) -> list[DemoRun]:
        together.append([plan.arm for plan in plans])
        return [run(plan.seed, plan.arm, 1000.0) for plan in plans]

    monkeypatch.setattr(e2e, "finished_in_turns", pretend)
    await e2e.run(real_options(tmp_path, "none,ngram,cotrained"))
    assert together == [["none", "cotrained"], ["ngram"]]
    with pytest.raises(InvalidInput, match="no such arm"):
        await e2e.run(real_options(tmp_path, "scratch"))


def test_the_pretrained_models_goals_are_equal_tokens_speed_and_the_best_arm_in_hindsight() -> None:
    made = runs()
    found = {one.name.partition(" 1.")[0]: one for one in compare(made, "t", REAL).goals}
    assert found["share of runs with the tokens of none"].value == pytest.approx(2 / 3)
    best = "rollout tokens/s, cotrained / ngram, the best arm in hindsight,"
    assert found[best].value == pytest.approx(1.5 / 1.3)
    assert found["rollout tokens/s, cotrained / none"].goal == 1.3
    assert found["RL steps/s, cotrained / none"].goal == 1.15
    assert len(found) == 4


async def test_the_arms_are_drawn_side_by_side(tmp_path: Path) -> None:
    pictures(runs(), tmp_path)
    speed = (tmp_path / "e2e-speed.svg").read_text()
    acceptance = (tmp_path / "e2e-acceptance.svg").read_text()
    assert all(f">{arm}</text>" in speed for arm in ("none", "ngram", "cotrained", "frozen"))
    assert ">none</text>" not in acceptance
    assert speed.count("<path") + speed.count("<polyline") >= 4


async def test_unfinished_runs_are_taken_up_and_new_ones_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    async def pretend(command: list[str], log: Path | None = None) -> float:
        commands.append(command)
        one = next(one for one in (runs()[0], runs()[2]) if f"{one.arm}-0" in " ".join(command))
        directory = tmp_path / f"{one.arm}-0" / "demo-0-1"
        if not directory.exists():
            directory.mkdir(parents=True)
        (directory / "summary.json").write_text(json.dumps(one.summary))
        (directory / "steps.jsonl").write_text(
            "".join(json.dumps(step) + "\n" for step in one.steps)
        )
        return 1.0

    started = tmp_path / "cotrained-0" / "demo-0-1"
    started.mkdir(parents=True)
    (started / "config.toml").write_text("")
    monkeypatch.setattr(turns, "run_to_end", pretend)
    await e2e.run(options(tmp_path))
    assert "--no-speculation" in commands[0]
    assert commands[1][-2:] == ["--resume", "demo-0-1"]
    assert read_run(started, 0, "cotrained").cpu_s is None  # the cost of the first part is unknown
