"""The demo's task families: their working is true arithmetic, their splits share no pair, their
lengths are long-tailed.
"""

import math
import re
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from examples.demo import gcd_chain
from examples.demo.gcd_chain import THREE_DIGITS, TWO_DIGITS, Family, Style
from paceline.errors import InvalidInput

FAMILIES = [pytest.param(one, id=name) for name, one in gcd_chain.FAMILIES.items()]


def numbers(family: Family) -> st.SearchStrategy[int]:
    return st.integers(1, family.largest)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Family, int, int]:
    family = draw(st.sampled_from([THREE_DIGITS, TWO_DIGITS]))
    return family, draw(numbers(family)), draw(numbers(family))


def shown_states(case: tuple[Family, int, int], style: Style) -> list[tuple[int, int]]:
    family, a, b = case
    text, digits = family.solution(a, b, style), family.digits
    assert re.fullmatch(rf"([%-]\d{{{2 * digits}}})*#\d{{{digits}}}", text)
    pair = rf"[%-](\d{{{digits}}})(\d{{{digits}}})"
    return [(a, b), *((int(x), int(y)) for x, y in re.findall(pair, text))]


@given(cases(), st.sampled_from(gcd_chain.STYLES))
def test_every_style_ends_with_the_divisor_that_math_gcd_gives(
    case: tuple[Family, int, int], style: Style
) -> None:
    family, a, b = case
    assert family.solution(a, b, style).endswith(f"#{math.gcd(a, b):0{family.digits}d}")
    assert int(family.answer(a, b)) == math.gcd(a, b)


@given(cases())
def test_each_remainder_step_divides_the_step_before_it(case: tuple[Family, int, int]) -> None:
    states = shown_states(case, "remainder")
    for (x, y), (next_x, next_y) in pairwise(states):
        assert (next_x, next_y) == (y, x - y * (x // y))
    assert states[-1] == (math.gcd(case[1], case[2]), 0)


@given(cases())
def test_each_subtract_step_takes_the_smaller_number_from_the_larger(
    case: tuple[Family, int, int],
) -> None:
    states = shown_states(case, "subtract")
    for before, after in pairwise(states):
        assert sorted(after) == sorted((max(before) - min(before), min(before)))
        assert sum(x == y for x, y in zip(before, after, strict=True)) == 1
    assert states[-1] == (math.gcd(case[1], case[2]),) * 2
    assert len(states) - 1 == gcd_chain.count_subtractions(case[1], case[2])


@given(cases())
def test_a_pair_and_its_mirror_are_in_the_same_split(case: tuple[Family, int, int]) -> None:
    family, a, b = case
    assert family.split_of(a, b) == family.split_of(b, a)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_heldout_pair_is_a_training_pair_in_either_order(family: Family) -> None:
    train, heldout = set(family.pairs("train")), set(family.pairs("heldout"))
    assert train
    assert heldout
    assert not train & (heldout | {(b, a) for a, b in heldout})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "most", "divisor"), [(TWO_DIGITS, 40, 99), (THREE_DIGITS, 52, 25)]
)
def test_a_family_is_every_unequal_pair_within_its_limits(
    family: Family, most: int, divisor: int
) -> None:
    every = set(family.pairs("train")) | set(family.pairs("heldout"))
    for a in range(1, family.largest + 1, 7):
        for b in range(1, family.largest + 1):
            steps = sum(1 for _ in gcd_chain.subtractions(a, b))
            assert ((a, b) in every) == (a != b and steps <= most and math.gcd(a, b) <= divisor), (
                a,
                b,
            )


@pytest.mark.parametrize(
    ("family", "median", "longest"), [(TWO_DIGITS, (30, 45), 204), (THREE_DIGITS, (85, 105), 369)]
)
def test_subtract_lengths_have_a_long_tail(
    family: Family, median: tuple[int, int], longest: int
) -> None:
    tasks = family.sample_tasks(512, "heldout", seed=2)
    lengths = sorted(len(task.metadata["format"]) + 1 for task in tasks)
    assert median[0] <= lengths[256] <= median[1]
    assert 0.7 * longest <= lengths[-1] <= longest
    assert family.longest == family.prompt_tokens + longest


@pytest.mark.slow
def test_a_task_asks_for_the_working_by_subtraction() -> None:
    for task in THREE_DIGITS.sample_tasks(50, "train", seed=4):
        a, b = (int(one) for one in task.prompt.rstrip("=").split(":"))
        assert task.metadata["format"] == THREE_DIGITS.solution(a, b, "subtract")
        assert not set(task.metadata["format"]) & set("*?["), "it would match more than itself"


@pytest.mark.slow
def test_sampled_tasks_are_distinct_and_fixed_by_the_seed() -> None:
    first, again, other = (THREE_DIGITS.sample_tasks(200, "train", seed) for seed in (3, 3, 4))
    assert first == again != other
    assert len({task.task_id for task in first}) == 200


def test_sampling_more_than_the_split_holds_is_refused_with_both_counts() -> None:
    held = len(TWO_DIGITS.pairs("heldout"))
    with pytest.raises(InvalidInput, match=rf"seen: {held + 1}; allowed: 0\.\.{held}"):
        TWO_DIGITS.sample_tasks(held + 1, "heldout", seed=0)


@pytest.mark.parametrize(("family", "number"), [(TWO_DIGITS, 100), (THREE_DIGITS, 1000)])
@pytest.mark.parametrize("low", [0, -1])
def test_a_number_outside_the_family_is_refused_with_the_allowed_range(
    family: Family, number: int, low: int
) -> None:
    for one in (number, low):
        with pytest.raises(InvalidInput, match=rf"seen: {one}; allowed: 1\.\.{number - 1}"):
            family.prompt(one, 5)


@given(cases(), st.sampled_from(gcd_chain.STYLES))
def test_a_solution_is_correct_and_shows_its_style(
    case: tuple[Family, int, int], style: Style
) -> None:
    family, a, b = case
    assume(a != b or style != "subtract")  # equal numbers need no subtraction
    text = family.solution(a, b, style)
    assert gcd_chain.style_of(text) == style
    assert gcd_chain.is_correct(text, family.answer(a, b))


@pytest.mark.parametrize("response", ["", "12", "#", "#1", "#012", "#12 ", "#12#06", "%3612%1200"])
def test_a_response_without_exactly_the_answer_after_the_last_mark_is_wrong(response: str) -> None:
    assert not gcd_chain.is_correct(response, "12")
    assert gcd_chain.is_correct("nonsense#06#12", "12")
