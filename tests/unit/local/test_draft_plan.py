"""What drafts bring on many GPUs is what was computed by hand from shapes and acceptance lengths."""

from __future__ import annotations

import pytest

from paceline.errors import InvalidInput
from paceline.local.draft_plan import MEASURED, DraftPlan, chain_length, share_right
from paceline.local.scale_plan import MODELS, ScalePlan

SMALL, LARGE, MIXTURE = (DraftPlan(ScalePlan(model, 1024)) for model in MODELS)
LAYER, HEAD = 233_046_016, 152_064 * 3584
"""Of 7B: 3584 x (2 x 28 x 128 + 2 x 4 x 128 + 3 x 18,944); the head."""
JOINED = 2 * 3584**2
BYTES_S, FLOPS = 0.75 * 3.35e12, 0.4 * 989e12


@pytest.mark.parametrize("right", [0.0, 0.3, 0.915, 1.0])
def test_the_share_of_right_drafts_gives_the_length_back(right: float) -> None:
    length = chain_length(right, 5)
    assert length == pytest.approx(6 if right == 1 else (1 - right**6) / (1 - right))
    assert share_right(length, 5) == pytest.approx(right, abs=1e-9)


@pytest.mark.parametrize("length", [0.9, 6.1, float("nan")])
def test_a_length_that_no_chain_has_is_refused(length: float) -> None:
    with pytest.raises(InvalidInput, match="1 to 6"):
        share_right(length, 5)


def test_a_draft_reads_a_layer_and_the_head() -> None:
    assert SMALL.taught == LAYER + JOINED
    assert SMALL.draft_s(1) == pytest.approx(2 * (LAYER + JOINED + HEAD) / BYTES_S)
    many = 2 * (LAYER + JOINED + HEAD) * 4096 / FLOPS
    assert SMALL.draft_s(4096) == pytest.approx(many)


def test_one_request_of_7b_gains_what_its_rounds_were_computed_to() -> None:
    """Weights are read once whatever is verified, so that all five drafts pay."""
    context = 1436.0
    plain = (2 * (7_615_283_200 - HEAD) + context * 57_344) / BYTES_S
    drafts = 5 * 2 * (LAYER + JOINED + HEAD) / BYTES_S
    assert SMALL.speed("co-trained", 1, context) == pytest.approx(4.79 * plain / (plain + drafts))
    assert SMALL.speed("n-grams", 1, context) == pytest.approx(2.50)  # drafts for nothing


def test_where_products_take_the_time_fewer_drafts_are_best_and_none_is_worse_than_no_drafts() -> (
    None
):
    right = MEASURED["co-trained"].right
    with_one = (1 + right) / (2 + (LAYER + JOINED + HEAD) / 7_615_283_200)
    best = SMALL.speed("co-trained", 100_000, 0)
    assert best == max(1.0, best)
    assert best == pytest.approx(1.0)  # every verified token costs what a decoded one does
    assert with_one < 1


def test_a_better_drafter_is_never_slower() -> None:
    for plan in (SMALL, LARGE, MIXTURE):
        for requests in (1, 16, 64, 256):
            frozen, ours = (plan.speed(arm, requests, 1436) for arm in ("frozen", "co-trained"))
            assert 1 <= frozen <= ours


def test_a_step_gains_in_its_rollout_alone() -> None:
    plain, drafted = SMALL.step_s(), SMALL.step_s("co-trained")
    assert plain - drafted == pytest.approx(SMALL.rollout_s() - SMALL.rollout_s("co-trained"))
    assert drafted > SMALL.scale.train_s


def test_an_optimiser_step_takes_what_was_computed_by_hand() -> None:
    """Muon: 2 (2 m^2 n + 9 m^3) of joined, q, o, k, v, gate, up and down."""
    tokens = round(2 * 3.7 * 3584)
    assert SMALL.learning_operations == tokens * (6 * (LAYER + JOINED) + 4 * HEAD)
    square, keys = 3584**3, 512 * 512 * 3584
    joined, inner = 2 * 2 * square, 2 * 3584 * 3584 * 18_944
    muon = joined + 2 * 2 * square + 2 * (2 * keys) + 3 * inner
    muon += 9 * (6 * square + 2 * 512**3)
    assert SMALL.muon_operations == 2 * muon
    assert SMALL.slot_share == pytest.approx(
        SMALL.learning_operations / (SMALL.learning_operations + 2 * muon)
    )
    a_step = (SMALL.learning_operations + 2 * muon) / FLOPS
    assert SMALL.optimiser_steps == pytest.approx(SMALL.idle_s / a_step)
