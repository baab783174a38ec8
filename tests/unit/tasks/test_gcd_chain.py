"""The demo's task family: its working is true arithmetic, its splits share no pair, its lengths are
long-tailed.
"""

import math
import re
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from examples.demo import gcd_chain
from paceline.errors import InvalidInput

NUMBERS = st.integers(1, gcd_chain.LARGEST)


def _shown_states(a: int, b: int, style: gcd_chain.Style) -> list[tuple[int, int]]:
    text = gcd_chain.solution(a, b, style)
    assert re.fullmatch(r"([%-]\d{4})*#\d{2}", text)
    return [(a, b), *((int(x), int(y)) for x, y in re.findall(r"[%-](\d\d)(\d\d)", text))]


@given(NUMBERS, NUMBERS, st.sampled_from(gcd_chain.STYLES))
def test_every_style_ends_with_the_divisor_that_math_gcd_gives(
    a: int, b: int, style: gcd_chain.Style
) -> None:
    assert gcd_chain.solution(a, b, style).endswith(f"#{math.gcd(a, b):02d}")
    assert int(gcd_chain.answer(a, b)) == math.gcd(a, b)


@given(NUMBERS, NUMBERS)
def test_each_remainder_step_divides_the_step_before_it(a: int, b: int) -> None:
    states = _shown_states(a, b, "remainder")
    for (x, y), (next_x, next_y) in pairwise(states):
        assert (next_x, next_y) == (y, x - y * (x // y))
    assert states[-1] == (math.gcd(a, b), 0)


@given(NUMBERS, NUMBERS)
def test_each_subtract_step_takes_the_smaller_number_from_the_larger(a: int, b: int) -> None:
    states = _shown_states(a, b, "subtract")
    for before, after in pairwise(states):
        assert sorted(after) == sorted((max(before) - min(before), min(before)))
        assert sum(x == y for x, y in zip(before, after, strict=True)) == 1
    assert states[-1] == (math.gcd(a, b), math.gcd(a, b))


@given(NUMBERS, NUMBERS)
def test_a_pair_and_its_mirror_are_in_the_same_split(a: int, b: int) -> None:
    assert gcd_chain.split_of(a, b) == gcd_chain.split_of(b, a)


def test_no_heldout_pair_is_a_training_pair_in_either_order() -> None:
    train, heldout = set(gcd_chain.pairs("train")), set(gcd_chain.pairs("heldout"))
    assert train
    assert heldout
    assert not train & (heldout | {(b, a) for a, b in heldout})


def test_the_family_is_every_unequal_pair_within_the_subtraction_limit() -> None:
    def quotients(
        a: int, b: int
    ) -> int:  # subtractions until equal = sum of the quotients, less one
        return 0 if b == 0 else a // b + quotients(b, a % b)

    wanted = {
        (a, b) for a in range(1, 100) for b in range(1, 100) if a != b and quotients(a, b) - 1 <= 40
    }
    assert set(gcd_chain.pairs("train")) | set(gcd_chain.pairs("heldout")) == wanted


def test_subtract_lengths_have_a_median_near_35_and_a_tail_to_about_205_tokens() -> None:
    tasks = gcd_chain.sample_tasks(512, "heldout", seed=2)
    pairs = [(int(t.prompt[:2]), int(t.prompt[3:5])) for t in tasks]
    lengths = sorted(len(gcd_chain.solution(a, b, "subtract")) + 1 for a, b in pairs)
    assert 30 <= lengths[256] <= 45
    assert 150 <= lengths[-1] <= 204


def test_sampled_tasks_are_distinct_and_fixed_by_the_seed() -> None:
    first, again, other = (gcd_chain.sample_tasks(200, "train", seed) for seed in (3, 3, 4))
    assert first == again != other
    assert len({task.task_id for task in first}) == 200


def test_sampling_more_than_the_split_holds_is_refused_with_both_counts() -> None:
    held = len(gcd_chain.pairs("heldout"))
    with pytest.raises(InvalidInput, match=rf"seen: {held + 1}; allowed: 0\.\.{held}"):
        gcd_chain.sample_tasks(held + 1, "heldout", seed=0)


@pytest.mark.parametrize("number", [0, 100, -1])
def test_a_number_outside_the_family_is_refused_with_the_allowed_range(number: int) -> None:
    with pytest.raises(InvalidInput, match=rf"seen: {number}; allowed: 1\.\.99"):
        gcd_chain.prompt(number, 5)


@given(NUMBERS, NUMBERS, st.sampled_from(gcd_chain.STYLES))
def test_a_solution_is_correct_and_shows_its_style(a: int, b: int, style: gcd_chain.Style) -> None:
    assume(a != b or style != "subtract")  # equal numbers need no subtraction
    text = gcd_chain.solution(a, b, style)
    assert gcd_chain.style_of(text) == style
    assert gcd_chain.is_correct(text, f"{math.gcd(a, b):02d}")


@pytest.mark.parametrize("response", ["", "12", "#", "#1", "#012", "#12 ", "#12#06", "%3612%1200"])
def test_a_response_without_exactly_the_answer_after_the_last_mark_is_wrong(response: str) -> None:
    assert not gcd_chain.is_correct(response, "12")
    assert gcd_chain.is_correct("nonsense#06#12", "12")
