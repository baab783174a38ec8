"""The comparison of RL steps with TRL's, from records, and the reward of TRL's side."""

from __future__ import annotations

from benchmarks.demo_runs import DemoRun
from benchmarks.peers.trl_side import score_number
from benchmarks.trl import WARM_STEPS, compare


def test_steps_pair_up_and_the_first_steps_do_not_count() -> None:
    ours = [{"step_s": seconds, "response_tokens": 100} for seconds in (90, 90, 2, 4, 2, 2)]
    theirs = [{"step_s": seconds, "tokens": 90, "reward": 0.5} for seconds in (1, 1, 6, 12, 6, 6)]
    result = compare(DemoRun(0, "none", {}, ours, None), theirs, "title")
    assert WARM_STEPS == 2
    assert [row["s a step"] for row in result.rows] == [2, 6]
    (goal,) = result.goals
    assert goal.value == 3.0
    assert goal.met


def test_the_last_number_of_an_answer_counts() -> None:
    texts = ["It is 12.", "-3", "12 or 13", "none", "12 "]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    answers = ["12", "-3", "12", "12", "12"]
    assert score_number(completions, answers) == [1.0, 1.0, 0.0, 0.0, 1.0]
