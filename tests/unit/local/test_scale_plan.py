"""What a run on many GPUs takes is what was computed by hand from the shapes of its models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.errors import InvalidInput
from paceline.local.memory_plan import parameters
from paceline.local.push_tree import Network
from paceline.local.scale_plan import MODELS, ScaledModel, ScalePlan, fewest_gpus

SMALL, LARGE, MIXTURE = MODELS


@pytest.mark.parametrize(
    ("model", "stored", "active"),
    [
        (SMALL, 7_615_283_200, 7_615_283_200),
        (LARGE, 32_762_757_120, 32_762_757_120),
        (MIXTURE, 235_043_553_280, 22_140_682_240),
    ],
)
def test_weights_follow_from_the_shape(model: ScaledModel, stored: int, active: int) -> None:
    """235B: 94 layers of 4096 x (2 x 64 x 128 + 2 x 4 x 128 + 3 x 1536 x 128 or 8 experts)."""
    assert (parameters(model.stored), parameters(model.active)) == (stored, active)
    plan = ScalePlan(model, 64)
    assert (plan.push_bytes, plan.checkpoint_bytes) == (2 * stored, 12 * stored)


def test_a_rank_of_a_dense_policy_keeps_what_was_computed_by_hand() -> None:
    """Ends 2 x 152,064 x 5,120, layer 5,120 x 95,232; a row of 512 + 32,768 tokens."""
    plan = ScalePlan(LARGE, 64)
    assert plan.policy.parts == {
        "weights": 2_047_672_320,
        "gradients": 2_047_672_320,
        "optimizer": 4_095_344_640,
        "gathered": 2 * (1_557_135_360 + 2 * 487_587_840) + 4 * (1_557_135_360 + 487_587_840),
        "activations": 2 * 33_280 * (8 * 5120 + 2048 + 4 * 27_648 + 64 * 5120),
        "logits": 4 * 4 * 1024 * 152_064,
    }
    assert plan.policy.total == 55_959_617_536
    assert plan.fits
    assert not ScalePlan(LARGE, 8).fits


def test_a_rank_of_a_mixture_stores_all_experts_and_keeps_what_the_used_ones_read() -> None:
    parts = ScalePlan(MIXTURE, 1024).policy.parts
    assert parts["weights"] == 4 * 235_043_553_280 // 1024
    assert parts["activations"] == 2 * 33_280 * (8 * 4096 + 1024 + 4 * 8 * 1536 + 94 * 4096)


def test_a_worker_has_room_for_the_tokens_that_its_weights_leave() -> None:
    """0.85 x 80 GiB less an eighth of the weights, 94 layers of one head's keys and values."""
    plan = ScalePlan(MIXTURE, 64)
    assert plan.engine.devices == 64
    assert plan.token_bytes == 2 * 94 * 2 * 128
    assert plan.cached_tokens == (73_014_444_032 - 58_760_888_320) // 48_128 == 296_159
    assert plan.requests == 296_159 // 2361
    assert ScalePlan(LARGE, 64).token_bytes == 2 * 64 * 2 * 2 * 128
    assert ScalePlan(SMALL, 64).requests == 64


def test_a_round_reads_the_experts_that_its_requests_have_chosen() -> None:
    head = 151_936 * 4096
    assert MIXTURE.read(1) == pytest.approx(22_140_682_240 - head)
    assert MIXTURE.read(1e6) == pytest.approx(235_043_553_280 - head)
    layers = 94 * 4096 * (2 * 64 * 128 + 2 * 4 * 128)
    experts = 94 * 3 * 4096 * 1536 * (8 + 120 * 8 / 128)  # of two requests: 8, and others' share
    assert MIXTURE.read(2) == pytest.approx(layers + experts + head)
    assert SMALL.read(1) == SMALL.read(64) == 7_615_283_200 - 152_064 * 3584


def test_seconds_are_what_was_computed_by_hand() -> None:
    plan = ScalePlan(SMALL, 64)
    read = 2 * 7_070_285_824 + (512 + 16_384) * 57_344
    assert plan.tail_s == pytest.approx(32_768 * read / (0.75 * 3.35e12))
    assert plan.tail_s == pytest.approx(197.06, abs=0.01)
    assert plan.train_s == pytest.approx(8 * 7_615_283_200 * 64 * 2361 / (0.4 * 989e12))
    full = 2 * 7_070_285_824 + 64 * (512 + 1849 / 2) * 57_344
    assert plan.busy_s == pytest.approx(1849 * full / (0.75 * 3.35e12))
    many = plan.round_s(10_000, 0)
    assert many == pytest.approx(2 * 7_615_283_200 * 10_000 / (0.4 * 989e12))  # by products


def test_bytes_of_a_step_grow_with_its_tokens() -> None:
    plan = ScalePlan(SMALL, 1024)
    assert plan.tokens == 1024 * 64 * 2361
    assert plan.trajectory_bytes == 9 * plan.tokens
    assert plan.feature_bytes == 2 * 3 * 3584 * plan.tokens


def test_a_push_to_the_other_hosts_takes_copies_or_a_tree() -> None:
    plan = ScalePlan(SMALL, 64, network=Network(1e9, hop_s=0.0))
    assert plan.direct_s == pytest.approx(7 * 15.2305664)
    assert plan.tree_s(1) == pytest.approx(15.2305664, rel=0.01)
    assert plan.tree_s(2) == pytest.approx(2 * 15.2305664, rel=0.01)
    assert ScalePlan(SMALL, 8).direct_s == 0.0


@pytest.mark.parametrize(("model", "gpus"), [(SMALL, 4), (LARGE, 16), (MIXTURE, 256)])
def test_the_fewest_gpus_are_those_below_which_nothing_fits(model: ScaledModel, gpus: int) -> None:
    assert fewest_gpus(model) == gpus
    assert ScalePlan(model, gpus).fits
    assert not ScalePlan(model, gpus // 2).fits


def test_a_token_goes_through_no_more_experts_than_there_are() -> None:
    with pytest.raises(InvalidInput, match="experts"):
        replace(MIXTURE, used=129)
