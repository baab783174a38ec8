"""Properties of every bandit: legal choices, separate groups, forgetting, bounded regret, the
watchdog.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
from bandit_rounds import batch_of, round_of
from hypothesis import given
from hypothesis import strategies as st

from paceline.arm_names import speculator_of
from paceline.services.rollout_gateway.bandits import BANDITS, build_bandit
from paceline.services.rollout_gateway.bandits.base import (
    Bandit,
    BanditSettings,
    RoundOutcome,
    group_of,
)
from paceline.speculators.shift import AcceptanceShift
from paceline.trajectory import Target

GROUPS = (1, 5)
ARMS = ("off", "a:7_1_8", "b:7_1_8", "a:3_1_4", "b:3_1_4")
"""Draft tokens 8 and 4, as many as groups: beg chooses between the 8 in group 1 and between the 4
in group 5.
"""
STEPS = {"off": 0, "a:7_1_8": 7, "b:7_1_8": 7, "a:3_1_4": 3, "b:3_1_4": 3}
CHANCES = {"a": 0.9, "b": 0.4}
"""The chance that all drafts of a row are accepted; otherwise no draft is."""
POOR_A = {"a": 0.05, "b": 0.4}
RATES = {"off": 0.3, "a:7_1_8": 0.9, "b:7_1_8": 0.5, "a:3_1_4": 0.3, "b:3_1_4": 0.4}
"""Tokens per second and row at CHANCES, on average over rounds; no round gives more than 1.06."""
BETTER_A = AcceptanceShift(1, (0.05,) * 7, (0.9,) * 7)
"""A trainer's report that `a` has improved from POOR_A to its rates in CHANCES."""
KINDS = tuple(BANDITS)
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, arms: tuple[str, ...] = ARMS, seed: int = 1, **settings: object) -> Bandit:
    values = {"kind": kind, "groups": GROUPS, **settings}
    return build_bandit(BanditSettings.model_validate(values), arms, seed)


def expected_tokens(arm: str, chances: Mapping[str, float]) -> float:
    """Return the expected tokens of one row in a round."""
    return 1 + STEPS[arm] * chances.get(speculator_of(arm), 0.0)


def play(
    bandit: Bandit,
    rounds: int,
    chances: Mapping[str, float] = CHANCES,
    *,
    rates: Mapping[str, float] = RATES,
    seed: int = 3,
    batch: int = 1,
) -> Counter[str]:
    """Arms chosen in a world where an arm's round takes the seconds that make its rate `rates` at
    CHANCES.
    """
    source, chosen = np.random.default_rng(seed), Counter[str]()
    for luck in source.random((rounds, batch)):
        situation = batch_of(batch)
        choice = bandit.choose(situation)
        chosen[choice.arm] += 1
        chance = chances.get(speculator_of(choice.arm), 0.0)
        taken = [1 + STEPS[choice.arm] * int(one < chance) for one in luck]
        seconds = expected_tokens(choice.arm, CHANCES) / rates[choice.arm]
        bandit.observe(RoundOutcome(choice.arm, situation, taken, seconds, choice.explored))
    return chosen


@every_kind
def test_an_arm_measured_elsewhere_is_known(kind: str) -> None:
    rates = RATES | {"b:7_1_8": 3.0}
    measured, new = make(kind, seed=1), make(kind, seed=2)
    play(measured, 300, rates=rates)
    assert new.choose(batch_of(1)).arm != "b:7_1_8"
    new.learn(measured.reports())
    assert new.choose(batch_of(1)).arm == "b:7_1_8"
    assert not new.reports(), "only its own rounds"


def regret(chosen: Counter[str]) -> float:
    """Tokens per second that always taking the best arm would have given more, summed over rounds,
    in expectation.
    """
    return sum(pulls * (max(RATES.values()) - RATES[arm]) for arm, pulls in chosen.items())


EQUAL_SECONDS = {arm: expected_tokens(arm, CHANCES) for arm in ARMS}
"""Rates of a world where every round takes a second."""


@given(
    kind=st.sampled_from(KINDS),
    window=st.integers(1, 30),
    limit=st.sampled_from([0, 2, 20]),
    seed=st.integers(0, 99),
    events=st.lists(
        st.one_of(
            st.tuples(st.integers(1, 64), st.integers(0, 200), st.sampled_from([0.0, 0.01, 0.5])),
            st.sets(st.sampled_from(ARMS)),
        ),
        max_size=120,
    ),
)
def test_choices_are_arms_and_every_round_is_reported(
    kind: str, window: int, limit: int, seed: int, events: list[tuple[int, int, float] | set[str]]
) -> None:
    bandit, pulls, explored = (
        make(kind, seed=seed, window=window, watchdog_rounds=limit),
        Counter[object](),
        0,
    )
    for event in events:
        if isinstance(event, set):
            bandit.renew(event, Target.POLICY if len(event) % 2 else Target.DRAFTER)
            continue
        batch, tokens, seconds = event
        choice = bandit.choose(batch_of(batch))
        assert choice.arm in ARMS
        bandit.observe(round_of(choice.arm, batch, tokens, seconds, explored=choice.explored))
        pulls[choice.arm, group_of(GROUPS, batch)] += 1
        explored += choice.explored
    reports = bandit.reports()
    assert {(report.arm, report.batch_group): report.pulls for report in reports} == pulls
    assert sum(report.explorations for report in reports) == explored


