"""A fall of the serving drafter's length is one beyond the noise of both judgements."""

from __future__ import annotations

from paceline.services.drafter_trainer.gate.fall import ServedLength


def test_a_length_falls_by_more_than_the_noise_of_both_judgements() -> None:
    served = ServedLength()
    assert not served.falls_to(4.0, 0.3), "nothing is known of before"
    assert not served.falls_to(3.6, 0.4)  # by 0.4, noises 0.3 and 0.4: 0.5
    assert not served.falls_to(5.0, 0.1)
    assert served.falls_to(2.0, 0.1)
    assert not served.falls_to(2.0, 0.1), "it has fallen once"
