"""Right, wrong, and not ended: in the gateway where that is easy, in a child where it takes
mathematics.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from fractions import Fraction

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.rollout_gateway.config import RewardsConfig
from paceline.services.rollout_gateway.environments import Episode, EpisodeTask
from paceline.services.rollout_gateway.rewards import RewardRule
from paceline.services.rollout_gateway.rewards.math_answer import (
    MAX_ANSWER,
    MathAnswer,
    answer_of,
    same_answer,
)
from paceline.services.rollout_gateway.rewards.rules import RewardRules


def episode(text: str, *, answer: str = "6", finish: str = "stop") -> Episode:
    return Episode(EpisodeTask("t", "p", answer), text, finish)


class Asked:
    """Counts the texts that a child process would score."""

    def __init__(self) -> None:
        self.given: list[str] = []

    async def score(self, episode: Episode) -> float:
        self.given.append(episode.text)
        return 1.0


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("48-18=30#6", "6", 1.0),
        ("#5 no, #06 ", "6", 1.0),
        ("#6#5", "6", 0.0),
        ("6", "6", 0.0),
        ("#", "6", 0.0),
        ("#-3", "-3", 1.0),
        ("#x y", "x y", 1.0),
        ("#", "", 0.0),
        (r"so \boxed{6}", "6", 1.0),
        (r"\boxed{5} or \boxed{6}.", "6", 1.0),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{6", "6", 0.0),
        (r"\boxed{6} #5", "6", 0.0),
    ],
)
async def test_integers_and_equal_texts_are_compared_without_a_child(
    text: str, answer: str, reward: float
) -> None:
    child = Asked()
    assert await MathAnswer("#", child).score(episode(text, answer=answer)) == reward
    assert child.given == []


async def test_only_what_takes_mathematics_reaches_a_child() -> None:
    child = Asked()
    assert await MathAnswer("#", child).score(episode("6 is 1/2#0.5 ", answer="1/2")) == 1.0
    assert child.given == ["0.5"]


async def test_a_response_cut_by_the_limit_earns_nothing() -> None:
    assert await MathAnswer("#").score(episode("#6", finish="length")) == 0.0


async def test_the_marker_is_a_setting() -> None:
    assert await MathAnswer("=>").score(episode("so => 6")) == 1.0


@pytest.mark.parametrize(
    "given", ["2+4", "6-", "6=6", "12:06=06", "3*2", "$2 + 4$", r"2\times3", "6!", "(2+4)", "6^"]
)
def test_a_task_repeated_is_not_an_answer_where_a_number_is_asked(given: str) -> None:
    assert same_answer(given, "06") is False


@pytest.mark.parametrize(
    "given", ["6.0", "12/2", "6.", "$6$", "600%", r"600\%", "6*10^0", r"0.6\times10^{1}", "x=6"]
)
def test_ways_to_write_a_number_are_left_to_mathematics(given: str) -> None:
    assert same_answer(given, "6") is None


def test_an_answer_over_the_length_is_right_only_as_the_same_text() -> None:
    long = "x" * MAX_ANSWER + "1"
    assert same_answer(long, long) is True
    assert same_answer(long, "x") is False
    assert same_answer("(" * 1_000_000, "1/2") is False
    assert same_answer("9" * 5000, "9" * 5001) is False  # too many digits for int()


@pytest.mark.parametrize(
    "given", ["1" * 999 + "=", "1" * 498 + "/" + "1" * 498 + "=", "1," * 499 + "^", "-" * 999]
)
def test_the_gateway_is_not_held_up_by_digits(given: str) -> None:
    started = time.process_time()
    assert same_answer(given, "5") is False
    assert time.process_time() - started < 0.2


@given(st.integers(), st.integers())
def test_integers_are_equal_as_python_says(one: int, other: int) -> None:
    assert same_answer(str(one), f" {other:+} ") is (one == other)


@given(st.text(alphabet="{}\\boxed#6", max_size=80))
def test_a_box_is_found_as_by_counting_braces(text: str) -> None:
    found = answer_of(text, "=>")
    start = text.rfind(r"\boxed{")
    ends = [
        end
        for end in range(start + 7, len(text))
        if text[end] == "}" and text.count("{", start, end + 1) == text.count("}", start, end + 1)
    ]
    assert found == (text[start + 7 : ends[0]].strip() if start >= 0 and ends else None)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def rule() -> AsyncIterator[RewardRule]:
    rules = RewardRules(RewardsConfig())
    yield rules.rule("math_answer")
    await rules.stop()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("given", "answer", "reward"),
    [
        ("0.5", "1/2", 1.0),
        (r"\frac{1}{2}", "0.5", 1.0),
        (r"$\frac{1}{2}$", "1/2", 1.0),
        (r"\frac{1}{3}", "1/2", 0.0),
        ("6.0", "6", 1.0),
        ("1,000.0", "1000", 1.0),
        ("50%", "1/2", 1.0),
        (r"50\%", "50", 1.0),
        ("{2, 1}", r"\{1, 2\}", 1.0),
        ("{2, 3}", "{1, 2}", 0.0),
        ("[1, 2)", "[1,2.0)", 1.0),
        ("[1, 2)", "(1, 2)", 0.0),
        ("(1,2)", "(2,1)", 0.0),
        (r"\sqrt{8}", r"2\sqrt{2}", 1.0),
        ("1+x^2", "$x^2+1$", 1.0),
        (r"(-\infty, 3)", r"$(-\infty,3)$", 1.0),
        ("Paris", "London", 0.0),
        ("\ud800", "1/2", 0.0),
        ("\x00", "1/2", 0.0),
    ],
)
async def test_answers_that_mean_the_same_are_equal(
    rule: RewardRule, given: str, answer: str, reward: float
) -> None:
    assert await rule.score(episode(f"so #{given}", answer=answer)) == reward


@pytest.mark.asyncio(loop_scope="module")
async def test_fractions_are_equal_as_python_says(rule: RewardRule) -> None:
    for one, other in [
        (Fraction(3, 4), Fraction(6, 8)),
        (Fraction(-7, 5), Fraction(7, 5)),
        (Fraction(9, 7), 1),
    ]:
        text = rf"#\frac{{{Fraction(one).numerator}}}{{{Fraction(one).denominator}}}"
        assert await rule.score(
            episode(text, answer=f"{other}/1" if other == 1 else str(other))
        ) == float(one == other)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "hostile",
    [
        "10**10**10 + x",
        r"\frac{1}{" * 90 + "9" + "}" * 90,
        "(" * 499 + "x" + ")" * 499,
        r"x^{9^{9^{9^9}}}",
        "1+" * 499,
    ],
)
async def test_a_hostile_answer_earns_nothing_and_the_next_is_scored(
    rule: RewardRule, hostile: str
) -> None:
    assert await rule.score(episode(f"#{hostile}", answer="2/3")) == 0.0
    assert await rule.score(episode("#0.5", answer="1/2")) == 1.0


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_megabyte_of_brackets_is_wrong_at_once(rule: RewardRule) -> None:
    assert await rule.score(episode("#" + "(" * (1 << 20), answer="1/2")) == 0.0
    assert await rule.score(episode(r"\boxed{" * 200_000, answer="1/2")) == 0.0
