"""Reads traces, the recorded and synthetic workloads of bandits, and replays them to a chooser of
arms.

A trace consists of steps with one rollout each. A rollout queues responses of given lengths at
once; `max_batch` responses decode at a time. Every chooser gets the same luck. Whether a draft is
right depends on the request, the token and the position in the chain, not on the drafter. The noise
of a round depends on its number. Time is counted without the noise.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from paceline.arm_names import speculator_of
from paceline.errors import InvalidInput, NotFound
from paceline.services.rollout_gateway.bandits.base import Situation
from paceline.trajectory import Target

OUTLIER = 5.0
NOISE_ROUNDS = 1 << 14
PROMPT_TOKENS = 16
POSITIONS = 16

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


FOLDER = Path(__file__).with_name("traces")


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
    # recorded, by speculator: a string of digits per request. A digit is the number of right drafts
    # in a row at a token from which a round may start.
    runs: dict[str, tuple[str, ...]] = {}
    seconds: dict[str, float] = {}  # by arm: factor on the cost table


class Trace(BaseModel):
    """One workload."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    family: str
    seed: int
    max_batch: int = Field(ge=1)
    limit: int = Field(ge=1)  # response tokens at most, as in the requests
    # arm -> batch size -> milliseconds of a round; linear in between
    costs_ms: dict[str, dict[int, float]]
    noise: float = Field(default=0.05, ge=0)  # standard deviation of a round's log seconds
    # share of rounds that take OUTLIER times as long
    outliers: float = Field(default=0.003, ge=0, le=1)
    steps: tuple[Step, ...]

    @property
    def arms(self) -> tuple[str, ...]:
        """Arms, `off` first."""
        return tuple(self.costs_ms)


def read_trace(path: Path) -> Trace:
    """Reads a trace. Raises InvalidInput for a file that is no trace."""
    try:
        return Trace.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"no trace: {path}", seen=str(error)) from error


def read_traces(folder: Path = FOLDER) -> Sequence[Trace]:
    """Reads all traces of a folder, by name. Raises NotFound if there is none."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise NotFound("no traces here", seen=folder)
    return [read_trace(path) for path in paths]


class Chooser(Protocol):
    """Chooses the arms of a trace."""

    def choose(self, moment: Moment) -> str:
        """Returns the arm of the next round."""
        ...

    def observe(self, moment: Moment, arm: str, taken: Sequence[int], seconds: float) -> None:
        """Learns from the outcome of the round."""
        ...

    def changed(self, target: Target) -> None:
        """Reacts to new weights."""
        ...


@dataclass(frozen=True, slots=True)
class Rollout:
    """One step of a trace, with its luck drawn."""

    lengths: Counts  # [N] response tokens
    runs: Mapping[str, Counts]  # by speculator: [N, T] right drafts in a row from each token on
    chances: Mapping[str, Floats]  # by speculator: [N, 1 + K] true E[tokens] with 0 .. K drafts
    seconds: Mapping[str, float]  # by arm: factor on the table


@dataclass(slots=True)
class Moment:
    """State of a replay before a round."""

    world: World
    rollout: Rollout
    rows: Counts  # [B] requests that decode
    generated: Counts  # [B] tokens each has
    situation: Situation
    draining: bool  # no response waits for a place in the batch

    def expected(self, arm: str) -> Floats:
        """True E[tokens] [B] of a round."""
        tokens = self.rollout.chances.get(speculator_of(arm))
        return (
            tokens[self.rows, self.world.steps[arm]]
            if tokens is not None
            else np.ones(len(self.rows))
        )

    def cost(self, arm: str, rows: int) -> float:
        """True seconds of a round with this number of rows."""
        return self.world.cost(arm, rows) * self.rollout.seconds.get(arm, 1.0)


@dataclass(slots=True)
class Replay:
    """Times of a trace under one chooser."""

    seconds: float = 0.0
    rounds: int = 0
    choices_s: list[float] = field(default_factory=list)  # time of each choice
    lessons_s: list[float] = field(default_factory=list)  # time of each observation


class World:
    """A trace under one seed."""

    def __init__(self, trace: Trace, seed: int) -> None:
        self.trace = trace
        self.steps = {arm: int(arm.partition(":")[2].partition("_")[0] or 0) for arm in trace.arms}
        source = np.random.default_rng([trace.seed, seed])
        self._noise = np.exp(trace.noise * source.standard_normal(NOISE_ROUNDS))
        self._noise[source.random(NOISE_ROUNDS) < trace.outliers] *= OUTLIER
        self.rollouts = [_rolled(step, self.steps, source) for step in trace.steps]
        self._costs: dict[tuple[str, int], float] = {}

    def cost(self, arm: str, rows: int) -> float:
        """Seconds of a round according to the cost table."""
        key = (arm, rows)
        if key not in self._costs:
            table = self.trace.costs_ms[arm]
            self._costs[key] = float(np.interp(rows, list(table), list(table.values()))) / 1000
        return self._costs[key]

    def play(self, chooser: Chooser) -> Replay:
        """Plays all steps in order."""
        replay = Replay()
        for step, rollout in zip(self.trace.steps, self.rollouts, strict=True):
            if step.changed:
                chooser.changed(Target(step.changed))
            self._roll(rollout, chooser, replay)
        return replay

    def _roll(self, rollout: Rollout, chooser: Chooser, replay: Replay) -> None:
        trace, waiting = self.trace, min(self.trace.max_batch, len(rollout.lengths))
        rows, generated = np.arange(waiting), np.zeros(waiting, dtype=np.int64)
        while len(rows):
            situation = Situation(len(rows), PROMPT_TOKENS + int(generated.max()))
            draining = waiting == len(rollout.lengths)
            moment = Moment(self, rollout, rows, generated, situation, draining)
            began = time.perf_counter()
            arm = chooser.choose(moment)
            replay.choices_s.append(time.perf_counter() - began)
            taken = self._taken(moment, arm)
            seconds = moment.cost(arm, len(rows))
            noise = float(self._noise[replay.rounds % NOISE_ROUNDS])
            replay.seconds += seconds
            replay.rounds += 1
            lesson = taken.tolist()
            began = time.perf_counter()
            chooser.observe(moment, arm, lesson, seconds * noise)
            replay.lessons_s.append(time.perf_counter() - began)
            going = generated + taken < rollout.lengths[rows]
            rows, generated = rows[going], (generated + taken)[going]
            room = min(trace.max_batch - len(rows), len(rollout.lengths) - waiting)
            if room:
                rows = np.concatenate((rows, np.arange(waiting, waiting + room)))
                generated = np.concatenate((generated, np.zeros(room, dtype=np.int64)))
                waiting += room

    def _taken(self, moment: Moment, arm: str) -> Counts:
        """Tokens [B] of a round, up to each response's end."""
        runs = moment.rollout.runs.get(speculator_of(arm))
        if runs is None:
            return np.ones(len(moment.rows), dtype=np.int64)
        accepted = np.minimum(runs[moment.rows, moment.generated], self.steps[arm])
        left: Counts = moment.rollout.lengths[moment.rows] - moment.generated
        taken: Counts = np.minimum(accepted + 1, left)
        return taken


