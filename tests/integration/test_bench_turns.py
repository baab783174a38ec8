"""Two real demo runs take turns, one step each."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from benchmarks import turns
from benchmarks.demo_runs import NO_WORDS, WITHOUT, DemoPlan, DemoRun, Flags, two_digits
from benchmarks.hindsight import NO_EVALUATIONS
from benchmarks.turns import finished_in_turns
from paceline.local.patience import patient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 2
CLOCK_S = 0.05


def plan(out: Path, arm: str, flags: Flags) -> DemoPlan:
    few = "coordinator.evaluation.heldout_prompts=8"
    return DemoPlan(out, 0, arm, STEPS, (*NO_EVALUATIONS, few), flags, two_digits())


def spans(run: DemoRun) -> list[tuple[float, float, str]]:
    """Wall-clock times of each step's start and end."""
    ends = [(float(one["finished_at_s"]), float(one["step_s"])) for one in run.steps]
    return [(end - lasted, end, run.arm) for end, lasted in ends]


def out_of_turn(arms: Sequence[str]) -> list[int]:
    """Places of the steps that an arm did while it was ahead of another arm.

    An arm without a step does not count: the pause before a run's first rest may precede or follow
    its first step.
    """
    done: Counter[str] = Counter()
    found = []
    for place, arm in enumerate(arms):
        if done[arm] > min(done.values(), default=0):
            found.append(place)
        done[arm] += 1
    return found


def test_who_is_ahead_does_no_step() -> None:
    for in_turn in ("abab", "abba", "baabba", "aabbab"):
        assert out_of_turn(in_turn) == [], in_turn
    assert out_of_turn("abaab") == [3]


async def test_a_run_that_was_broken_off_takes_its_turns_again(tmp_path: Path) -> None:
    one = plan(tmp_path, "none", WITHOUT)
    async with AsyncExitStack() as stack:
        stack.enter_context(turns._one_token())
        begun = turns._RunInTurns(one, await one.command(), stack)
        await begun.first_rest()
        begun.ended.cancel()
        await asyncio.gather(begun.ended, return_exceptions=True)
    demo = [one for one in psutil.Process().children() if str(tmp_path) in " ".join(one.cmdline())]
    _, alive = await asyncio.to_thread(psutil.wait_procs, demo, patient(60))
    assert not alive
    assert not one.is_finished()
    (run,) = await finished_in_turns([one])
    assert len(run.steps) == STEPS
    assert run.cpu_s is None, "the cost of its beginning is not known"


async def test_while_one_run_does_a_step_the_other_rests(tmp_path: Path) -> None:
    plans = [plan(tmp_path, "none", WITHOUT), plan(tmp_path, "default", NO_WORDS)]
    runs = await finished_in_turns(plans)
    steps = sorted(span for run in runs for span in spans(run))
    for (_, end, _), (begin, _, _) in pairwise(steps):
        assert begin > end - CLOCK_S
    assert out_of_turn([arm for _, _, arm in steps]) == []
    hashes = [[step["tokens_hash"] for step in run.steps] for run in runs]
    assert hashes[0] == hashes[1]
    assert [len(run.steps) for run in runs] == [STEPS, STEPS]
    assert runs[1].summary["drafter_steps"] > 0
    assert all(run.cpu_s is not None and run.cpu_s > 1 for run in runs)
    assert await finished_in_turns(plans) == runs
