"""Prefix reuse between the turns of agents: growing dialogues, each in a session of a gateway with
embedded engines.

Two gateways take turns at the same dialogues: as it is, and with prefix_slots=0, which computes
every prompt anew. Drafts are off and end tokens ignored, so that both do the same work. Owns the
dialogues and their runs, not the tables.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.demo_runs import say
from benchmarks.gateway import fronts as fronts
from benchmarks.gateway.sessions import open_sessions
from benchmarks.sglang import demo_folder
from paceline.errors import InternalError, InvalidInput

CACHE, NO_CACHE = "as it is", "prefix_slots=0"
ARMS: Mapping[str, tuple[str, ...]] = {CACHE: (), NO_CACHE: ("engine.embedded.prefix_slots=0",)}
WORKERS = 2
RESPONSE_TOKENS = 48
"""Mean of a turn; a turn's own number is a half to one and a half of it, and so is that of its new
tokens.
"""

LEAST_TOKENS = 128
"""Mean new tokens of a turn: even a short first turn is long enough for the engine to keep
(prefix_tokens).
"""

MOST_POSITIONS = 1 << 14
WARM_TURNS = 2
FIRST_ORDINARY_ID = 3  # of the demo's tokenizer, behind its special tokens
RUN_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """What the options ask for; `tokens` is the mean of a turn's new prompt tokens.

    Raises InvalidInput.
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
        """Tokens of the longest dialogue that can be drawn."""
        return self.turns * (_most(self.tokens) + _most(RESPONSE_TOKENS))


@dataclass(frozen=True, slots=True)
class Part:
    """What one turn adds: new prompt tokens, and how many tokens the model says."""

    new: tuple[int, ...]
    response: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One answered request.

    `cacheable`: its prompt's tokens that the turn before has left computed.
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
    dialogues: tuple[tuple[Turn, ...], ...]

    @property
    def turns(self) -> list[Turn]:
        """Of all dialogues."""
        return [turn for dialogue in self.dialogues for turn in dialogue]

    @property
    def later(self) -> list[Turn]:
        """Those with a turn before them."""
        return [turn for dialogue in self.dialogues for turn in dialogue[1:]]

    @property
    def rate(self) -> float:
        """Response tokens per second."""
        return sum(len(turn.tokens) for turn in self.turns) / self.seconds


async def measure_turns(plan: TurnPlan, folder: Path) -> dict[str, list[TurnRun]]:
    """Runs by arm, one per repeat; runs of the same number have the same seeds.

    Raises as gateways and turns do.
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
    """The demo's trained policy with room for so many positions.

    It was trained at fewer: what it says beyond means nothing, but costs what it would cost any
    model of its size.
    """
    shutil.copytree(demo_folder() / "policy_trained", folder)
    path = folder / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "max_position_embeddings": positions})
    )
    return folder


def _parts(plan: TurnPlan, seed: str, vocabulary: int) -> list[Part]:
    """A dialogue whose tokens no other seed begins with."""
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


async def _dialogue(client: httpx.AsyncClient, key: str, parts: Sequence[Part]) -> tuple[Turn, ...]:
    """All turns of one session, each as soon as the one before has ended."""
    known: list[int] = []
    turns: list[Turn] = []
    for number, part in enumerate(parts):
        # The last token of a response was drawn but never read by the model: nothing is computed
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
) -> Turn:
    """One streamed completion. Raises InternalError unless it has all its tokens."""
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
    return Turn(
        len(prompt),
        cacheable,
        usage["prompt_tokens_details"]["cached_tokens"],
        first_s,
        tuple(tokens),
    )


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each event. Raises InternalError for one that tells of an error."""
    async for line in answer.aiter_lines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise InternalError("a turn failed", seen=str(event["error"])[:300])
        yield event