def _rolled(step: Step, steps: Mapping[str, int], source: np.random.Generator) -> Rollout:
    lengths = np.array(step.lengths)
    runs, chances = {}, {}
    for name, recorded in step.runs.items():
        runs[name] = np.zeros((len(lengths), lengths.max() + 1), dtype=np.int64)
        for row, digits in enumerate(recorded):
            runs[name][row, : len(digits)] = [int(one) for one in digits]
        chances[name] = _means(runs[name], lengths)

    for name, drafter in step.drafters.items():
        shift = drafter.spread * source.standard_normal(len(lengths))
        if drafter.kinds:
            shift = shift + np.resize(drafter.kinds, len(lengths))
        positions = np.clip(drafter.positions, 1e-9, 1 - 1e-9)
        each = 1 / (1 + np.exp(-(np.log(positions / (1 - positions)) + shift[:, None])))
        luck = source.random((len(lengths), int(lengths.max()) + POSITIONS))
        runs[name] = _runs(luck, each, int(lengths.max()) + 1)
        chances[name] = np.concatenate(
            (np.ones((len(lengths), 1)), 1 + each.cumprod(axis=1).cumsum(axis=1)), axis=1
        )

    return Rollout(lengths, runs, chances, step.seconds)


def _runs(luck: Floats, chances: Floats, tokens: int) -> Counts:
    """Right drafts in a row [N, tokens]: the draft for token t at position p is right when luck[t]
    < chances[p].
    """
    runs = np.zeros((len(luck), tokens), dtype=np.int64)
    alive = np.ones((len(luck), tokens), dtype=bool)
    for position in range(chances.shape[1]):
        alive &= luck[:, position : position + tokens] < chances[:, position, None]
        runs += alive
    return runs


def _means(runs: Counts, lengths: Counts) -> Floats:
    """Recorded mean tokens [N, 1 + K] of rounds from every token of a response."""
    longest = int(runs.max())
    return np.array(
        [
            [
                1 + np.minimum(row[:length], steps).mean()
                for steps in range(max(longest, POSITIONS) + 1)
            ]
            for row, length in zip(runs, lengths, strict=True)
        ]
    )