@every_kind
def test_the_same_seed_chooses_the_same(kind: str) -> None:
    first, second = make(kind, seed=7), make(kind, seed=7)
    assert play(first, 500) == play(second, 500)
    assert [first.choose(batch_of(1)) for _ in range(20)] == [
        second.choose(batch_of(1)) for _ in range(20)
    ]


@every_kind
def test_an_only_arm_is_taken_and_is_no_exploration(kind: str) -> None:
    bandit = make(kind, arms=("off",))
    for batch in (1, 5, 500):
        choice = bandit.choose(batch_of(batch))
        assert (choice.arm, choice.explored) == ("off", False)
        bandit.observe(round_of("off", batch, batch, 1.0))


@every_kind
def test_groups_learn_apart(kind: str) -> None:
    bandit = make(kind)
    play(bandit, 1000, batch=4)
    play(bandit, 1000, rates={**dict.fromkeys(ARMS, 0.2), "b:3_1_4": 0.9}, batch=5)
    most = {
        group: max(
            (one for one in bandit.reports() if one.batch_group == group), key=lambda one: one.pulls
        ).arm
        for group in GROUPS
    }
    assert most == {1: "a:7_1_8", 5: "b:3_1_4"}


# T = 5000 rounds, gaps .6 .4 .6 .5. ucb: theorem 1 of Auer et al. 2002, 8 ln T sum(1 / gap) + (1 +
# pi^2 / 3) sum(gap). epsilon_greedy explores for T x .1 x mean gap .42 = 210, and errs for at most
# a third of it. beg has the gap .4 alone in its bucket and explores for T x .1 x .2 = 100, a third
# as above.
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "bound"),
    [("ucb", 543), ("epsilon_greedy", 280), ("beg", 133)],
)
@pytest.mark.parametrize("seed", range(5))
def test_regret_in_a_world_that_stays_is_bounded(kind: str, bound: float, seed: int) -> None:
    bandit = make(kind, seed=seed, window=5000)
    assert regret(play(bandit, 5000, seed=100 + seed)) < bound


@every_kind
def test_a_forgotten_arm_is_tried_again_and_taken_when_it_has_become_the_best(kind: str) -> None:
    bandit = make(kind, window=1000)
    play(bandit, 1000, POOR_A)
    bandit.renew({"a:7_1_8", "a:3_1_4"}, Target.DRAFTER)
    assert play(bandit, 1000, seed=4)["a:7_1_8"] > 600


@every_kind
def test_a_drafter_that_is_said_to_accept_more_is_taken_without_a_trial_of_its_other_arms(
    kind: str,
) -> None:
    """1,000 rounds of `a` are worth 64 at most. A report of 0.9 accepted instead of 0.05 then makes
    `a` the best arm.
    """
    bandit = make(kind, window=1000, epsilon=0.0)
    play(bandit, 1000, POOR_A)
    bandit.renew({"a:7_1_8", "a:3_1_4"}, Target.DRAFTER, BETTER_A)
    chosen = play(bandit, 200, seed=4)
    assert chosen["a:7_1_8"] > 120
    fresh = make(kind, window=1000, epsilon=0.0)
    play(fresh, 1000, POOR_A)
    fresh.renew({"a:7_1_8", "a:3_1_4"}, Target.DRAFTER)
    assert chosen["a:3_1_4"] <= play(fresh, 200, seed=4)["a:3_1_4"]


@every_kind
def test_a_drafter_that_is_as_good_as_the_one_before_changes_no_choice_at_first(kind: str) -> None:
    bandit, other = make(kind, window=1000), make(kind, window=1000)
    for one in (bandit, other):
        play(one, 1000)
    bandit.renew({"a:7_1_8", "a:3_1_4"}, Target.DRAFTER, AcceptanceShift(1, (0.9,), (0.9,)))
    assert play(bandit, 100, seed=4)["a:7_1_8"] >= play(other, 100, seed=4)["a:7_1_8"] - 20


@every_kind
def test_a_world_that_changes_unannounced_is_followed_once_the_window_has_turned_over(
    kind: str,
) -> None:
    bandit = make(kind, window=300)
    play(bandit, 1500)
    play(bandit, 900, POOR_A, seed=4)
    assert play(bandit, 900, POOR_A, seed=5).most_common(1)[0][0] == "b:7_1_8"


@every_kind
def test_a_dead_drafter_is_left_and_tried_again_when_forgotten(kind: str) -> None:
    bandit = make(kind, epsilon=0.5, watchdog_rounds=20)
    assert set(play(bandit, 400, {}, rates=EQUAL_SECONDS)) != {"off"}
    assert set(play(bandit, 200, {}, rates=EQUAL_SECONDS)) == {"off"}
    bandit.renew(set(ARMS), Target.DRAFTER)
    assert set(play(bandit, 100, rates=EQUAL_SECONDS)) != {"off"}


@every_kind
def test_without_the_watchdog_a_dead_drafter_is_still_tried(kind: str) -> None:
    bandit = make(kind, epsilon=0.5, watchdog_rounds=0)
    play(bandit, 400, {}, rates=EQUAL_SECONDS)
    assert set(play(bandit, 200, {}, rates=EQUAL_SECONDS)) != {"off"}
