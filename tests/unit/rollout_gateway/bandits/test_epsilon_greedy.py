"""Every arm is tried, the best is used, the window forgets, groups are apart."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from bandit_rounds import batch_of, round_of

from paceline.errors import ConfigError
from paceline.services.rollout_gateway.bandits import build_bandit
from paceline.services.rollout_gateway.bandits.base import Bandit, BanditSettings, group_of
from paceline.services.rollout_gateway.bandits.kinds import (
    BOUND_Z,
    TRIAL_PULLS,
    ArmWindow,
    GroupWindow,
    PlayedRound,
)
from paceline.speculators.shift import AcceptanceShift
from paceline.trajectory import Target

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


def test_arms_that_cannot_be_the_best_are_tried_once_in_a_window_and_no_more() -> None:
    chosen = play(make(epsilon=0.1), 900, {"off": 100.0, "a:3_1_4": 150.0, "b:3_1_4": 90.0})
    assert chosen == {"a:3_1_4": 900 - 2 * TRIAL_PULLS, "off": TRIAL_PULLS, "b:3_1_4": TRIAL_PULLS}


def test_arms_that_may_be_the_best_get_their_share_of_epsilon() -> None:
    """Rounds of `off` and `a` give 50 or 200 tokens per second in turn, of `b` always 1."""
    bandit, chosen = make(epsilon=0.3, window=100_000), Counter[str]()
    for _ in range(3000):
        choice = bandit.choose(batch_of(1))
        chosen[choice.arm] += 1
        swing = (50.0, 200.0)[chosen[choice.arm] % 2]
        rate = 1.0 if choice.arm == "b:3_1_4" else swing
        bandit.observe(round_of(choice.arm, 1, 10, 10 / rate, explored=choice.explored))
    assert chosen["b:3_1_4"] == TRIAL_PULLS
    assert min(chosen["off"], chosen["a:3_1_4"]) > 0.1 * 3000


def test_an_arm_at_best_is_so_many_standard_errors_above_its_rate() -> None:
    arm = ArmWindow()
    for tokens in (10, 20, 30, 40):
        arm.add(PlayedRound("off", tokens, 1.0, 1.0, float(tokens)))
    error = (125.0 / 4) ** 0.5  # variance of 10, 20, 30, 40 over four rounds
    assert arm.rate_at_best == pytest.approx(25.0 + BOUND_Z * error)
    assert ArmWindow().rate_at_best == float("inf")


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
    bandit.renew({"a:3_1_4"}, Target.DRAFTER)
    assert play(bandit, 50, better) == {"a:3_1_4": 50}


def test_a_promotion_every_few_rounds_costs_no_trial_where_its_gain_is_said() -> None:
    """Each drafter accepts 2 % more than its predecessor; the estimate of the arm follows."""
    bandit = make(epsilon=0.0)
    rates = {"off": 100.0, "a:3_1_4": 120.0, "b:3_1_4": 90.0}
    play(bandit, 50, rates)
    explored = sum(report.explorations for report in bandit.reports())
    survival = 0.5
    for _ in range(10):
        better = 1.02 * (1 + survival) - 1
        shift = AcceptanceShift(0, (survival,), (better,))
        bandit.renew({"a:3_1_4"}, Target.DRAFTER, shift)
        survival, rates["a:3_1_4"] = better, rates["a:3_1_4"] * 1.02
        assert play(bandit, 20, rates) == {"a:3_1_4": 20}
    assert sum(report.explorations for report in bandit.reports()) == explored


def test_what_an_arm_inherits_is_its_newest_rounds_with_so_many_times_the_tokens() -> None:
    group = GroupWindow(("off", "a:3_1_4"), 100)
    for tokens in (1, 2, 3):
        group.add(PlayedRound("a:3_1_4", tokens, 0.5, 1.0 * tokens, 2.0 * tokens))
        group.add(PlayedRound("off", 1, 0.5, 1.0, 2.0))
    group.renew({"a:3_1_4": 1.5}, 2)
    arm = group.arms["a:3_1_4"]
    assert (list(arm.rates), arm.tokens, arm.seconds, arm.accepted) == ([6.0, 9.0], 7.5, 1.0, 7.5)
    assert (arm.rate, group.arms["off"].rounds) == (7.5, 3)


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


def test_an_arm_that_is_far_slower_in_the_nearest_group_is_not_tried() -> None:
    bandit = make(epsilon=0.0)
    play(bandit, 50, {"off": 120.0, "a:3_1_4": 150.0, "b:3_1_4": 40.0}, batch=4)
    tried = play(bandit, 50, {"off": 100.0, "a:3_1_4": 90.0, "b:3_1_4": 140.0}, batch=1)
    assert tried == {"off": 50 - TRIAL_PULLS, "a:3_1_4": TRIAL_PULLS}
    hoped = make(epsilon=0.5)
    play(hoped, 50, {"off": 120.0, "a:3_1_4": 150.0, "b:3_1_4": 40.0}, batch=4)
    found = play(hoped, 300, {"off": 100.0, "a:3_1_4": 90.0, "b:3_1_4": 140.0}, batch=1)
    assert found.most_common(1)[0][0] == "b:3_1_4", (
        "what is explored by chance is found all the same"
    )


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
