"""The cost model takes the arm that the formulas name, and learns what a round shows and no
more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from bandit_rounds import batch_of
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.services.rollout_gateway.bandits.base import (
    BanditSettings,
    CostSample,
    RoundOutcome,
    RowFacts,
    Situation,
)
from paceline.services.rollout_gateway.bandits.cost_model.acceptance import GroupAcceptance
from paceline.services.rollout_gateway.bandits.cost_model.bandit import CostModel
from paceline.services.rollout_gateway.bandits.cost_model.positions import family_and_steps
from paceline.services.rollout_gateway.bandits.evidence import POLICY_TRIALS, combine
from paceline.speculators.shift import AcceptanceShift
from paceline.trajectory import Target

ARMS = ("off", "eagle:3_1_4", "eagle:5_1_6", "eagle:7_1_8", "ngram:4_1_5")
STEPS = {"off": 0, "eagle:3_1_4": 3, "eagle:5_1_6": 5, "eagle:7_1_8": 7, "ngram:4_1_5": 4}
EAGLE = {"eagle:3_1_4", "eagle:5_1_6", "eagle:7_1_8"}
SECONDS = {
    "off": 2.0,
    "eagle:3_1_4": 4.6,
    "eagle:5_1_6": 5.4,
    "eagle:7_1_8": 5.8,
    "ngram:4_1_5": 3.0,
}
Chances = Mapping[str, Sequence[float]]


def make(*, primed: bool = True, window: int = 1000, groups: tuple[int, ...] = (1, 5)) -> CostModel:
    bandit = CostModel(
        BanditSettings(kind="cost_model", window=window, groups=groups), ARMS, seed=1
    )
    if primed:
        bandit.prime(
            [
                CostSample(arm, size, 10, seconds)
                for arm, seconds in SECONDS.items()
                for size in (1, 64)
            ]
        )
    return bandit


def speculator(arm: str) -> str:
    return arm.partition(":")[0]


def hand_tokens(arm: str, chances: Chances) -> float:
    """1 + a_1 + a_1 a_2 + ..., term by term."""
    total, product = 1.0, 1.0
    for position in range(STEPS[arm]):
        product *= chances[speculator(arm)][position]
        total += product
    return total


def hand_best(chances: Chances, seconds: Mapping[str, float] = SECONDS) -> str:
    return max(ARMS, key=lambda arm: hand_tokens(arm, chances) / seconds[arm])


def drawn(arm: str, chances: Chances, source: np.random.Generator) -> int:
    """Tokens of a round of one row."""
    taken = 1
    for position in range(STEPS[arm]):
        if source.random() >= chances[speculator(arm)][position]:
            break
        taken += 1
    return taken


def play(
    bandit: CostModel,
    rounds: int,
    chances: Chances,
    *,
    seconds: Mapping[str, float] = SECONDS,
    batch: int = 1,
    seed: int = 0,
    outliers: float = 0.0,
) -> Counter[str]:
    source, chosen = np.random.default_rng(seed), Counter[str]()
    for number in range(rounds):
        situation = batch_of(batch, first=number * batch)
        choice = bandit.choose(situation)
        chosen[choice.arm] += 1
        taken = [drawn(choice.arm, chances, source) for _ in range(batch)]
        spent = seconds[choice.arm] * (10.0 if source.random() < outliers else 1.0)
        bandit.observe(RoundOutcome(choice.arm, situation, taken, spent, choice.explored))
    return chosen


def flat(eagle: float, ngram: float = 0.1) -> Chances:
    return {"eagle": [eagle] * 7, "ngram": [ngram] * 4}


# ---- what the formulas say


@pytest.mark.parametrize("eagle", [0.1, 0.55, 0.75, 0.8, 0.95])
def test_it_takes_the_arm_of_the_most_expected_tokens_per_second(eagle: float) -> None:
    chances = {"eagle": [eagle, *[0.9 * eagle] * 6], "ngram": [0.05] * 4}
    bandit = make()
    play(bandit, 400, chances, batch=4)
    late = play(bandit, 400, chances, batch=4, seed=1)
    values = sorted(hand_tokens(arm, chances) / SECONDS[arm] for arm in ARMS)
    near = [arm for arm in ARMS if hand_tokens(arm, chances) / SECONDS[arm] > 0.95 * values[-1]]
    assert hand_best(chances) in near
    assert sum(late[arm] for arm in near) > 360


def test_n_grams_win_where_they_are_right() -> None:
    chances = flat(0.2, 0.9)
    assert hand_best(chances) == "ngram:4_1_5"
    bandit = make()
    play(bandit, 200, chances)
    assert play(bandit, 200, chances)["ngram:4_1_5"] > 190


def test_expected_tokens_are_those_of_the_drafts_seen() -> None:
    """Position 1: 3 of 4 accepted; 2: 2 of 3; 3: 1 of 2.

    E = 1 + 3/4 + 3/4 2/3 + 3/4 2/3 1/2, the priors apart.
    """
    acceptance = GroupAcceptance(ARMS, (1,), 10**9)
    slots, _ = acceptance.follow([RowFacts(row, 0, 99) for row in range(4)], 0)
    more = np.ones(4, dtype=bool)
    for _ in range(1000):
        acceptance.observe(0, "eagle:3_1_4", slots, np.array([0, 1, 2, 3]), more)
    tokens = acceptance.beliefs(0).tokens
    assert tokens[ARMS.index("eagle:3_1_4")] == pytest.approx(1 + 3 / 4 + 1 / 2 + 1 / 4, rel=2e-3)
    assert tokens[ARMS.index("off")] == 1.0


def test_a_long_chain_teaches_about_a_shorter_one() -> None:
    acceptance = GroupAcceptance(ARMS, (1,), 10**9)
    slots, _ = acceptance.follow([RowFacts(0, 0, 99)], 0)
    source, more = np.random.default_rng(5), np.ones(1, dtype=bool)
    for _ in range(4000):
        accepted = np.array([drawn("eagle:7_1_8", flat(0.8), source) - 1])
        acceptance.observe(0, "eagle:7_1_8", slots, accepted, more)
    assert acceptance.beliefs(0).tokens[1] == pytest.approx(
        hand_tokens("eagle:3_1_4", flat(0.8)), rel=0.02
    )


def test_a_response_that_ends_at_its_limit_refuses_no_draft() -> None:
    acceptance = GroupAcceptance(ARMS, (1,), 10**9)
    slots, _ = acceptance.follow([RowFacts(0, 0, 99)], 0)
    acceptance.observe(0, "eagle:3_1_4", slots, np.array([1]), np.array([False]))
    (evidence,) = acceptance.snapshot()
    assert (evidence.accepted[:3], evidence.trials[:3]) == ((1.0, 0.0, 0.0), (1.0, 0.0, 0.0))


def test_a_request_whose_drafts_fail_is_expected_less_than_its_group() -> None:
    acceptance = GroupAcceptance(ARMS, (1,), 1000)
    slots, _ = acceptance.follow([RowFacts(0, 0, 999), RowFacts(1, 0, 999)], 0)
    for _ in range(30):
        acceptance.observe(0, "eagle:3_1_4", slots, np.array([3, 0]), np.ones(2, dtype=bool))
    easy, hard = acceptance.rows.tokens[slots][:, 1]
    assert easy > acceptance.beliefs(0).tokens[1] > hard


def test_a_draining_batch_takes_the_arm_of_the_row_that_will_last() -> None:
    """Seven hard rows with ten tokens left and an easy one with 760: a queue wants off, its end the
    chain.
    """
    bandit = make(groups=(1,))
    costs = {**dict.fromkeys(ARMS, (30.0, 30.0)), "off": (2.0, 2.2), "eagle:3_1_4": (4.6, 5.0)}
    bandit.prime(
        [
            CostSample(arm, size, 10, pair[size > 1])
            for arm, pair in costs.items()
            for size in (1, 8)
        ]
    )

    def situation(rounds: int, *, draining: bool) -> Situation:
        rows = [RowFacts(row, rounds, 70) for row in range(7)] + [RowFacts(7, 4 * rounds, 1000)]
        return Situation(rows, 300, draining)

    for rounds in range(60):
        now = situation(rounds, draining=False)
        bandit.observe(RoundOutcome("eagle:3_1_4", now, [1] * 7 + [4], 5.0, explored=False))
    assert (7 * 1 + 4) / 8 / 5.0 < 1 / 2.2
    assert bandit.choose(situation(60, draining=False), ARMS[:2]).arm == "off"
    # Alone the easy row wants the chain: 4 tokens in 4.6 s. Of a round's 2.2 s with off 2.0 are
    # there for any last row.
    choice = bandit.choose(situation(60, draining=True), ARMS[:2])
    assert choice.arm == "eagle:3_1_4"
    # A round is worth as much to the row that will last as the part that all rounds share.
    assert len(choice.worth) == 8
    assert choice.worth[7] == max(choice.worth) > 2 * choice.worth[0] > 0
    assert bandit.choose(situation(60, draining=False), ARMS[:2]).worth == ()


# ---- what it spends on learning


def test_an_arm_of_unknown_cost_is_tried_before_anything_is_believed() -> None:
    chosen = play(make(primed=False), len(ARMS), flat(0.8))
    assert set(chosen) == set(ARMS)


def test_exploring_costs_next_to_nothing_once_the_world_is_known() -> None:
    bandit = make()
    play(bandit, 1000, flat(0.75), batch=4)
    best = hand_best(flat(0.75))
    chosen = play(bandit, 4000, flat(0.75), batch=4, seed=1)
    seconds = sum(SECONDS[arm] * count for arm, count in chosen.items())
    tokens = sum(hand_tokens(arm, flat(0.75)) * count for arm, count in chosen.items())
    assert tokens / seconds > 0.99 * hand_tokens(best, flat(0.75)) / SECONDS[best]


def test_a_dead_drafter_is_left_within_a_few_rounds_without_any_watchdog() -> None:
    bandit = make()
    assert play(bandit, 50, flat(0.0, 0.0))["off"] >= 40
    assert play(bandit, 1000, flat(0.0, 0.0))["off"] > 950


def test_a_new_drafter_is_tried_at_once_and_taken_when_it_is_good() -> None:
    bandit = make()
    play(bandit, 500, flat(0.0, 0.0), batch=8)
    bandit.renew(EAGLE, Target.DRAFTER)
    chosen = play(bandit, 20, flat(0.9, 0.0), batch=8)
    assert sum(chosen[arm] for arm in EAGLE) >= 18


def test_a_drafter_that_improves_unannounced_is_found_within_two_windows() -> None:
    bandit = make(window=500)
    play(bandit, 1500, flat(0.0, 0.0), batch=2)
    play(bandit, 1000, flat(0.9, 0.0), batch=2)
    chosen = play(bandit, 200, flat(0.9, 0.0), batch=2)
    assert sum(chosen[arm] for arm in EAGLE) > 190


def test_an_arm_that_seems_three_times_worse_waits_three_windows_for_its_next_trial() -> None:
    """Of dead drafters a chain of seven is worth 2.0 / 5.8 of plain decoding."""
    window, rounds = 200, 6000
    bandit = make(window=window)
    play(bandit, 500, flat(0.0, 0.0), batch=4)
    chosen = play(bandit, rounds, flat(0.0, 0.0), batch=4, seed=1)
    due = rounds / window * SECONDS["off"] / SECONDS["eagle:7_1_8"]
    assert chosen["eagle:7_1_8"] == pytest.approx(due, rel=0.3)


def test_what_a_drafter_has_learned_in_silence_is_found_in_a_group_that_knew_it_as_dead() -> None:
    """N-grams that had nothing to look up in a full batch, and have when the batch is small."""
    bandit = make(window=500)
    play(bandit, 60, flat(0.5, 0.0), batch=16)
    play(bandit, 600, flat(0.5, 0.95), batch=1)
    assert play(bandit, 100, flat(0.5, 0.95), batch=1)["ngram:4_1_5"] > 90
    assert play(bandit, 100, flat(0.5, 0.95), batch=16)["ngram:4_1_5"] > 80


def test_a_drafter_whose_gain_is_said_is_believed_to_the_position_and_not_tried_by_force() -> None:
    bandit = make()
    play(bandit, 1000, flat(0.5, 0.0), batch=4)
    (before,) = (one for one in bandit.snapshot().acceptance if one.family == "eagle:1")
    survival = tuple(0.5**k for k in range(1, 8)), tuple(0.9 * 0.8**k for k in range(7))
    bandit.renew(EAGLE, Target.DRAFTER, AcceptanceShift(1, *survival))
    (after,) = (one for one in bandit.snapshot().acceptance if one.family == "eagle:1")
    for number, (accepted, trials, was, tried) in enumerate(
        zip(after.accepted, after.trials, before.accepted, before.trials, strict=True)
    ):
        shifted = was / tried + (0.9 if number == 0 else 0.8) - 0.5
        known = number < 7 and 0.5**number >= 0.01
        assert accepted / trials == pytest.approx(min(shifted, 1.0) if known else 0.8)
        assert trials == min(tried, 64 * before.batch_group)
    chosen = play(bandit, 100, flat(0.8, 0.0), batch=4)
    assert chosen[hand_best(flat(0.8, 0.0))] > 80


def test_of_a_drafter_that_no_group_has_seen_what_its_trainer_says_is_believed() -> None:
    bandit = make()
    bandit.renew(EAGLE, Target.DRAFTER, AcceptanceShift(0, (0.01,) * 7, (0.0,) * 7))
    known = ("off", *sorted(EAGLE))
    assert bandit.choose(batch_of(4), known).arm == "off"
    bandit.renew(EAGLE, Target.DRAFTER, AcceptanceShift(1, (0.0,) * 7, (0.95,) * 7))
    assert bandit.choose(batch_of(4), known).arm in EAGLE


def test_a_new_policy_keeps_seconds_and_weakens_what_is_known_of_drafts() -> None:
    bandit = make()
    slow = {**SECONDS, "off": 6.0}
    play(bandit, 1000, flat(0.8), seconds=slow, batch=4)
    before = bandit.snapshot()
    bandit.renew(set(ARMS) - {"off"}, Target.POLICY)
    after = bandit.snapshot()
    assert after.costs == before.costs
    assert max(max(one.trials) for one in before.acceptance) > 5 * POLICY_TRIALS
    for old, new in zip(before.acceptance, after.acceptance, strict=True):
        assert max(new.trials) <= POLICY_TRIALS * (1 + 1e-9)
        for accepted, trials, was, tried in zip(
            new.accepted, new.trials, old.accepted, old.trials, strict=True
        ):
            assert accepted * tried == pytest.approx(was * trials)


def test_rounds_of_ten_times_the_seconds_do_not_move_the_choice() -> None:
    chances = flat(0.8)
    bandit = make()
    play(bandit, 300, chances, batch=4)
    chosen = play(bandit, 2000, chances, batch=4, outliers=0.02, seed=2)
    assert chosen[hand_best(chances)] > 1900


def test_costs_that_the_table_did_not_foresee_are_followed() -> None:
    chances = flat(0.8)
    beside = {arm: seconds * (1.0 if arm == "off" else 2.5) for arm, seconds in SECONDS.items()}
    assert hand_best(chances, beside) == "off"
    bandit = make()
    play(bandit, 300, chances)
    play(bandit, 100, chances, seconds=beside)
    assert play(bandit, 300, chances, seconds=beside)["off"] > 280


@pytest.mark.parametrize("pace", [0.6, 1.5])
def test_a_dead_drafter_stays_unused_when_the_machine_changes_its_pace(pace: float) -> None:
    bandit = make()
    play(bandit, 300, flat(0.0, 0.0), batch=4)
    other = {arm: pace * seconds for arm, seconds in SECONDS.items()}
    chosen = play(bandit, 900, flat(0.0, 0.0), seconds=other, batch=4, seed=1)
    assert chosen["off"] > 880


def test_the_best_arm_stays_so_through_all_changes_of_pace() -> None:
    chances, source = flat(0.8), np.random.default_rng(4)
    bandit = make()
    play(bandit, 300, chances, batch=4)
    chosen = Counter[str]()
    for part in range(20):
        pace = float(source.uniform(0.6, 1.8))
        seconds = {arm: pace * one for arm, one in SECONDS.items()}
        chosen += play(bandit, 150, chances, seconds=seconds, batch=4, seed=part)
    assert chosen[hand_best(chances)] > 0.97 * 3000


# ---- shapes of arms


@pytest.mark.parametrize(
    ("arm", "family", "steps"),
    [
        ("eagle:3_1_4", "eagle:1", 3),
        ("eagle3:8_4_48", "eagle3:8_4_48", 8),
        ("ngram:4_1_5", "ngram:1", 4),
    ],
)
def test_chains_share_a_family_and_a_tree_is_its_own(arm: str, family: str, steps: int) -> None:
    assert family_and_steps(arm) == (family, steps)


def test_an_arm_without_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="eagle:deep"):
        CostModel(BanditSettings(kind="cost_model"), ("off", "eagle:deep"), seed=1)


@given(
    batches=st.lists(
        st.lists(st.integers(0, 300), min_size=1, max_size=90, unique=True), min_size=1, max_size=8
    )
)
def test_requests_may_come_and_go_in_any_number(batches: list[list[int]]) -> None:
    bandit = make()
    for ids in batches:
        situation = Situation([RowFacts(one, 0, 50) for one in ids], 60, draining=len(ids) % 2 == 0)
        choice = bandit.choose(situation)
        bandit.observe(RoundOutcome(choice.arm, situation, [1] * len(ids), 1.0, choice.explored))
        assert len(set(bandit._slots.tolist())) == len(ids)


# ---- what engines tell each other


def test_two_halves_merged_are_the_whole() -> None:
    """Without fading: the window is endless and the rounds fewer than an average remembers."""

    def learn(rounds: Sequence[tuple[str, list[int], float]]) -> CostModel:
        bandit = make(window=10**12)
        for arm, taken, seconds in rounds:
            bandit.observe(RoundOutcome(arm, batch_of(len(taken)), taken, seconds, explored=False))
        return bandit

    source = np.random.default_rng(3)
    rounds = [
        (
            arm,
            [drawn(arm, flat(0.7), source) for _ in range(6)],
            SECONDS[arm] * float(source.uniform(0.9, 1.1)),
        )
        for arm in ARMS[1:]
        for _ in range(12)
    ]
    whole, one, other = learn(rounds), learn(rounds[::2]), learn(rounds[1::2])
    one.merge(other.snapshot())
    for added, learned in zip(
        combine([one.snapshot(), other.snapshot()]).acceptance,
        whole.snapshot().acceptance,
        strict=True,
    ):
        assert (added.family, added.batch_group) == (learned.family, learned.batch_group)
        assert added.accepted == pytest.approx(learned.accepted)
        assert added.trials == pytest.approx(learned.trials)
    for group in (0, 1):
        merged, known = one._acceptance.beliefs(group), whole._acceptance.beliefs(group)
        assert merged.tokens == pytest.approx(known.tokens)
        assert merged.bound == pytest.approx(known.bound)
    # How arms stand to each other; the pace is each engine's own, and hears its rounds alone.
    merged_s, known_s = (
        np.array(one._costs.seconds(1, 6, 10)),
        np.array(whole._costs.seconds(1, 6, 10)),
    )
    assert merged_s / merged_s[1] == pytest.approx(known_s / known_s[1], rel=0.02)


def test_a_merge_takes_the_place_of_the_last_and_is_not_told_again() -> None:
    teacher, pupil = make(), make()
    play(teacher, 200, flat(0.9))
    told = teacher.snapshot()
    for _ in range(5):
        pupil.merge(told)
    assert not pupil.snapshot()
    assert pupil._acceptance.beliefs(0).tokens == pytest.approx(
        teacher._acceptance.beliefs(0).tokens, rel=0.01
    )


def test_a_pupil_chooses_as_its_teacher_from_the_first_round() -> None:
    teacher, pupil = make(primed=False), make(primed=False)
    play(teacher, 400, flat(0.9))
    pupil.merge(teacher.snapshot())
    assert play(pupil, 10, flat(0.9))[hand_best(flat(0.9))] >= 9


@pytest.mark.parametrize("shared", [False, True])
def test_chains_that_are_cut_differently_are_judged_apart(shared: bool) -> None:
    """A chain of three that is served whole beside one of seven of which one draft is verified."""
    arms = ("off", "eagle:3_1_4", "eagle:7_1_8")
    bandit = CostModel(BanditSettings(kind="cost_model", share_positions=shared), arms, seed=1)
    for number in range(300):
        arm, taken = (arms[1], 4) if number % 2 else (arms[2], 2)
        situation = Situation([RowFacts(number, 0, 100)], 10, draining=False)
        bandit.observe(RoundOutcome(arm, situation, [taken], 0.005, explored=False))
    _, short, long = bandit._acceptance.beliefs(0).tokens
    if shared:  # each is taken for the other
        assert short < 3.5
        assert long > 3.0
    else:
        assert short == pytest.approx(4.0, abs=0.3)
        assert long == pytest.approx(2.0, abs=0.3)
