"""Every algorithm, whole: advantages and losses against plain floats, gradients against finite
differences.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import policy_by_hand as by_hand
import pytest
import torch
from pydantic import TypeAdapter

from paceline.errors import ConfigError
from paceline.plugins import import_object
from paceline.services.policy_trainer.algorithm_settings import AnyAlgorithm
from paceline.services.policy_trainer.algorithms import ALGORITHMS, build_algorithm
from paceline.services.policy_trainer.algorithms.base import Algorithm, SessionBatch, TokenBatch

REWARDS = [1.0, 0.0, 0.5, 2.0, 2.0, 0.3]
GROUPS = [0, 0, 0, 1, 1, 2]
TOKENS = [3, 1, 2, 4, 1, 2]
OWNERS = [i for i, count in enumerate(TOKENS) for _ in range(count)]
PENALTIES = [0.01 * i for i in range(len(OWNERS))]
VALUES = [math.sin(i) for i in range(len(OWNERS))]


def settings_of(name: str, **given: Any) -> Any:
    return TypeAdapter(AnyAlgorithm).validate_python({"name": name, **given})


def built(name: str, **given: Any) -> Algorithm:
    return build_algorithm(settings_of(name, **given))


def in_float64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


SESSIONS = SessionBatch(
    rewards=in_float64(REWARDS),
    groups=torch.tensor(GROUPS),
    weights=torch.ones(6, dtype=torch.float64),
    owners=torch.tensor(OWNERS),
    penalties=in_float64(PENALTIES),
    values=in_float64(VALUES),
)
SCORES = [
    reward - sum(p for p, owner in zip(PENALTIES, OWNERS, strict=True) if owner == i)
    for i, reward in enumerate(REWARDS)
]


def per_token(amounts: list[float]) -> list[float]:
    return [amounts[owner] for owner in OWNERS]


def earned(rewards: list[float]) -> list[float]:
    """Rewards at last tokens, less the penalties."""
    ends = [i + 1 == len(OWNERS) or OWNERS[i + 1] != owner for i, owner in enumerate(OWNERS)]
    return [
        (rewards[owner] if end else 0.0) - penalty
        for owner, end, penalty in zip(OWNERS, ends, PENALTIES, strict=True)
    ]


def by_trajectory(gamma: float, lam: float, values: list[float], of: list[float]) -> list[float]:
    made = []
    for i in range(len(REWARDS)):
        own = [t for t, owner in enumerate(OWNERS) if owner == i]
        made += by_hand.generalized([of[t] for t in own], [values[t] for t in own], gamma, lam)
    return made


@pytest.mark.parametrize(
    ("name", "given_", "expected"),
    [
        ("grpo", {}, per_token(by_hand.group_relative(SCORES, GROUPS))),
        (
            "grpo",
            {"normalize_std": False},
            per_token(by_hand.group_relative(SCORES, GROUPS, normalize=False)),
        ),
        ("dr_grpo", {}, per_token(by_hand.group_relative(SCORES, GROUPS, normalize=False))),
        ("gspo", {}, per_token(by_hand.group_relative(SCORES, GROUPS))),
        ("cispo", {}, per_token(by_hand.group_relative(SCORES, GROUPS))),
        ("decoupled", {}, per_token(by_hand.group_relative(SCORES, GROUPS))),
        ("rloo", {}, per_token(by_hand.leave_one_out(SCORES, GROUPS))),
        (
            "reinforce_plus_plus",
            {},
            by_hand.normalized(by_trajectory(1.0, 1.0, [0.0] * 13, earned(REWARDS))),
        ),
        (
            "reinforce_plus_plus_baseline",
            {},
            by_hand.normalized(
                by_trajectory(
                    1.0,
                    1.0,
                    [0.0] * 13,
                    earned(by_hand.group_relative(REWARDS, GROUPS, normalize=False)),
                )
            ),
        ),
        (
            "ppo",
            {"gamma": 0.9, "gae_lambda": 0.8},
            by_hand.normalized(by_trajectory(0.9, 0.8, VALUES, earned(REWARDS))),
        ),
        (
            "dapo",
            {"overlong_tokens": 4, "overlong_buffer": 2},
            per_token(
                by_hand.group_relative(
                    [
                        score - min(max((count - 2) / 2, 0.0), 1.0)
                        for score, count in zip(SCORES, TOKENS, strict=True)
                    ],
                    GROUPS,
                )
            ),
        ),
    ],
)
def test_advantages_are_the_formula(
    name: str, given_: dict[str, object], expected: list[float]
) -> None:
    made = built(name, **given_).advantages(SESSIONS)
    assert made.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


LOG_RATIOS = [0.0, 0.5, -0.5, 0.02, -0.02, 1.4, -3.0, 0.0003]
PROXIMAL = [-1.0, -2.0, -0.7, -1.1, -0.2, -3.0, -0.4, -0.9]
ADVANTAGES = [1.0, 2.0, -1.0, 0.5, -0.5, -2.0, 1.5, 0.7]
SEQUENCES = [0, 0, 0, 1, 1, 2, 2, 3]


def tokens(policy: torch.Tensor) -> TokenBatch:
    nothing = torch.zeros(8, dtype=torch.float64)
    return TokenBatch(
        policy_logprobs=policy,
        proximal_logprobs=in_float64(PROXIMAL),
        behavior_logprobs=nothing,
        reference_logprobs=nothing,
        advantages=in_float64(ADVANTAGES),
        values=nothing,
        sequences=torch.tensor(SEQUENCES),
        positions=torch.arange(8),
        lags=torch.zeros(8, dtype=torch.int64),
    )


def policy() -> torch.Tensor:
    found = in_float64([p + r for p, r in zip(PROXIMAL, LOG_RATIOS, strict=True)])
    return found.requires_grad_()


OWN = [math.exp(r) for r in LOG_RATIOS]
MEANS = [math.exp(sum(s) / len(s)) for s in by_hand.by_sequence(LOG_RATIOS, SEQUENCES)]
BOUNDS = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "cispo"])
def test_losses_are_the_clipped_surrogate_by_hand_and_gradients_the_finite_differences(
    name: str,
) -> None:
    low, high = BOUNDS.get(name, (0.2, 0.2))
    ratios = MEANS if name == "gspo" else OWN
    expected = [by_hand.surrogate(r, a, low, high) for r, a in zip(ratios, ADVANTAGES, strict=True)]
    found = built(name).loss(tokens(policy()))
    assert found.losses.tolist() == pytest.approx([loss for loss, _ in expected], rel=1e-9)
    assert found.clipped.tolist() == [clipped for _, clipped in expected]
    assert 0 < sum(found.clipped.tolist()) < 8, "the test needs tokens on both sides"
    assert torch.autograd.gradcheck(lambda at: built(name).loss(tokens(at)).losses, (policy(),))


def test_the_dual_clip_bounds_what_a_bad_token_may_lose() -> None:
    bounded = built("grpo", dual_clip=3.0).loss(tokens(policy()))
    assert bounded.losses[5].item() == 6.0  # ratio 4.06, advantage -2
    assert bounded.clipped[5]
    assert not built("grpo").loss(tokens(policy())).clipped[5]


def test_cispo_clips_the_weight_and_leaves_every_token_its_gradient() -> None:
    at = policy()
    found = built("cispo").loss(tokens(at))
    weights = [min(ratio, 1.2) for ratio in OWN]
    expected = [-w * a * p for w, a, p in zip(weights, ADVANTAGES, at.tolist(), strict=True)]
    assert found.losses.tolist() == pytest.approx(expected, rel=1e-12)
    assert found.clipped.tolist() == [ratio > 1.2 for ratio in OWN]
    found.losses.sum().backward()
    slopes = [-w * a for w, a in zip(weights, ADVANTAGES, strict=True)]
    assert at.grad is not None
    assert at.grad.tolist() == pytest.approx(slopes, rel=1e-12)


def test_needs_follow_the_settings() -> None:
    assert built("grpo").needs() == replace(built("ppo").needs(), values=False)
    assert built("ppo").needs().values
    for several in ({"mini_batches": 2}, {"passes": 2}):
        assert built("gspo", **several).needs().proximal
    in_loss = built("rloo", kl={"coefficient": 0.1}).needs()
    assert (in_loss.reference, in_loss.proximal) == (True, False)
    in_reward = built("rloo", kl={"coefficient": 0.1, "place": "reward"}).needs()
    assert (in_reward.reference, in_reward.proximal) == (True, True)


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"name": "grpo", "gamma": 1.0}, "gamma"),
        ({"name": "grpo", "dual_clip": 0.5}, "dual_clip is 0 or above 1, not 0.5"),
        ({"name": "dapo", "overlong_tokens": 4, "overlong_buffer": 5}, "at most overlong_tokens"),
        ({"name": "ppo", "gae_lambda": 1.5}, "less than or equal to 1"),
        ({"name": "grpo", "correction": {"weight": "tis"}}, "'token'"),
    ],
)
def test_settings_that_no_algorithm_has_are_refused(given_: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        TypeAdapter(AnyAlgorithm).validate_python(given_)


def test_a_class_of_ones_own_gets_its_options(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from paceline.services.policy_trainer.algorithms.grpo import Grpo\n"
        "class Doubled(Grpo):\n"
        "    def advantages(self, batch):\n"
        "        return self.settings.options['times'] * super().advantages(batch)\n"
    )
    doubled = built(f"{own}:Doubled", options={"times": 2})
    assert torch.equal(doubled.advantages(SESSIONS), 2 * built("grpo").advantages(SESSIONS))
    with pytest.raises(ConfigError, match="algorithm cannot be imported"):
        built(f"{own}:Tripled")
    with pytest.raises(ConfigError, match=r"no such algorithm; seen: .?grp.?; allowed: .*grpo"):
        built("grp")


def test_every_algorithm_names_its_paper() -> None:
    for path in ALGORITHMS.values():
        assert "arXiv" in (import_object(path).__doc__ or ""), path
