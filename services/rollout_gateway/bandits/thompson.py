"""Thompson sampling (Thompson 1933) of the mean reward rate, with a conjugate model and discounted
evidence.

Model, per arm of a group: a round's tokens per second are Normal(mu, s2), with the
Normal-inverse-gamma prior

    s2 ~ InverseGamma(alpha0, beta0),   mu | s2 ~ Normal(mu0, s2 / kappa0).

After rounds of total weight n, mean m and sum of squared deviations S the posterior is of the same
form, with

    kappa = kappa0 + n,   mu = (kappa0 mu0 + n m) / kappa,   alpha = alpha0 + n / 2,
    beta = beta0 + S / 2 + kappa0 n (m - mu0)^2 / (2 kappa)        (Murphy 2007, section 6).

The prior knows no scale of its own: mu0 is the mean rate of the group's rounds, and beta0 makes the
expected s2 the square of PRIOR_SPREAD of it. Each round of a group multiplies the weights of the
rounds before it, of all arms, by 1 - 1 / window: an arm that is not used sinks back to the prior,
and is drawn again. Arms without a round come first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from paceline.services.rollout_gateway.bandits.base import (
    ArmChoice,
    BanditSettings,
    RoundOutcome,
    Situation,
    group_of,
)
from paceline.services.rollout_gateway.bandits.window import WindowedBandit, length_gains
from paceline.speculators.shift import AcceptanceShift
from paceline.trajectory import Target

KAPPA0 = 1.0  # rounds that the prior's mean is worth
ALPHA0 = 2.0  # the prior's s2 has an expectation for more than 1
# standard deviation of a round's rate that the prior expects, as a share of the group's mean
PRIOR_SPREAD = 0.2


class Posterior(NamedTuple):
    """Parameters of a Normal-inverse-gamma distribution."""

    mu: float
    kappa: float
    alpha: float
    beta: float


@dataclass(slots=True)
class RateEvidence:
    """Discounted rounds of one arm."""

    weight: float = 0.0
    mean: float = 0.0
    deviations: float = 0.0  # weighted sum of squared deviations from the mean

    def fade(self, discount: float) -> None:
        """Make what is known worth less."""
        self.weight *= discount
        self.deviations *= discount

    def renew(self, gain: float, most: float) -> None:
        """The arm gives so many times the tokens; what is known is worth `most` rounds."""
        self.fade(min(most / self.weight, 1.0) if self.weight > 0 else 0.0)
        self.mean *= gain
        self.deviations *= gain * gain

    def add(self, rate: float) -> None:
        """Learn of a round (West 1979: numerically stable)."""
        self.weight += 1.0
        distance = rate - self.mean
        self.mean += distance / self.weight
        self.deviations += distance * (rate - self.mean)

    def posterior(self, prior_mean: float) -> Posterior:
        """What is believed of the arm; prior_mean: the group's mean rate."""
        kappa = KAPPA0 + self.weight
        mu = (KAPPA0 * prior_mean + self.weight * self.mean) / kappa
        pull = KAPPA0 * self.weight * (self.mean - prior_mean) ** 2 / kappa
        beta0 = (ALPHA0 - 1.0) * (PRIOR_SPREAD * prior_mean) ** 2
        return Posterior(mu, kappa, ALPHA0 + self.weight / 2, beta0 + (self.deviations + pull) / 2)


class GroupEvidence:
    """Discounted rounds of the arms of one group."""

    def __init__(self, names: Sequence[str], window: int) -> None:
        self.arms = {name: RateEvidence() for name in names}
        self._discount = 1.0 - 1.0 / window

    def add(self, arm: str, rate: float) -> None:
        """Learn of a round; what is known of all arms fades."""
        for known in self.arms.values():
            known.fade(self._discount)
        self.arms[arm].add(rate)

    @property
    def mean_rate(self) -> float:
        """Mean rate of all arms together, by weight; 0 while there is none."""
        weight = sum(known.weight for known in self.arms.values())
        total = sum(known.weight * known.mean for known in self.arms.values())
        return total / weight if weight > 0 else 0.0


class Thompson(WindowedBandit):
    """Draws a mean rate from each arm's posterior in the batch's group and takes the arm of the
    highest draw.
    """

    def __init__(self, settings: BanditSettings, arms: Sequence[str], seed: int) -> None:
        super().__init__(settings, arms, seed)
        self._evidence = {one: GroupEvidence(arms, settings.window) for one in settings.groups}

    def observe(self, outcome: RoundOutcome) -> None:
        """Remember a round."""
        super().observe(outcome)
        self._known(outcome.situation).add(outcome.arm, outcome.rate)

    def renew(self, arms: Set[str], changed: Target, shift: AcceptanceShift | None = None) -> None:
        """A new drafter: its arms inherit, or nothing is known of them."""
        super().renew(arms, changed, shift)
        if changed is not Target.DRAFTER:
            return
        most = self._settings.inherited_rounds if shift is not None else 0
        for arm, gain in length_gains(arms, shift).items():
            for known in self._evidence.values():
                known.arms[arm].renew(gain, most)

    def _choose(self, situation: Situation, names: Sequence[str]) -> ArmChoice:
        """It explores when it is not the one believed best."""
        known = self._known(situation)
        for name in names:
            if not known.arms[name].weight:
                return ArmChoice(name, explored=True)
        prior_mean = known.mean_rate
        beliefs = {name: known.arms[name].posterior(prior_mean) for name in names}
        chosen = max(names, key=lambda name: self._draw(beliefs[name]))
        return ArmChoice(
            chosen, explored=beliefs[chosen].mu < max(belief.mu for belief in beliefs.values())
        )

    def _known(self, situation: Situation) -> GroupEvidence:
        return self._evidence[group_of(self._settings.groups, situation.batch_size)]

    def _draw(self, belief: Posterior) -> float:
        variance = belief.beta / self._random.gammavariate(belief.alpha, 1.0)
        return self._random.gauss(belief.mu, math.sqrt(variance / belief.kappa))
