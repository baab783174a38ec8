"""Falls of the serving drafter, by judgements and by rollouts, and the earlier judgements that
follow.
"""

from __future__ import annotations

import math

from paceline.services.drafter_trainer.gate.freeze import HURRIED, Hurry, has_fallen


def test_a_length_falls_by_more_than_the_noise_of_both_judgements() -> None:
    unknown = (math.nan, 0.0)
    assert not has_fallen(unknown, (4.0, 0.3)), "nothing is known of before"
    assert not has_fallen((4.0, 0.3), (3.6, 0.4))  # by 0.4, noises 0.3 and 0.4: 0.5
    assert has_fallen((4.0, 0.3), (3.4, 0.4))
    assert not has_fallen((3.6, 0.4), (5.0, 0.1))


def test_a_fall_in_the_rollouts_has_each_policy_versions_rows_judged_for_a_while() -> None:
    hurry = Hurry()
    hurry.rolled_out({"eagle:5_1_6": 5.0, "eagle:3_1_4": 3.5})
    hurry.rolled_out({"eagle:5_1_6": 4.3, "eagle:7_1_8": 1.0})  # eagle:7 has no earlier figure
    assert not hurry.due(7)
    hurry.rolled_out({"eagle:5_1_6": 2.2, "eagle:3_1_4": 2.0})
    for policy in range(7, 7 + HURRIED):
        assert hurry.due(policy)
        hurry.begun(policy)
        assert not hurry.due(policy), "these rows judge"
        assert hurry.judged()
    assert not hurry.due(100)
    assert not hurry.judged()


def test_rollouts_that_say_nothing_are_no_fall_and_forget_nothing() -> None:
    hurry = Hurry()
    for lengths in ({}, {"eagle:5_1_6": 5.0}, {}, {"eagle:5_1_6": 5.0}):
        hurry.rolled_out(lengths)
        assert not hurry.lasts
    hurry.rolled_out({"eagle:5_1_6": 3.9})
    assert hurry.lasts
