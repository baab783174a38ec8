"""Thompson's posterior is the closed form, its draws are the posterior's, evidence fades at the
window's pace.
"""

from __future__ import annotations

import numpy as np
import pytest
from bandit_rounds import batch_of, round_of
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.rollout_gateway.bandits.base import BanditSettings
from paceline.services.rollout_gateway.bandits.thompson import (
    ALPHA0,
    KAPPA0,
    PRIOR_SPREAD,
    GroupEvidence,
    Posterior,
    RateEvidence,
    Thompson,
)

ARMS = ("off", "a:3_1_4", "b:3_1_4")
rates = st.lists(st.integers(0, 10_000), min_size=1, max_size=40)


def closed_form(values: list[int], weights: np.ndarray, prior_mean: float) -> Posterior:
    """The batch formulas, from the rounds themselves."""
    x, n = np.array(values), weights.sum()
    mean = (weights * x).sum() / n
    beta0 = (ALPHA0 - 1) * (PRIOR_SPREAD * prior_mean) ** 2
    spread = (weights * (x - mean) ** 2).sum()
    pull = KAPPA0 * n * (mean - prior_mean) ** 2 / (KAPPA0 + n)
    mu = (KAPPA0 * prior_mean + n * mean) / (KAPPA0 + n)
    return Posterior(mu, KAPPA0 + n, ALPHA0 + n / 2, beta0 + (spread + pull) / 2)


def test_the_posterior_of_three_rounds_is_the_one_worked_out_by_hand() -> None:
    """Rates 90, 100, 110, prior mean 80: mu = (80 + 300) / 4, beta = 16^2 + (200 + 3 x 20^2 / 4) /
    2.
    """
    evidence = RateEvidence()
    for rate in (90.0, 100.0, 110.0):
        evidence.add(rate)
    assert evidence.posterior(80.0) == pytest.approx(Posterior(95.0, 4.0, 3.5, 506.0))


@given(values=rates, window=st.integers(2, 50))
def test_discounted_evidence_gives_the_closed_form(values: list[int], window: int) -> None:
    group = GroupEvidence(ARMS, window)
    for value in values:
        group.add("off", value)
    weights = (1 - 1 / window) ** np.arange(len(values))[::-1]
    expected = closed_form(values, weights, 50.0)
    assert group.arms["off"].posterior(50.0) == pytest.approx(expected, rel=1e-9, abs=1e-3)


def test_rounds_of_other_arms_fade_an_arm_towards_the_prior() -> None:
    group = GroupEvidence(ARMS, window=100)
    group.add("a:3_1_4", 900.0)
    for _ in range(100):
        group.add("off", 100.0)
    assert group.arms["a:3_1_4"].weight == pytest.approx(0.99**100)
    total = sum(0.99**age for age in range(101))
    assert group.mean_rate == pytest.approx((100 * (total - 0.99**100) + 900 * 0.99**100) / total)


def test_draws_have_the_mean_and_variance_of_the_posteriors_student_t() -> None:
    """The mean's marginal is Student's t with 2 alpha degrees: variance beta / (kappa (alpha -
    1)).
    """
    bandit, belief = Thompson(BanditSettings(), ARMS, seed=5), Posterior(95.0, 4.0, 5.0, 506.0)
    drawn = np.array([bandit._draw(belief) for _ in range(20000)])
    assert drawn.mean() == pytest.approx(95.0, abs=4 * np.sqrt(506 / 16 / 20000))
    assert drawn.var() == pytest.approx(506 / 16, rel=0.06)


def test_every_arm_comes_first_once_and_the_share_of_an_arm_is_the_chance_that_it_is_best() -> None:
    bandit = Thompson(BanditSettings(window=10**9), ARMS[:2], seed=5)
    for arm, tokens in (("off", 100), ("a:3_1_4", 104)):
        assert bandit.choose(batch_of(1)).arm == arm
        for noise in (-6, 6) * 5:
            bandit.observe(round_of(arm, 1, tokens + noise, 1.0, explored=True))
    group = bandit._known(batch_of(1))
    beliefs = [group.arms[arm].posterior(group.mean_rate) for arm in ARMS[:2]]
    source = np.random.default_rng(0)
    draws = [
        belief.mu
        + np.sqrt(belief.beta / (belief.kappa * belief.alpha))
        * source.standard_t(2 * belief.alpha, size=200_000)
        for belief in beliefs
    ]
    expected = float((draws[1] > draws[0]).mean())
    share = sum(bandit.choose(batch_of(1)).arm == "a:3_1_4" for _ in range(4000)) / 4000
    assert 0.6 < expected < 0.99
    assert share == pytest.approx(expected, abs=0.02)
