"""The change in acceptance from a drafter's predecessor. Its trainer measures the change and pushes
it with the weights.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from paceline.errors import DataLoss, InvalidInput
from paceline.tagged_json import from_object
from paceline.tensors import ACCEPTANCE, DOCUMENTS

FILE = DOCUMENTS[ACCEPTANCE]
MAX_POSITIONS = 64
ROUNDING = 1e-6
SELDOM = 0.01
"""Below this probability of reaching a draft, earlier evidence about it is ignored."""


@dataclass(frozen=True, slots=True)
class AcceptanceShift:
    """Survival at draft i, the probability that drafts 1 .. i are all accepted, of both drafters on
    the same rows.
    """

    over: int  # version of the predecessor
    before: tuple[float, ...]  # [K] survival of the predecessor
    after: tuple[float, ...]  # [K] of the drafter

    def __post_init__(self) -> None:
        if not 0 < len(self.before) == len(self.after) <= MAX_POSITIONS:
            message = "survival of two drafters by position"
            seen = f"{len(self.before)} and {len(self.after)} positions"
            raise InvalidInput(message, seen=seen, allowed=f"as many of both, 1 to {MAX_POSITIONS}")
        for survival in (self.before, self.after):
            steps = (1.0, *survival, 0.0)
            falls = all(now <= earlier + ROUNDING for earlier, now in pairwise(steps))
            if not falls or not all(map(math.isfinite, survival)):
                message = "survival of drafts by position"
                raise InvalidInput(message, seen=list(survival), allowed="falling, from 1 to 0")

    def length_gain(self, drafts: int) -> float:
        """E[len] with so many drafts, including the bonus token, relative to the predecessor's."""
        return (1.0 + sum(self.after[:drafts])) / (1.0 + sum(self.before[:drafts]))

    def chance(self, draft: int) -> float:
        """Probability that draft `draft` (from 0) is accepted after all earlier drafts; beyond the
        measured drafts, the last draft's.
        """
        return conditional(self.after)[min(draft, len(self.after) - 1)]

    def shifted(self, draft: int, chance: float) -> float:
        """The same probability if the predecessor's was `chance` on other rows."""
        at, after = min(draft, len(self.before) - 1), self.chance(draft)
        if (1.0, *self.before)[at] < SELDOM:
            return after
        return min(max(chance + after - conditional(self.before)[at], 0.0), 1.0)

    def to_json(self) -> str:
        """Text of FILE."""
        return json.dumps(asdict(self))


def shift_over(shift: AcceptanceShift | None, serving: int) -> AcceptanceShift | None:
    """The shift if it is relative to the serving drafter."""
    return shift if shift is not None and shift.over == serving else None


def conditional(survival: Sequence[float]) -> tuple[float, ...]:
    """Acceptance of draft i after all earlier drafts were accepted; 0 if that never happened."""
    before = (1.0, *survival[:-1])
    return tuple(
        now / earlier if earlier > 0 else 0.0 for now, earlier in zip(survival, before, strict=True)
    )


def read_shift(directory: Path) -> AcceptanceShift | None:
    """The shift beside a version's weights; None without one. Raises DataLoss."""
    path = directory / FILE
    try:
        return from_object(AcceptanceShift, json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, DataLoss, InvalidInput) as error:
        raise DataLoss(f"{path} has no acceptance", seen=str(error)[:120]) from error
