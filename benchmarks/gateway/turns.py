"""Measures prefix reuse between the turns of agents: growing dialogues, each in a session of a
gateway with embedded engines.

Two gateways take turns at the same dialogues. One gateway has the default settings; the other has
prefix_slots=0 and computes every prompt anew. Drafts are off and end tokens ignored, so that both
do the same work.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.demo_runs import demo_folder
from benchmarks.gateway import fronts as fronts
from benchmarks.gateway.fronts import open_sessions
from benchmarks.gateway.load import median, percentile_ms
from benchmarks.result import Goal, Row, paired_ratio, say
from paceline.errors import InternalError, InvalidInput

CACHED_GOAL = 0.9
CACHE, NO_CACHE = "as it is", "prefix_slots=0"
ARMS: Mapping[str, tuple[str, ...]] = {CACHE: (), NO_CACHE: ("engine.embedded.prefix_slots=0",)}
WORKERS = 2
RESPONSE_TOKENS = 48
"""Mean response tokens of a turn. A turn's own number is from half to one and a half of the mean;
the same holds for its new prompt tokens.
"""

LEAST_TOKENS = 128
"""Least mean of a turn's new tokens: even a short first turn is then long enough for the engine to
keep (prefix_tokens).
"""

MOST_POSITIONS = 1 << 14
WARM_TURNS = 2
FIRST_ORDINARY_ID = 3  # of the demo's tokenizer, behind its special tokens
RUN_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """The plan made from the options; `tokens` is the mean of a turn's new prompt tokens.

    Raises InvalidInput for values out of range.
    """

    turns: int
    dialogues: int
    tokens: int
    repeats: int
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.turns < 2:
            raise InvalidInput(
                "--turns shows nothing", seen=self.turns, allowed=">= 2, or 0 for none"
            )
        if self.dialogues < 1:
            raise InvalidInput("--dialogues is too small", seen=self.dialogues, allowed=">= 1")
        if self.tokens < LEAST_TOKENS:
            raise InvalidInput(
                "--turn-tokens is too small", seen=self.tokens, allowed=f">= {LEAST_TOKENS}"
            )
        if self.positions > MOST_POSITIONS:
            raise InvalidInput(
                "--turns times --turn-tokens is too long",
                seen=self.positions,
                allowed=MOST_POSITIONS,
            )

    @property
    def positions(self) -> int:
        """Most tokens that a dialogue can have."""
        return self.turns * (_most(self.tokens) + _most(RESPONSE_TOKENS))


@dataclass(frozen=True, slots=True)
class Part:
    """Contents of one turn: new prompt tokens, and the number of response tokens."""

    new: tuple[int, ...]
    response: int


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """One answered request.

    `cacheable`: number of its prompt tokens that the turn before has left computed.
    """

    prompt: int
    cacheable: int
    cached: int
    first_s: float
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TurnRun:
    """All dialogues once, at the same time."""

    seconds: float
    dialogues: tuple[tuple[AnsweredTurn, ...], ...]

    @property
    def turns(self) -> list[AnsweredTurn]:
        """Turns of all dialogues."""
        return [turn for dialogue in self.dialogues for turn in dialogue]

    @property
    def later(self) -> list[AnsweredTurn]:
        """Turns after the first turn of their dialogue."""
        return [turn for dialogue in self.dialogues for turn in dialogue[1:]]

    @property
    def rate(self) -> float:
        """Response tokens per second."""
        return sum(len(turn.tokens) for turn in self.turns) / self.seconds


async def measure_turns(plan: TurnPlan, folder: Path) -> dict[str, list[TurnRun]]:
    """Runs by arm, one per repeat; runs with the same number have the same seeds.

    Raises the errors of gateways and turns.
    """
    model = _write_model(folder / "turns", plan.positions)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    runs: dict[str, list[TurnRun]] = {name: [] for name in ARMS}
    async with AsyncExitStack() as stack:
        gateways = {}
        for number, (name, settings) in enumerate(ARMS.items()):
            own = _settings(plan, model, folder / f"turns-{number}")
            front = fronts.gateway_with(folder, f"turns-{number}", own, (*plan.settings, *settings))
            gateways[name] = await stack.enter_async_context(front)
        for repeat in range(plan.repeats + 1):
            say(f"turns, repeat {repeat} of {plan.repeats}" if repeat else "turns, warming up")
            drawn = [
                _parts(plan, f"{repeat} {dialogue}", vocabulary)
                for dialogue in range(plan.dialogues)
            ]
            names = list(ARMS) if repeat % 2 else list(ARMS)[::-1]
            for name in names:
                run = await _run(
                    gateways[name], [parts if repeat else parts[:WARM_TURNS] for parts in drawn]
                )
                if repeat:
                    runs[name].append(run)

    return runs


def _settings(plan: TurnPlan, model: Path, run_dir: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "drafter": "off",
        "engine.kind": "embedded",
        "engine.workers": WORKERS,
        "engine.threads": 1,
        "engine.max_batch": plan.dialogues,
        "engine.max_sequence_tokens": plan.positions,
        "run.dir": str(run_dir),
    }


def _write_model(folder: Path, positions: int) -> Path:
    """Writes the demo's trained policy with room for `positions` positions.

    The policy was trained at fewer positions. Beyond them its tokens are meaningless, but cost the
    same as in any model of its size.
    """
    shutil.copytree(demo_folder() / "policy_trained", folder)
    path = folder / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "max_position_embeddings": positions})
    )
    return folder


def _parts(plan: TurnPlan, seed: str, vocabulary: int) -> list[Part]:
    """Draws a dialogue; no other seed's dialogue begins with the same tokens."""
    draw = random.Random(seed)
    found = []
    for _ in range(plan.turns):
        size = draw.randint(plan.tokens // 2, _most(plan.tokens))
        new = tuple(draw.randrange(FIRST_ORDINARY_ID, vocabulary) for _ in range(size))
        found.append(Part(new, draw.randint(RESPONSE_TOKENS // 2, _most(RESPONSE_TOKENS))))
    return found


def _most(mean: int) -> int:
    return mean + mean // 2


async def _run(front: fronts.Front, drawn: Sequence[Sequence[Part]]) -> TurnRun:
    keys = await open_sessions(front, len(drawn), RUN_DEADLINE_S)
    async with httpx.AsyncClient(base_url=front.url, timeout=RUN_DEADLINE_S) as client:
        began = time.perf_counter()
        async with asyncio.timeout(RUN_DEADLINE_S), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_dialogue(client, key, parts))
                for key, parts in zip(keys, drawn, strict=True)
            ]
        return TurnRun(time.perf_counter() - began, tuple(task.result() for task in tasks))


async def _dialogue(
    client: httpx.AsyncClient, key: str, parts: Sequence[Part]
) -> tuple[AnsweredTurn, ...]:
    """Takes all turns of one session, each as soon as the turn before has ended."""
    known: list[int] = []
    turns: list[AnsweredTurn] = []
    for number, part in enumerate(parts):
        # The model has drawn the last token of a response but never read it, so nothing is computed
        # for it yet.
        cacheable = max(len(known) - 1, 0)
        known += part.new
        turn = await _turn(client, key, known, cacheable, part.response, seed=number)
        known += turn.tokens
        turns.append(turn)
    return tuple(turns)


async def _turn(
    client: httpx.AsyncClient,
    key: str,
    prompt: Sequence[int],
    cacheable: int,
    response: int,
    seed: int,
) -> AnsweredTurn:
    """Makes one streamed completion. Raises InternalError unless it has all its tokens."""
    body = {
        "prompt": list(prompt),
        "max_tokens": response,
        "ignore_eos": True,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    tokens: list[int] = []
    usage: dict[str, Any] = {}
    first_s = 0.0
    headers = {"authorization": f"Bearer {key}"}
    began = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        if answer.status_code != httpx.codes.OK:
            raise InternalError(
                "a turn was refused", seen=(await answer.aread()).decode(errors="replace")[:300]
            )
        async for event in _events(answer):
            for choice in event.get("choices", ()):
                tokens += choice["token_ids"]
                first_s = first_s or (time.perf_counter() - began if tokens else 0.0)
            usage = event.get("usage") or usage

    if len(tokens) != response or usage.get("prompt_tokens") != len(prompt):
        raise InternalError(
            "a turn is not whole",
            seen=f"{len(tokens)} tokens, {usage}",
            allowed=f"{response} tokens",
        )

    return AnsweredTurn(
        len(prompt),
        cacheable,
        usage["prompt_tokens_details"]["cached_tokens"],
        first_s,
        tuple(tokens),
    )


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yields the JSON of each event. Raises InternalError for an error event."""
    async for line in answer.aiter_lines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise InternalError("a turn failed", seen=str(event["error"])[:300])
        yield event


TURN_SECTION = "turns of agents, embedded engine, fp32"


def _later_first_ms(run: TurnRun, percent: int) -> float:
    value = percentile_ms([turn.first_s for turn in run.later], percent)
    assert value is not None
    return value


TURN_FIGURES: Mapping[str, Callable[[TurnRun], float]] = {
    "first token p50 ms": lambda run: _later_first_ms(run, 50),
    "first token p99 ms": lambda run: _later_first_ms(run, 99),
    "tokens/s": lambda run: run.rate,
}
"""Figures of each run of the dialogues; first tokens count only in later turns of a dialogue."""


def turn_rows(runs: Mapping[str, Sequence[TurnRun]]) -> list[Row]:
    """Cache hits and speed of the turns, by arm; then the first arm over the second, run by run."""
    if not runs:
        return []
    rows = [_turn_row(name, several, runs[CACHE]) for name, several in runs.items()]
    ratios = {
        figure: paired_ratio(
            [read(run) for run in runs[CACHE]], [read(run) for run in runs[NO_CACHE]]
        ).value
        for figure, read in TURN_FIGURES.items()
    }
    return [*rows, {"section": TURN_SECTION, "gateway": f"{CACHE} / {NO_CACHE}", **ratios}]


def _turn_row(name: str, runs: Sequence[TurnRun], reference: Sequence[TurnRun]) -> Row:
    """Shares and counts over all runs of an arm, and medians of their figures. Its tokens are
    compared with the reference's.
    """
    turns = [turn for run in runs for turn in run.turns]
    later = [turn for run in runs for turn in run.later]
    pairs = [
        pair
        for one, two in zip(runs, reference, strict=True)
        for pair in zip(one.dialogues, two.dialogues, strict=True)
    ]
    return {
        "section": TURN_SECTION,
        "gateway": name,
        "dialogues": len(pairs),
        "with other tokens": sum(
            [turn.tokens for turn in one] != [turn.tokens for turn in two] for one, two in pairs
        ),
        "prompt tokens a turn": sum(turn.prompt for turn in turns) / len(turns),
        "share cached": sum(turn.cached for turn in turns) / sum(turn.prompt for turn in turns),
        "turns that found all": sum(turn.cached >= turn.cacheable for turn in later) / len(later),
        **{figure: median(read(run) for run in runs) for figure, read in TURN_FIGURES.items()},
    }


def turn_goals(runs: Mapping[str, Sequence[TurnRun]]) -> list[Goal]:
    """Goal for the share of tokens found in the cache, of the tokens that earlier turns left
    computed.
    """
    later = [turn for run in runs.get(CACHE, ()) for turn in run.later]
    if not later:
        return []
    share = sum(turn.cached for turn in later) / sum(turn.cacheable for turn in later)
    name = "share found in the cache, of tokens that earlier turns left there"
    return [Goal(name, CACHED_GOAL, share, share >= CACHED_GOAL)]
