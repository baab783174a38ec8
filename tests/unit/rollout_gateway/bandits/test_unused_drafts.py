"""What an arm would have given teaches what a round of it teaches of drafts, and no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from bandit_rounds import batch_of

from paceline.services.rollout_gateway.bandits import BANDITS, build_bandit
from paceline.services.rollout_gateway.bandits.base import (
    Bandit,
    BanditSettings,
    CostSample,
    RoundOutcome,
    UnusedDrafts,
)

ARMS = ("off", "eagle:3_1_4", "ngram:4_1_5")
NGRAM = "ngram:4_1_5"
SECONDS = {"off": 2.0, "eagle:3_1_4": 4.0, NGRAM: 3.0}
BATCH = 8


def make(kind: str = "cost_model", **settings: object) -> Bandit:
    values = {"kind": kind, "groups": (1, 5), "window": 1000, **settings}
    bandit = build_bandit(BanditSettings.model_validate(values), ARMS, seed=1)
    bandit.prime(
        [CostSample(arm, size, 10, SECONDS[arm]) for arm in ARMS for size in (1, 64)],
    )
    return bandit


def play(
    bandit: Bandit, rounds: int, taken: dict[str, float], *, looks: int = 0, first: int = 0
) -> Counter[str]:
    """Rounds whose rows get about `taken` tokens by arm; in each of `looks` rounds one of n-grams
    that were not used."""
    source, chosen = np.random.default_rng(first), Counter[str]()
    for number in range(first, first + rounds):
        situation = batch_of(BATCH, first=number * BATCH)
        choice = bandit.choose(situation)
        chosen[choice.arm] += 1

        def tokens(arm: str) -> Sequence[int]:
            most = int(arm.partition(":")[2][:1] or 0)
            share = (taken[arm] - 1.0) / most if most else 0.0
            return [1 + int(one) for one in source.binomial(most, share, BATCH)]

        drawn = tokens(choice.arm)
        bandit.observe(
            RoundOutcome(choice.arm, situation, drawn, SECONDS[choice.arm], choice.explored)
        )
        if looks and number % looks == 0 and choice.arm != NGRAM:
            rows = range(BATCH)
            bandit.observe_unused(
                UnusedDrafts(NGRAM, situation, rows, tokens(NGRAM), [True] * BATCH)
            )
    return chosen


POOR = {"off": 1.0, "eagle:3_1_4": 3.4, NGRAM: 1.1}
GOOD = {**POOR, NGRAM: 4.6}


@pytest.mark.parametrize("more", [True, False])
def test_an_arms_drafts_count_as_those_of_its_round(more: bool) -> None:
    used, unused = make(), make()
    taken = [1, 2, 3, 4, 5, 5, 1, 2]
    limit = 1000 if more else 0
    situation = batch_of(BATCH, limit=limit)
    used.observe(RoundOutcome(NGRAM, situation, taken, 3.0, explored=False))
    plain = RoundOutcome("off", situation, [1] * BATCH, 2.0, explored=False)
    unused.observe(plain)
    unused.observe_unused(UnusedDrafts(NGRAM, situation, range(BATCH), taken, [more] * BATCH))
    assert unused.snapshot().acceptance == used.snapshot().acceptance
    costs = {one.arm for one in unused.snapshot().costs}
    assert costs == {"off"}, "nothing is learned of seconds"


def test_what_is_known_of_other_arms_does_not_fade_by_a_look() -> None:
    bandit = make()
    play(bandit, 100, POOR)
    (before,) = [one for one in bandit.snapshot().acceptance if one.family == "eagle:1"]
    situation = batch_of(BATCH)
    bandit.observe_unused(UnusedDrafts(NGRAM, situation, range(4), [1, 2, 1, 5], [True] * 4))
    (after,) = [one for one in bandit.snapshot().acceptance if one.family == "eagle:1"]
    assert after == before


def test_n_grams_that_have_become_right_are_taken_within_a_hundred_rounds() -> None:
    """Without looks they wait for their next trial."""
    blind, looking = make(), make()
    play(blind, 400, POOR)
    play(looking, 400, POOR, looks=8)
    assert play(blind, 100, GOOD, first=400)[NGRAM] < 5
    play(looking, 100, GOOD, looks=8, first=400)
    assert play(looking, 50, GOOD, looks=8, first=500)[NGRAM] > 45


def test_n_grams_that_stay_wrong_are_tried_for_their_seconds_alone() -> None:
    blind, looking = make(watchdog_rounds=0), make(watchdog_rounds=0)
    chosen = play(blind, 3000, POOR)
    looked = play(looking, 3000, POOR, looks=8)
    assert looked[NGRAM] < chosen[NGRAM] / 3


@pytest.mark.parametrize("kind", sorted(BANDITS))
def test_every_kind_takes_unused_drafts_and_chooses_arms(kind: str) -> None:
    bandit = make(kind)
    chosen = play(bandit, 200, POOR, looks=3)
    assert chosen.total() == 200
    assert chosen.keys() <= set(ARMS)
