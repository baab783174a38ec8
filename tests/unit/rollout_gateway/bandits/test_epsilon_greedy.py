"""Every arm is tried, the best is used, the window forgets, groups are apart."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from bandit_rounds import batch_of, round_of

from paceline.errors import ConfigError
from paceline.trajectory import Target
from rollout_gateway.bandits import build_bandit
from rollout_gateway.bandits.base import Bandit, BanditSettings, group_of
from rollout_gateway.bandits.epsilon_greedy import TRIAL_PULLS

ARMS = ("off", "a:3_1_4", "b:3_1_4")


def play(bandit: Bandit, rounds: int, rates: dict[str, float], batch: int = 1) -> Counter[str]:
    """Arms chosen in an environment where an arm gives `rate` tokens per second."""
    chosen: Counter[str] = Counter()
    for _ in range(rounds):
        choice = bandit.choose(batch_of(batch))
        chosen[choice.arm] += 1
        bandit.observe(
            round_of(choice.arm, batch, 10, 10 / rates[choice.arm], explored=choice.explored)
        )
    return chosen


def make(**settings: object) -> Bandit:
    return build_bandit(
        BanditSettings.model_validate({"kind": "epsilon_greedy", **settings}), ARMS, seed=1
    )


def test_every_arm_is_tried_before_the_best_is_exploited() -> None:
    assert play(make(epsilon=0.0), 3 * TRIAL_PULLS, dict.fromkeys(ARMS, 1.0)) == dict.fromkeys(
        ARMS, TRIAL_PULLS
    )


def test_the_best_arm_gets_the_share_that_epsilon_leaves() -> None:
    chosen = play(make(epsilon=0.1), 6000, {"off": 100.0, "a:3_1_4": 150.0, "b:3_1_4": 90.0})
    share = chosen["a:3_1_4"] / 6000
    assert share == pytest.approx(1 - 0.1 * 2 / 3, abs=0.015)
    assert chosen["off"] == pytest.approx(200, abs=60)


def test_off_wins_when_it_is_the_fastest() -> None:
    chosen = play(make(), 1000, {"off": 100.0, "a:3_1_4": 90.0, "b:3_1_4": 80.0})
    assert chosen.most_common(1)[0][0] == "off"


def test_an_arm_that_becomes_slow_is_left_once_the_window_has_turned_over() -> None:
    bandit = make(window=50)
    play(bandit, 300, {"off": 100.0, "a:3_1_4": 150.0, "b:3_1_4": 90.0})
    slowed = {"off": 100.0, "a:3_1_4": 50.0, "b:3_1_4": 90.0}
    play(bandit, 100, slowed)
    assert play(bandit, 500, slowed).most_common(1)[0][0] == "off"


def test_a_forgotten_arm_is_tried_again_and_taken_when_it_has_become_the_best() -> None:
    bandit = make(epsilon=0.0)
    play(bandit, 200, {"off": 100.0, "a:3_1_4": 50.0, "b:3_1_4": 40.0})
    better = {"off": 100.0, "a:3_1_4": 150.0, "b:3_1_4": 40.0}
    assert play(bandit, 50, better)["a:3_1_4"] == 0
    bandit.forget({"a:3_1_4"}, Target.DRAFTER)
    assert play(bandit, 50, better) == {"a:3_1_4": 50}


def test_what_was_learned_of_a_hardly_used_arm_leaves_the_window_and_it_is_tried_again() -> None:
    bandit = make(epsilon=0.0, window=100)
    play(bandit, 50, {"off": 100.0, "a:3_1_4": 50.0, "b:3_1_4": 40.0})
    better = {"off": 100.0, "a:3_1_4": 150.0, "b:3_1_4": 40.0}
    assert play(bandit, 300, better).most_common(1)[0][0] == "a:3_1_4"


def test_groups_of_batch_sizes_learn_apart() -> None:
    bandit = make()
    play(bandit, 300, {"off": 1.0, "a:3_1_4": 2.0, "b:3_1_4": 1.0}, batch=1)
    play(bandit, 300, {"off": 3.0, "a:3_1_4": 2.0, "b:3_1_4": 1.0}, batch=30)
    best = {
        group: max((r for r in bandit.reports() if r.batch_group == group), key=lambda r: r.pulls)
        for group in (1, 21)
    }
    assert (best[1].arm, best[21].arm) == ("a:3_1_4", "off")
    assert [group_of((1, 2, 5, 21), size) for size in (1, 2, 4, 5, 20, 21, 500)] == [
        1,
        2,
        2,
        5,
        5,
        21,
        21,
    ]


def test_reports_hold_rate_and_explorations() -> None:
    bandit = make(epsilon=0.5)
    play(bandit, 200, {"off": 100.0, "a:3_1_4": 150.0, "b:3_1_4": 90.0})
    reports = {report.arm: report for report in bandit.reports()}
    assert sum(report.pulls for report in reports.values()) == 200
    assert reports["a:3_1_4"].mean_tokens_per_s == pytest.approx(150.0)
    assert reports["off"].mean_accept_length == pytest.approx(10.0)
    assert reports["off"].explorations == reports["off"].pulls


def test_the_same_seed_chooses_the_same() -> None:
    rates = {"off": 100.0, "a:3_1_4": 150.0, "b:3_1_4": 90.0}
    first, second = make(), make()
    assert [first.choose(batch_of(1)) for _ in range(9)] == [
        second.choose(batch_of(1)) for _ in range(9)
    ]
    assert play(first, 500, rates) == play(second, 500, rates)


def test_a_choice_and_its_observation_cost_less_than_50_microseconds() -> None:
    bandit = make()
    play(bandit, 2000, dict.fromkeys(ARMS, 1.0))
    best = float("inf")
    for _ in range(5):
        started = time.thread_time()
        play(bandit, 1000, dict.fromkeys(ARMS, 1.0))
        best = min(best, (time.thread_time() - started) / 1000)
    assert best < 50e-6


def test_an_unknown_bandit_is_refused() -> None:
    with pytest.raises(ConfigError, match="epsilon_greedy"):
        make(kind="oracle")
