"""A drafter without accepted drafts rests within 20 rounds; a drafter that works, even seldom, does
not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from bandit_rounds import batch_of, round_of

from paceline.services.rollout_gateway.bandits.base import (
    ArmChoice,
    Bandit,
    BanditSettings,
    Situation,
)
from paceline.services.rollout_gateway.bandits.kinds import WindowedBandit
from paceline.services.rollout_gateway.bandits.watchdog import AcceptanceWatchdog, Pulse
from paceline.trajectory import Target

ARMS = ("off", "eagle:3_1_4", "eagle:5_1_6", "ngram:4_1_5")
EAGLE = ("eagle:3_1_4", "eagle:5_1_6")


class AnyArm(WindowedBandit):
    """Takes any arm."""

    def _choose(self, situation: Situation, names: Sequence[str]) -> ArmChoice:
        return ArmChoice(self._random.choice(names), explored=True)


def make(arms: tuple[str, ...] = ARMS, **settings: object) -> Bandit:
    chosen = BanditSettings.model_validate({"groups": (1, 5), **settings})
    inner = AnyArm(chosen, arms, seed=1)
    return AcceptanceWatchdog(inner, chosen, arms) if chosen.watchdog_rounds else inner


def tell(bandit: Bandit, arms: Iterable[str], accept_length: float, batch: int = 1) -> None:
    for arm in arms:
        bandit.observe(round_of(arm, batch, round(accept_length * batch), 1.0, explored=True))


def chosen(bandit: Bandit, batch: int = 1) -> set[str]:
    return {bandit.choose(batch_of(batch)).arm for _ in range(200)}


def settle(bandit: Bandit, batch: int = 1) -> None:
    """Past the trial rounds, with life in every drafter."""
    tell(bandit, ARMS * 10, 3.0, batch)


def death(accept_lengths: Iterable[float], limit: int = 20) -> int | None:
    """The round, from 1, at which a drafter is found dead."""
    pulse = Pulse(limit)
    return next(
        (number for number, length in enumerate(accept_lengths, 1) if pulse.record_round(length)),
        None,
    )


# ---- the verdict


@pytest.mark.parametrize("limit", [1, 5, 20])
def test_a_drafter_without_any_acceptance_is_dead_at_the_limit(limit: int) -> None:
    assert death([1.0] * 100, limit) == limit


@pytest.mark.parametrize("row_share", [0.0, 0.01, 0.03])
def test_chance_hits_of_a_large_batch_are_no_life(row_share: float) -> None:
    source = np.random.default_rng(2)
    rows = 1 + source.binomial(64, row_share, size=20) / 64
    assert death(rows) == 20


def test_one_lucky_round_of_one_row_is_noise_and_two_are_not() -> None:
    """One round of v: mean v / 20, standard error v / 20.

    Two rounds: mean v / 10, error .0688 v; the mean is 1.45 errors.
    """
    assert death([4.0, *[1.0] * 40]) == 20
    assert death([4.0, 4.0, *[1.0] * 40]) is None


def test_a_drafter_that_worked_is_dead_20_rounds_after_its_last_acceptance() -> None:
    source = np.random.default_rng(2)
    alive = 1 + source.binomial(5, 0.7, size=5000)
    assert death(alive) is None
    last = int(np.flatnonzero(alive > 1)[-1]) + 1
    assert death([*alive, *[1.0] * 40]) == last + 20


def test_a_drafter_that_seldom_proposes_gets_a_longer_silence() -> None:
    """Accepted in 100 of the 496 rounds up to the last: (396 / 496) ** k <= 2 ** -20 from k = 62
    on.
    """
    seldom = ([3.0] + [1.0] * 4) * 100
    assert death([*seldom, *[1.0] * 80]) == 496 + 62


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("seed", range(4))
def test_a_living_drafter_is_not_called_dead_in_ten_thousand_rounds(
    share: float, seed: int
) -> None:
    source = np.random.default_rng(seed)
    assert death(1.0 + source.binomial(1, share, size=10_000) * 2) is None


# ---- consequences


def test_all_arms_of_a_dead_drafter_rest_and_the_others_go_on() -> None:
    bandit = make()
    tell(bandit, ["off", "ngram:4_1_5"] * 20, 2.0)
    tell(bandit, EAGLE * 9, 1.0)
    tell(bandit, EAGLE[:1], 1.0)
    assert chosen(bandit) == set(ARMS)
    tell(bandit, EAGLE[:1], 1.0)
    assert chosen(bandit) == {"off", "ngram:4_1_5"}


def test_off_stays_whatever_its_rounds_say() -> None:
    bandit = make()
    tell(bandit, ARMS * 100, 1.0)
    assert chosen(bandit) == {"off"}


def test_all_arms_stay_when_none_would_be_left() -> None:
    bandit = make(arms=EAGLE)
    tell(bandit, EAGLE * 100, 1.0)
    assert chosen(bandit) == set(EAGLE)


def test_a_group_judges_by_its_own_rounds() -> None:
    bandit = make()
    settle(bandit, batch=5)
    tell(bandit, EAGLE * 10, 1.0, batch=4)
    assert chosen(bandit, batch=1).isdisjoint(EAGLE)
    assert chosen(bandit, batch=5) == set(ARMS)


def test_a_forgotten_drafter_has_20_rounds_to_prove_itself() -> None:
    bandit = make()
    settle(bandit)
    tell(bandit, EAGLE * 10, 1.0)
    assert chosen(bandit).isdisjoint(EAGLE)
    bandit.renew(set(EAGLE), Target.DRAFTER)
    assert chosen(bandit) & set(EAGLE)
    tell(bandit, EAGLE * 10, 1.0)
    assert chosen(bandit).isdisjoint(EAGLE)
    bandit.renew({"ngram:4_1_5"}, Target.DRAFTER)
    assert chosen(bandit).isdisjoint(EAGLE)


def test_a_new_policy_revives_no_drafter() -> None:
    bandit = make()
    settle(bandit)
    tell(bandit, EAGLE * 10, 1.0)
    bandit.renew(set(ARMS), Target.POLICY)
    assert chosen(bandit).isdisjoint(EAGLE)


def test_zero_rounds_switch_it_off() -> None:
    bandit = make(watchdog_rounds=0)
    tell(bandit, ARMS * 100, 1.0)
    assert chosen(bandit) == set(ARMS)


def test_a_death_is_reported_in_each_group() -> None:
    bandit = make()
    tell(bandit, EAGLE * 100, 1.0, batch=1)
    tell(bandit, EAGLE * 100, 1.0, batch=5)
    assert deaths(bandit) == {(arm, group): 1 for arm in EAGLE for group in (1, 5)}
    bandit.renew(set(EAGLE), Target.DRAFTER)
    tell(bandit, EAGLE * 100, 1.0, batch=5)
    tell(bandit, ["off"], 1.0)
    assert deaths(bandit) == {("off", 1): 0} | {
        (arm, g): g // 5 + 1 for arm in EAGLE for g in (1, 5)
    }


def deaths(bandit: Bandit) -> dict[tuple[str, int], int]:
    return {(one.arm, one.batch_group): one.drafter_deaths for one in bandit.reports()}


def test_a_dead_drafter_is_tried_again_after_a_window_of_rounds() -> None:
    bandit = make(window=100)
    settle(bandit)
    tell(bandit, ["ngram:4_1_5"] * 30, 1.0)
    assert "ngram:4_1_5" not in chosen(bandit)
    tell(bandit, ("off", *EAGLE) * 27, 3.0)
    assert "ngram:4_1_5" not in chosen(bandit)
    tell(bandit, ("off", *EAGLE) * 10, 3.0)
    assert "ngram:4_1_5" in chosen(bandit)
