"""UCB1 chooses by the formula: indices in float64 by hand, rewards over the window's maximum."""

from __future__ import annotations

import math

import numpy as np
import pytest
from bandit_rounds import batch_of, round_of
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.rollout_gateway.bandits.base import BanditSettings
from paceline.services.rollout_gateway.bandits.kinds import (
    UCB1,
    GroupWindow,
    PlayedRound,
    highest_rate,
    ucb1_index,
)

ARMS = ("off", "a:3_1_4", "b:3_1_4")
RATES = {"off": 100, "a:3_1_4": 80, "b:3_1_4": 50}


def make(window: int = 1000) -> UCB1:
    return UCB1(BanditSettings(window=window), ARMS, seed=1)


def play(bandit: UCB1, rounds: int, rates: dict[str, int]) -> list[str]:
    chosen = []
    for _ in range(rounds):
        choice = bandit.choose(batch_of(1))
        chosen.append(choice.arm)
        bandit.observe(round_of(choice.arm, 1, rates[choice.arm], 1.0, explored=choice.explored))
    return chosen


@pytest.mark.parametrize(
    ("mean", "rounds", "total", "index"),
    [
        (1.0, 1, 3, 2.4823038073675112),  # 1 + sqrt(2 x 1.0986122886681098)
        (0.8, 2, 4, 1.9774100225154747),  # .8 + sqrt(1.3862943611198906)
        (0.5, 10, 1000, 1.6753940002383998),  # .5 + sqrt(2 x 6.907755278982137 / 10)
    ],
)
def test_the_index_is_the_papers(mean: float, rounds: int, total: int, index: float) -> None:
    assert ucb1_index(mean, rounds, total) == pytest.approx(index, rel=1e-14)


def test_the_first_choices_are_those_worked_out_by_hand() -> None:
    """Rewards 1, .8, .5. After one round each every bonus is sqrt(2 ln 3) = 1.4823: off leads with
    2.4823.

    n = 4: off 1 + sqrt(ln 4) = 2.1774, a .8 + sqrt(2 ln 4) = 2.4651, b 2.1651: a.
    n = 5: off 1 + sqrt(ln 5) = 2.2686, a .8 + 1.2686 = 2.0686, b .5 + 1.7941 = 2.2941: b.
    n = 6: off 1 + sqrt(ln 6) = 2.3386, a 2.1386, b 1.8386: off.
    n = 7: off 1 + sqrt(2 ln 7 / 3) = 2.1390, a .8 + sqrt(ln 7) = 2.1950, b 1.8950: a.
    n = 8: off 1 + sqrt(2 ln 8 / 3) = 2.1774, a .8 + 1.1774 = 1.9774, b .5 + 1.4420 = 1.9420: off.
    """
    expected = [*ARMS, "off", "a:3_1_4", "b:3_1_4", "off", "a:3_1_4", "off"]
    assert play(make(), 9, RATES) == expected


def test_a_long_game_is_the_formulas_to_the_last_choice() -> None:
    sums, counts = np.zeros(3), np.zeros(3)
    for number, arm in enumerate(play(make(), 800, RATES)):
        with np.errstate(divide="ignore", invalid="ignore"):
            index = sums / counts / 100 + np.sqrt(2 * np.log(max(number, 1)) / counts)
        best = int(np.argmax(np.where(counts == 0, np.inf, index)))
        assert arm == ARMS[best]
        sums[best] += RATES[arm]
        counts[best] += 1


def test_rates_of_any_size_give_the_same_choices() -> None:
    assert play(make(), 500, {arm: rate * 1000 for arm, rate in RATES.items()}) == play(
        make(), 500, RATES
    )


def test_a_choice_explores_when_it_is_not_the_best_so_far() -> None:
    bandit, explored = make(), []
    for _ in range(6):
        choice = bandit.choose(batch_of(1))
        explored.append(choice.explored)
        bandit.observe(round_of(choice.arm, 1, RATES[choice.arm], 1.0, explored=choice.explored))
    assert explored == [True, True, True, False, True, True]


def test_a_glitch_scales_rewards_no_longer_than_the_window() -> None:
    group = GroupWindow(ARMS, window=3)
    highest = []
    for tokens in (10, 9000, 20, 30, 15, 5, 5, 5):
        group.add(PlayedRound("off", tokens, 1.0, 1.0, tokens))
        highest.append(highest_rate(group.arms.values()))
    assert highest == [10, 9000, 9000, 9000, 30, 30, 15, 5]
    group.renew({"off": 1.0}, 0)
    assert highest_rate(group.arms.values()) == 0.0


@given(
    window=st.integers(1, 12),
    events=st.lists(
        st.one_of(
            st.tuples(st.sampled_from(ARMS), st.integers(0, 5)), st.sets(st.sampled_from(ARMS))
        )
    ),
)
def test_sums_and_maximum_are_those_of_the_last_rounds(
    window: int, events: list[tuple[str, int] | set[str]]
) -> None:
    group, kept = GroupWindow(ARMS, window), list[tuple[str, int]]()
    for event in events:
        if isinstance(event, set):
            group.renew(dict.fromkeys(event, 1.0), 0)
            kept = [one for one in kept if one[0] not in event]
        else:
            group.add(PlayedRound(event[0], event[1], 0.5, 1.0, 2.0 * event[1]))
            kept = [*kept, event][-window:]
        assert highest_rate(group.arms.values()) == max(
            (2.0 * tokens for _, tokens in kept), default=0.0
        )
        for arm in ARMS:
            tokens = [tokens for name, tokens in kept if name == arm]
            assert group.arms[arm].rounds == len(tokens)
            mean = 2 * math.fsum(tokens) / len(tokens) if tokens else 0.0
            assert list(group.arms[arm].rates) == [2.0 * one for one in tokens]
            assert group.arms[arm].rate == pytest.approx(mean)
