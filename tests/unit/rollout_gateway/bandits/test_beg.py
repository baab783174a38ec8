"""BEG's table: draft tokens by batch size; epsilon-greedy by medians where arms share a number."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from bandit_rounds import batch_of, round_of
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.services.rollout_gateway.bandits import build_bandit
from paceline.services.rollout_gateway.bandits.base import Bandit, BanditSettings
from paceline.services.rollout_gateway.bandits.kinds import (
    GroupWindow,
    PlayedRound,
    bucket_arms,
    median_rate,
)

FASTRL = ("off", "eagle:8_4_32", "eagle:8_4_16", "eagle:8_4_8", "eagle:8_4_48")
SHARED = ("off", "eagle:3_2_8", "eagle:7_1_8", "eagle:3_1_4")


def make(arms: tuple[str, ...], **settings: object) -> Bandit:
    return build_bandit(BanditSettings.model_validate({"kind": "beg", **settings}), arms, seed=1)


def test_fastrls_default_is_a_table_that_never_explores() -> None:
    bandit = make(FASTRL, epsilon=1.0)
    table = {1: 48, 2: 32, 4: 32, 5: 16, 20: 16, 21: 8, 300: 8}
    for batch, tokens in table.items():
        for _ in range(5):
            choice = bandit.choose(batch_of(batch))
            assert (choice.arm, choice.explored) == (f"eagle:8_4_{tokens}", False)
            bandit.observe(round_of(choice.arm, batch, batch, 1.0))


def test_arms_that_share_a_number_share_a_bucket() -> None:
    assert bucket_arms(SHARED, (1, 8)) == {1: ("eagle:3_2_8", "eagle:7_1_8"), 8: ("eagle:3_1_4",)}


def test_within_a_bucket_the_unseen_come_first_then_the_highest_median() -> None:
    """Medians 10 and 12, means 37 and 12: one round that seemed fast does not decide."""
    bandit, chosen = make(SHARED, groups=(1, 8), epsilon=0.0), []
    rounds = {"eagle:3_2_8": iter([10, 100, 10, 10]), "eagle:7_1_8": iter([12] * 99)}
    for _ in range(20):
        choice = bandit.choose(batch_of(1))
        chosen.append((choice.arm, choice.explored))
        bandit.observe(
            round_of(choice.arm, 1, next(rounds[choice.arm]), 1.0, explored=choice.explored)
        )
    first, second = ("eagle:3_2_8", True), ("eagle:7_1_8", True)
    assert chosen[:2] == [first, second]
    assert chosen[2:] == [("eagle:7_1_8", False)] * 18


def test_epsilon_explores_the_bucket_alone() -> None:
    bandit, chosen = make(SHARED, groups=(1, 8), epsilon=1.0), Counter[str]()
    for _ in range(2000):
        chosen[bandit.choose(batch_of(1)).arm] += 1
    assert chosen["eagle:3_2_8"] + chosen["eagle:7_1_8"] == 2000
    assert chosen["eagle:3_2_8"] == pytest.approx(1000, abs=90)


@pytest.mark.parametrize("groups", [(1,), (1, 2, 5)])
def test_numbers_and_groups_that_do_not_match_are_refused(groups: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"draft tokens \[8, 4\]"):
        make(SHARED, groups=groups)


def test_an_arm_without_a_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="eagle:deep"):
        make(("off", "eagle:deep"), groups=(1,))


@given(
    window=st.integers(1, 12),
    events=st.lists(
        st.one_of(
            st.tuples(st.sampled_from(SHARED), st.integers(0, 5)), st.sets(st.sampled_from(SHARED))
        )
    ),
)
def test_the_median_is_that_of_the_windows_rounds(
    window: int, events: list[tuple[str, int] | set[str]]
) -> None:
    group, kept = GroupWindow(SHARED, window), list[tuple[str, int]]()
    for event in events:
        if isinstance(event, set):
            group.renew(dict.fromkeys(event, 1.0), 0)
            kept = [one for one in kept if one[0] not in event]
        else:
            group.add(PlayedRound(event[0], event[1], 1.0, 1.0, event[1]))
            kept = [*kept, event][-window:]
        for arm in SHARED:
            tokens = [tokens for name, tokens in kept if name == arm]
            assert median_rate(group.arms[arm]) == (np.median(tokens) if tokens else np.inf)
