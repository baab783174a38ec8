"""What is expected of an arm that a batch-size group has not tried, and that it saves trials."""

from __future__ import annotations

from collections import Counter

import pytest
from bandit_rounds import batch_of, round_of

from paceline.services.rollout_gateway.bandits import build_bandit
from paceline.services.rollout_gateway.bandits.base import BanditSettings, CostSample
from paceline.services.rollout_gateway.bandits.epsilon_greedy import TRIAL_PULLS
from paceline.services.rollout_gateway.bandits.prospects import Prospects

ARMS = ("off", "eagle:3_1_4", "eagle:5_1_6", "eagle:2_2_5", "ngram:4_1_5")
SECONDS = dict(zip(ARMS, (1.0, 2.0, 2.5, 3.0, 1.5), strict=True))
TABLE = [CostSample(arm, batch, 32, batch * SECONDS[arm]) for arm in ARMS for batch in (1, 64)]


def prospects(table: list[CostSample] = TABLE) -> Prospects:
    made = Prospects(ARMS)
    made.prime(table)
    return made


def test_off_gives_a_token_a_row_and_what_nobody_has_tried_may_give_any() -> None:
    rates = prospects().rates(batch_of(1), {})
    assert rates == {arm: 1.0 if arm == "off" else float("inf") for arm in ARMS}


def test_a_chain_says_what_others_of_its_drafter_can_give_at_most() -> None:
    rates = prospects().rates(batch_of(1), {"eagle:3_1_4": 2.5})
    assert rates is not None
    assert rates["eagle:3_1_4"] == pytest.approx(2.5 / 2.0)
    assert rates["eagle:5_1_6"] == pytest.approx((1 + 1.5 * 5 / 3) / 2.5)
    assert rates["eagle:2_2_5"] == rates["ngram:4_1_5"] == float("inf")
    shorter = prospects().rates(batch_of(1), {"eagle:5_1_6": 2.5})
    assert shorter is not None
    assert shorter["eagle:3_1_4"] == pytest.approx(2.5 / 2.0)


def test_without_seconds_of_every_arm_nothing_is_said() -> None:
    assert prospects(TABLE[2:]).rates(batch_of(1), {}) is None


def test_a_second_group_tries_only_what_may_beat_the_best() -> None:
    """Rounds take what the table says: n-grams and plain decoding are far behind, in any group."""
    bandit = build_bandit(BanditSettings(kind="epsilon_greedy", epsilon=0.0), ARMS, seed=1)
    bandit.prime(TABLE)
    lengths = dict(zip(ARMS, (1.0, 2.9, 3.6, 3.0, 1.2), strict=True))
    chosen = []
    for batch in (64, 20):
        chosen.append(Counter[str]())
        for _ in range(100):
            arm = bandit.choose(batch_of(batch)).arm
            chosen[-1][arm] += 1
            tokens = round(lengths[arm] * batch)
            bandit.observe(round_of(arm, batch, tokens, batch * SECONDS[arm]))
    first, second = chosen
    assert first["eagle:3_1_4"] + first["eagle:5_1_6"] >= 100 - 2 * TRIAL_PULLS
    assert "off" not in first
    assert set(second) <= {"eagle:3_1_4", "eagle:5_1_6"}
