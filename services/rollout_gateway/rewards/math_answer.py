r"""Scores a mathematical answer as right or wrong: finds the answer and compares integers and
texts.

The answer follows the last marker; without a marker it is in the last \boxed{}. Integers and equal
texts are compared here. Other answers are compared in a child process (math_equal.py), because a
hostile answer may take long.
"""

import re
from contextlib import suppress
from dataclasses import replace

from paceline.services.rollout_gateway import environments, rewards

MATH_EQUAL = "paceline.services.rollout_gateway.rewards.math_equal:MathEqual"
MAX_ANSWER = 1000
"""Longest answer in characters; a longer answer is right only as the same text."""
_BOXED = r"\boxed{"
# Possessive quantifiers: a match takes linear time, since it runs in the gateway's event loop.
_NUMBER = r"[-+]?(?:\d[\d,]*+(?:\.\d*+)?|\.\d++)"
_PLAIN = re.compile(rf"{_NUMBER}(?:/{_NUMBER})?(?:\\?%)?")
_POWER = r"(?:\^\{?[-+]?\d+\}?|\*\*[-+]?\d+)"
_SCALED = rf"/{_NUMBER}|(?:\*|\\times|\\cdot)10{_POWER}|{_POWER}"
_WRITTEN = re.compile(rf"{_NUMBER}(?:{_SCALED})?(?:\\?%)?\.?")
_SIGNS_ONLY = re.compile(r"(?:[\d+\-*/=:^%!.,(){}]|\\%|\\times|\\cdot|\\div)+")


class MathAnswer(rewards.RewardRule):
    """1.0 when the response ended by itself and its answer equals the task's, else 0.0."""

    def __init__(self, marker: str, equal: rewards.RewardRule | None = None) -> None:
        """`equal` compares an episode's whole text with the task's answer. None: only integers and
        texts are compared.
        """
        self._marker = marker
        self._equal = equal

    async def score(self, episode: environments.Episode) -> float | rewards.RuleScore | None:
        """Raises Unscored or Unavailable when the comparison needs a child and gets none."""
        given = answer_of(episode.text, self._marker) if episode.finish == "stop" else None
        if given is None:
            return 0.0
        right = same_answer(given, episode.task.answer)
        if right is None and self._equal is not None:
            return await self._equal.score(replace(episode, text=given, messages=()))
        return float(bool(right))


def answer_of(text: str, marker: str) -> str | None:
    r"""The text after the last marker, else the content of the last \boxed{}, else None; without
    surrounding space.
    """
    _, found, answer = text.rpartition(marker)
    if not found:
        _, found, rest = text.rpartition(_BOXED)
        end = _closing_brace(rest)
        if not found or end is None:
            return None
        answer = rest[:end]
    return answer.strip()


def same_answer(given: str, expected: str) -> bool | None:
    """Whether two answers are equal; None when that needs mathematics.

    Equal integers and equal texts are equal. If a number is expected, an expression of digits and
    signs such as `2+4` or `6=6` is wrong: a policy could otherwise repeat its task instead of
    solving it.
    """
    given, expected = given.strip(), expected.strip()
    if not given or not expected:
        return False
    if given == expected:
        return True
    with suppress(ValueError):
        return int(given) == int(expected)
    if max(len(given), len(expected)) > MAX_ANSWER:
        return False
    bare = re.sub(r"[\s$]|\\[()\[\]]", "", given)
    if _PLAIN.fullmatch(expected) and _SIGNS_ONLY.fullmatch(bare) and not _WRITTEN.fullmatch(bare):
        return False
    return None


def _closing_brace(text: str) -> int | None:
    """Index of the brace that closes a brace opened before `text`. Escaped braces count too, since
    they occur in pairs.
    """
    depth = 1
    for index in (match.start() for match in re.finditer(r"[{}]", text)):
        depth += 1 if text[index] == "{" else -1
        if depth == 0:
            return index
    return None
