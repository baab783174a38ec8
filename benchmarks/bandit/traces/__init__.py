"""Recorded and synthetic workloads of bandits, as files. Owns their format; make.py makes them,
world.py replays them.

A trace is steps of one rollout each: responses by their lengths, all queued at once, `max_batch` of
them decoding. What an arm would be given stands in the trace or follows from its seed, so that
every bandit meets equal luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from paceline.errors import InvalidInput, NotFound

FOLDER = Path(__file__).parent


class Drafter(BaseModel):
    """Synthetic acceptance of one speculator in one step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    positions: tuple[float, ...]  # chance of draft 1, 2, ... after its predecessors were accepted
    spread: float = Field(default=0.0, ge=0)  # standard deviation between requests, in log-odds
    kinds: tuple[float, ...] = ()  # log-odds added to requests 0, 1, ... modulo the number of kinds


class Step(BaseModel):
    """One rollout."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lengths: tuple[int, ...] = Field(min_length=1)  # response tokens of each request
    changed: Literal["", "policy", "drafter"] = ""  # weights committed before the step
    drafters: dict[str, Drafter] = {}  # synthetic: by speculator
    runs: dict[
        str, tuple[str, ...]
    ] = {}  # recorded: by speculator, of each request and token from which a round may
    # start a digit: how many drafts in a row are right there
    seconds: dict[str, float] = {}  # by arm: factor on the cost table


class Trace(BaseModel):
    """One workload."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    family: str
    seed: int
    max_batch: int = Field(ge=1)
    limit: int = Field(ge=1)  # response tokens at most, as requests say
    costs_ms: dict[
        str, dict[int, float]
    ]  # arm -> batch size -> milliseconds of a round; linear in between
    noise: float = Field(default=0.05, ge=0)  # standard deviation of a round's log seconds
    outliers: float = Field(
        default=0.003, ge=0, le=1
    )  # share of rounds that take OUTLIER times as long
    steps: tuple[Step, ...]

    @property
    def arms(self) -> tuple[str, ...]:
        """Arms, `off` first."""
        return tuple(self.costs_ms)


def read_trace(path: Path) -> Trace:
    """Raises InvalidInput for a file that is no trace."""
    try:
        return Trace.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"no trace: {path}", seen=str(error)) from error


def read_traces(folder: Path = FOLDER) -> Sequence[Trace]:
    """All traces of a folder by name. Raises NotFound when there is none."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise NotFound("no traces here", seen=folder)
    return [read_trace(path) for path in paths]
