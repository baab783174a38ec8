"""The audit's judgement on made-up gaps: noise names nothing, each path is named, and no other."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from paceline.services.policy_trainer.audit import (
    BUCKETS,
    LEAST_GAP,
    PER_DECADE,
    AuditCell,
    AuditState,
    audit_figures,
    bound_of,
    cell_name,
    drafted_so_far,
    is_audited,
    judged,
)
from paceline.services.policy_trainer.config import AuditBound, AuditConfig
from paceline.trajectory import BranchKey, DrawSpan, Trajectory

SETTINGS = AuditConfig(least_tokens=200)
EAGLE, NGRAM = "eagle:3_1_4", "ngram:4_1_5"


def cell(arm: str = "off", numbers: str = "float32", *flags: str) -> str:
    return cell_name(arm, numbers, reused="reused" in flags, stale="stale" in flags)


def gaps(mean: float, tokens: int = 250, seed: int = 0) -> AuditCell:
    """Exponential gaps, as rounding has them."""
    rng = random.Random(seed)
    return counted([rng.expovariate(1 / mean) for _ in range(tokens)])


def counted(values: Sequence[float]) -> AuditCell:
    buckets: dict[str, int] = {}
    for value in values:
        number = next(n for n in range(BUCKETS) if value <= LEAST_GAP * 10 ** (n / PER_DECADE))
        buckets[str(number)] = buckets.get(str(number), 0) + 1
    return AuditCell(len(values), sum(values), buckets)


def named(cells: Mapping[str, AuditCell], before: AuditState | None = None) -> list[str]:
    return [one.path for one in judged(before or AuditState(), cells, SETTINGS, "float32")[1]]


FINE, WRONG = 1e-5, 0.5


@pytest.mark.parametrize(
    ("wrong", "others", "expected"),
    [
        (cell(EAGLE), [cell(), cell("off", "float32", "reused")], [f"arm={EAGLE}"]),
        (cell("off", "float32", "reused"), [cell(), cell(EAGLE)], ["reused"]),
        (cell("off", "int8"), [], ["numbers=int8"]),
        (cell("off", "float32", "stale"), [cell()], ["swapped"]),
        (cell(), [], ["plain"]),
        # Other cells clear each suspect: the combination is wrong.
        (
            cell(EAGLE, "float32", "reused"),
            [cell(EAGLE), cell("off", "float32", "reused")],
            [f"arm={EAGLE}", "reused"],
        ),
        # Another arm's cached values are not this arm's fault.
        (cell(f"{EAGLE}+{NGRAM}"), [cell(NGRAM)], [f"arm={EAGLE}"]),
        # Rounding is meant to be inexact: it goes first.
        (cell(EAGLE, "int8"), [], ["numbers=int8"]),
        # Another cell clears one suspect.
        (cell(EAGLE, "float32", "reused"), [cell(NGRAM, "float32", "reused")], [f"arm={EAGLE}"]),
    ],
)
def test_a_cell_beyond_its_bound_names_the_paths_that_no_other_clears(
    wrong: str, others: list[str], expected: list[str]
) -> None:
    cells = {wrong: gaps(WRONG), **{one: gaps(FINE) for one in others}}
    assert named(cells) == expected


def test_what_a_named_path_accounts_for_names_nothing_more() -> None:
    cells = {
        cell(): gaps(FINE),
        cell(EAGLE): gaps(WRONG),
        cell(EAGLE, "float32", "reused"): gaps(WRONG),
        cell("drafted"): gaps(WRONG),
        cell(NGRAM, "float32", "reused"): gaps(FINE),
    }
    assert named(cells) == [f"arm={EAGLE}"]
    state, verdicts = judged(AuditState(), cells, SETTINGS, "float32")
    assert (verdicts[0].tokens, verdicts[0].mean_bound) == (250, SETTINGS.float32.mean)
    assert verdicts[0].mean == pytest.approx(WRONG, rel=0.3)
    assert named(cells, state) == []  # named only once


def test_few_tokens_that_are_well_clear_a_suspect_and_fewer_do_not() -> None:
    wrong = {cell("drafted", "float32", "reused"): gaps(WRONG)}
    few = {cell("drafted"): gaps(FINE, 30)}
    assert named(wrong | few) == ["reused"]
    assert named(wrong | {cell("drafted"): gaps(FINE, 20)}) == ["drafted", "reused"]


def test_a_broken_engine_is_named_as_such_and_no_path_is() -> None:
    everything = (cell(), cell(EAGLE), cell("off", "float32", "reused"))
    assert named(dict.fromkeys(everything, gaps(WRONG))) == ["plain"]


@pytest.mark.slow
def test_rounding_names_nothing_in_three_hundred_verdicts_of_every_cell() -> None:
    formats = {"float32": 5e-6, "bfloat16": 0.015, "int8": 0.015, "fp8_tensor": 0.06}
    state = AuditState()
    for step in range(300):
        cells = {
            cell(arm, numbers, *flags): gaps(mean, seed=step)
            for numbers, mean in formats.items()
            for arm, flags in ((EAGLE, ()), ("off", ("reused",)))
        }
        state, verdicts = judged(state, cells, SETTINGS, "float32")
        assert not verdicts
    assert all(state.within.values())
    assert len(state.within) == 8


def test_too_few_tokens_are_judged_by_nobody_until_later_steps_bring_more() -> None:
    state, verdicts = judged(AuditState(), {cell(EAGLE): gaps(WRONG, 150)}, SETTINGS, "float32")
    assert not verdicts
    state, verdicts = judged(state, {cell(EAGLE): gaps(WRONG, 50)}, SETTINGS, "float32")
    assert [(one.path, one.tokens) for one in verdicts] == [(f"arm={EAGLE}", 200)]
    assert state.open == {}


def test_arms_with_few_tokens_each_are_judged_together() -> None:
    few = {cell(f"eagle:{n}_1_{n + 1}"): gaps(WRONG, 150) for n in range(1, 7)}
    assert named({cell(): gaps(FINE), **few}) == ["drafted"]


def test_a_path_that_breaks_late_is_named_by_the_window_in_which_it_does() -> None:
    state = AuditState()
    for _ in range(50):
        state, _ = judged(state, {cell(EAGLE): gaps(FINE), cell(): gaps(FINE)}, SETTINGS, "float32")
    assert named({cell(EAGLE): gaps(WRONG), cell(): gaps(FINE)}, state) == [f"arm={EAGLE}"]


def test_a_few_tokens_far_off_are_seen_by_the_upper_quantile_alone() -> None:
    values = [1e-6] * 990 + [0.03] * 15
    one = counted(values)
    assert one.mean < SETTINGS.float32.mean
    assert one.upper == pytest.approx(0.03, rel=0.16)
    assert named({cell("off", "float32", "reused"): one, cell(): gaps(FINE)}) == ["reused"]


def test_a_trainer_in_bfloat16_judges_the_engines_float32_by_wider_bounds() -> None:
    cells = {cell(): gaps(0.015)}
    assert [one.path for one in judged(AuditState(), cells, SETTINGS, "float32")[1]] == ["plain"]
    assert not judged(AuditState(), cells, SETTINGS, "bfloat16")[1]


def test_figures_are_by_path_and_a_token_of_two_paths_counts_in_both() -> None:
    cells = {cell(EAGLE, "float32", "reused"): gaps(FINE, 100), cell(EAGLE): gaps(FINE, 50)}
    figures = audit_figures(cells)
    assert figures[f"audit_tokens/arm={EAGLE}"] == 150
    assert figures["audit_tokens/reused"] == 100
    assert set(figures) == {
        f"audit_{what}/{path}"
        for what in ("gap", "upper", "tokens")
        for path in ("reused", f"arm={EAGLE}")
    }


def test_a_plain_round_behind_drafted_ones_reads_what_they_left_in_the_cache() -> None:
    spans = [
        DrawSpan(4, 6, "off", "float32"),
        DrawSpan(6, 9, EAGLE, "float32"),
        DrawSpan(9, 10, "off", "float32"),
        DrawSpan(10, 12, NGRAM, "float32"),
        DrawSpan(20, 22, "off", "float32"),  # another turn
    ]
    both = f"{EAGLE}+{NGRAM}"
    assert list(drafted_so_far(spans[:4])) == ["off", EAGLE, EAGLE, both]
    third = DrawSpan(12, 13, "eagle:5_1_6", "float32")
    assert list(drafted_so_far([*spans[:4], third, spans[4]]))[4:] == ["drafted", "off"]


def test_the_sample_is_about_the_share_and_the_same_every_time() -> None:
    def one(seed: int) -> Trajectory:
        key = BranchKey("run", f"session of {random.random()}")
        return Trajectory(
            key, 0, "t", "g", 1, 0, 0, (1, 2), (0, 1), (0.0, -1.0), (), 1.0, seed, 1.0
        )

    chosen = [seed for seed in range(20_000) if is_audited(one(seed), 0.01)]
    assert chosen == [seed for seed in range(20_000) if is_audited(one(seed), 0.01)]
    assert 150 < len(chosen) < 250
    assert not any(is_audited(one(seed), 0.0) for seed in range(1000))
    assert all(is_audited(one(seed), 1.0) for seed in range(1000))


@pytest.mark.parametrize(
    ("bound", "several"),
    [
        (SETTINGS.float32, ("float32",)),
        (SETTINGS.bfloat16, ("bfloat16",)),
        (SETTINGS.quantised, ("int8",)),
        (SETTINGS.coarse, ("int8_w8a8", "fp8_channel", "fp8_tensor")),
        # SGLang's own names
        (SETTINGS.coarse, ("fp8", "w8a8_int8", "bfloat16+kv_fp8_e5m2", "fp8+kv_fp8_e4m3")),
    ],
)
def test_each_way_of_rounding_has_its_bound(bound: AuditBound, several: Sequence[str]) -> None:
    for numbers in several:
        assert bound_of(cell("off", numbers), SETTINGS, "float32") == bound, numbers
