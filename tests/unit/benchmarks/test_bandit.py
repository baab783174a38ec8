"""The bandit bench: equal luck for all, response lengths from the trace, a table with every
chooser.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bandit import run as bandit
from benchmarks.bandit.run import OURS, RIVALS, AdaptiveSteps, Fixed, Truth
from benchmarks.bandit.world import (
    Drafter,
    Moment,
    Step,
    Trace,
    World,
    read_trace,
    read_traces,
)
from paceline.errors import InvalidInput, NotFound
from paceline.trajectory import Target

COSTS = {
    "off": {1: 2.0, 64: 20.0},
    "eagle:3_1_4": {1: 4.0, 64: 60.0},
    "eagle:5_1_6": {1: 6.0, 64: 90.0},
}


def make(steps: Sequence[Step], max_batch: int = 4, **settings: object) -> Trace:
    values = {
        "name": "t",
        "family": "t",
        "seed": 1,
        "max_batch": max_batch,
        "limit": 100,
        "costs_ms": COSTS,
    }
    return Trace.model_validate({**values, "steps": tuple(steps), **settings})


class Watcher(Fixed):
    """A fixed arm that records its inputs."""

    def __init__(self, arm: str) -> None:
        super().__init__(arm)
        self.rounds: list[tuple[Moment, Sequence[int], float]] = []
        self.changes: list[Target] = []

    def observe(self, moment: Moment, arm: str, taken: Sequence[int], seconds: float) -> None:
        self.rounds.append((moment, taken, seconds))

    def changed(self, target: Target) -> None:
        self.changes.append(target)


async def test_a_quick_run_has_a_row_per_trace_and_a_column_per_chooser() -> None:
    result = await bandit.run(argparse.Namespace(seeds=1, trace=None, quick=True))
    assert len(result.rows) == bandit.QUICK_TRACES + 3
    for row in result.rows:
        assert set(row) == {"trace", bandit.BEST_FIXED, *RIVALS, *OURS}
    assert len(result.goals) == 2 + 2 * len(RIVALS)


def test_the_committed_traces_are_read_and_have_all_families() -> None:
    traces = read_traces()
    families = {
        "stationary",
        "drifting",
        "draining",
        "dead",
        "shifting",
        "mixed",
        "recorded",
        "growing",
        "wandering",
    }
    assert {one.family for one in traces} == families
    for one in traces:
        assert one.arms[0] == "off"
        for step in one.steps:
            for runs in step.runs.values():
                assert tuple(map(len, runs)) == step.lengths


def test_a_recorded_response_is_replayed_digit_by_digit() -> None:
    """Runs 3 1 0 0 2 1 0: with 3 drafts the rounds begin at tokens 0 and 4 and give 4 and 3."""
    step = Step(lengths=(7,), runs={"eagle": ("3100210",)})
    watcher = Watcher("eagle:3_1_4")
    replay = World(make([step]), 0).play(watcher)
    assert [list(taken) for _, taken, _ in watcher.rounds] == [[4], [3]]
    assert replay.seconds == pytest.approx(2 * 0.004)


def test_every_response_gets_its_tokens_whoever_plays() -> None:
    drafters = {"eagle": Drafter(positions=(0.8,) * 7, spread=0.5)}
    lengths = (30, 5, 17, 1, 9, 44)
    world = World(make([Step(lengths=lengths, drafters=drafters)]), 0)
    for arm in COSTS:
        watcher, tokens = Watcher(arm), dict.fromkeys(range(6), 0)
        world.play(watcher)
        last_admitted = False
        for moment, taken, _ in watcher.rounds:
            assert len(moment.rows) <= 4
            last_admitted = last_admitted or 5 in moment.rows
            assert moment.draining == last_admitted
            for row, count in zip(moment.rows.tolist(), taken, strict=True):
                tokens[row] += count
        assert tuple(tokens.values()) == lengths


def test_a_longer_chain_is_given_at_least_what_a_shorter_one_is() -> None:
    """Equal luck: from the same token, chains of three and five share the first three drafts."""
    drafters = {"eagle": Drafter(positions=(0.7,) * 7)}
    world = World(make([Step(lengths=(100,) * 4, drafters=drafters)]), 0)
    short, long = Watcher("eagle:3_1_4"), Watcher("eagle:5_1_6")
    world.play(short)
    world.play(long)
    starts = {
        (row, int(done)): count
        for moment, taken, _ in short.rounds
        for row, done, count in zip(moment.rows.tolist(), moment.generated, taken, strict=True)
    }
    same = 0
    for moment, taken, _ in long.rounds:
        for row, done, count in zip(moment.rows.tolist(), moment.generated, taken, strict=True):
            if (row, int(done)) in starts:
                same += 1
                assert min(count, 4) == starts[row, int(done)]
    assert same > 10


def test_drawn_drafts_are_right_as_often_as_the_trace_says() -> None:
    drafters = {"eagle": Drafter(positions=(0.8, 0.5, 0.25))}
    world = World(make([Step(lengths=(90,) * 200, drafters=drafters)]), 0)
    runs = world.rollouts[0].runs["eagle"][:, :80]
    assert [float((runs > depth).mean()) for depth in range(3)] == pytest.approx(
        [0.8, 0.4, 0.1], abs=0.015
    )
    assert world.rollouts[0].chances["eagle"][0].tolist() == pytest.approx([1.0, 1.8, 2.2, 2.3])


def test_new_weights_are_told_before_the_step_and_its_seconds_apply() -> None:
    steps = [Step(lengths=(1,)), Step(lengths=(1,), changed="drafter", seconds={"off": 3.0})]
    watcher = Watcher("off")
    replay = World(make(steps), 0).play(watcher)
    assert watcher.changes == [Target.DRAFTER]
    assert replay.seconds == pytest.approx(0.002 + 0.006)


def test_the_true_schedule_is_no_slower_than_the_best_fixed_arm() -> None:
    drafters = {"eagle": Drafter(positions=(0.75,) * 7, spread=0.8)}
    lengths = tuple(int(one) for one in np.random.default_rng(1).integers(5, 90, 60))
    world = World(make([Step(lengths=lengths, drafters=drafters)], max_batch=16), 0)
    best = min(world.play(Truth(stragglers=stragglers)).seconds for stragglers in (False, True))
    assert best <= 1.01 * min(world.play(Fixed(arm)).seconds for arm in COSTS)


def test_adaptive_steps_leave_a_drafter_that_is_never_right_and_come_back_to_look() -> None:
    """Slot 8 has 0 and 3: from 3 to 0 when the average has fallen to 0.5, then 3 again at every
    other look.
    """
    arms = ("off", "eagle:3_1_4", "eagle:5_1_6", "eagle:7_1_8")
    costs = {arm: {1: 1.0} for arm in arms}
    step = Step(lengths=(60,) * 8, drafters={"eagle": Drafter(positions=(0.0,) * 7)})
    chosen: list[str] = []

    class Listening(AdaptiveSteps):
        def choose(self, moment: Moment) -> str:
            chosen.append(super().choose(moment))
            return chosen[-1]

    World(make([step], max_batch=8, costs_ms=costs), 0).play(Listening(arms))
    assert chosen[:15] == ["eagle:3_1_4"] * 15
    assert chosen[15:35] == (["off"] * 5 + ["eagle:3_1_4"] * 5) * 2


@pytest.mark.parametrize("text", ["{", '{"name": "x"}', "[]"])
def test_a_broken_trace_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(InvalidInput, match=r"broken\.json"):
        read_trace(tmp_path / "broken.json")


def test_a_folder_without_traces_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=tmp_path.name):
        read_traces(tmp_path)
