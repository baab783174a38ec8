"""Makes the traces of the bandit bench: `python -m benchmarks.bandit.make_traces [FOLDER]`.

The CPU costs are the embedded engine's, measured on one core with the demo's policy. The GPU-like
costs follow a roofline. Reading the weights costs the same for few tokens; from there on each
verified token adds cost, so that speculation loses in large batches. No bandit was tuned on the
families `mixed` and `wandering`.

The recorded family decodes without speculation. Before each round every speculator makes its
longest draft, for all rows. The drafts are compared with the response afterwards, so that a round
of any chain arm can be replayed from any token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.bandit.world import FOLDER, Drafter, Step, Trace
from benchmarks.demo_runs import demo_folder
from paceline.models.sampling import DrawParams
from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.embedded.speculative import DraftPart
from paceline.services.rollout_gateway.engines.embedded.verify import Nodes
from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.speculators.base import DraftBatch, DraftShape
from paceline.tasks.file import read_tasks

SEED = 20261121
LIMIT = 512
SIZES = (1, 4, 8, 32, 64)
CPU = {
    "off": dict(zip(SIZES, (1.97, 3.3, 4.2, 8.1, 12.7), strict=True)),
    "eagle:3_1_4": dict(zip(SIZES, (4.6, 6.9, 8.1, 17.0, 30.3), strict=True)),
    "eagle:5_1_6": dict(zip(SIZES, (5.4, 8.4, 9.9, 22.2, 45.0), strict=True)),
    "eagle:7_1_8": dict(zip(SIZES, (5.8, 8.8, 12.2, 27.5, 62.0), strict=True)),
    "ngram:4_1_5": dict(zip(SIZES, (3.1, 4.5, 7.1, 16.4, 30.0), strict=True)),
}
GOOD = (0.90, 0.85, 0.80, 0.76, 0.72, 0.68, 0.65)
FAIR = (0.72, 0.62, 0.56, 0.52, 0.50, 0.48, 0.46)
NGRAM = Drafter(positions=(0.25, 0.45, 0.5, 0.5), spread=0.5)


def gpu_costs() -> dict[str, dict[int, float]]:
    """12 ms for the weights, 0.05 ms a row, 0.6 ms a draft pass, 0.25 ms a verified draft."""
    steps = {
        "off": (0, 0),
        "eagle:3_1_4": (3, 3),
        "eagle:5_1_6": (5, 5),
        "eagle:7_1_8": (7, 7),
        "ngram:4_1_5": (4, 0),
    }
    return {
        arm: {size: 12 + 0.05 * size + 0.6 * passes + 0.25 * size * nodes for size in (1, 64)}
        for arm, (nodes, passes) in steps.items()
    }


def lengths(
    source: np.random.Generator, count: int, median: float, sigma: float
) -> tuple[int, ...]:
    """Long-tailed (log-normal) response lengths."""
    drawn = median * np.exp(sigma * source.standard_normal(count))
    return tuple(int(one) for one in np.clip(drawn, 4, LIMIT))


def scaled(positions: Sequence[float], quality: float) -> Drafter:
    """A drafter with the given chances times `quality`."""
    return Drafter(positions=tuple(round(quality * one, 4) for one in positions), spread=0.4)


def pair(eagle: Drafter) -> dict[str, Drafter]:
    """An EAGLE drafter beside the usual n-grams."""
    return {"eagle": eagle, "ngram": NGRAM}


def trace(
    name: str, costs: dict[str, dict[int, float]], max_batch: int, steps: Sequence[Step], seed: int
) -> Trace:
    """Makes a trace; its family is the beginning of its name."""
    family = name.partition("-")[0]
    return Trace(
        name=name,
        family=family,
        seed=seed,
        max_batch=max_batch,
        limit=LIMIT,
        costs_ms=costs,
        steps=tuple(steps),
    )


def stationary(source: np.random.Generator) -> list[Trace]:
    """Nothing changes: a queue, then its end."""
    fair = pair(scaled(FAIR, 1.0))
    return [
        trace(
            "stationary-cpu",
            CPU,
            8,
            [Step(lengths=lengths(source, 300, 90, 0.5), drafters=fair)],
            1,
        ),
        trace(
            "stationary-gpu",
            gpu_costs(),
            40,
            [Step(lengths=lengths(source, 1000, 90, 0.5), drafters=fair)],
            2,
        ),
    ]


def drifting(source: np.random.Generator) -> list[Trace]:
    """A drafter that learns (commits every third step), and a drafter that falls behind."""
    learns = [
        Step(
            lengths=lengths(source, 48, 70, 0.6),
            changed="" if number % 3 else "drafter",
            drafters=pair(scaled(GOOD, 0.25 + 0.75 * (number // 3) / 9)),
        )
        for number in range(30)
    ]
    falls = [
        Step(
            lengths=lengths(source, 48, 70, 0.6),
            changed="policy",
            drafters=pair(scaled(GOOD, 1.0 - 0.7 * number / 29)),
        )
        for number in range(30)
    ]
    return [
        trace("drifting-learns", CPU, 16, learns, 3),
        trace("drifting-falls", CPU, 16, falls, 4),
    ]


def draining(source: np.random.Generator) -> list[Trace]:
    """64 long-tailed responses at once, then the next step."""
    return [
        trace(
            f"draining-{name}",
            costs,
            64,
            [
                Step(
                    lengths=lengths(source, 64, 60, 0.9),
                    changed="policy",
                    drafters=pair(scaled(GOOD, 0.9)),
                )
                for _ in range(16)
            ],
            seed,
        )
        for name, costs, seed in (("cpu", CPU, 5), ("gpu", gpu_costs(), 6))
    ]


def dead(source: np.random.Generator) -> list[Trace]:
    """A drafter without any accepted draft until a commit, and a drafter that a commit kills."""

    def steps(qualities: Sequence[float]) -> list[Step]:
        return [
            Step(
                lengths=lengths(source, 48, 70, 0.6),
                changed="drafter" if number and qualities[number - 1] != quality else "policy",
                drafters=pair(scaled(GOOD, quality)),
            )
            for number, quality in enumerate(qualities)
        ]

    return [
        trace("dead-then-alive", CPU, 8, steps([0.0] * 10 + [0.95] * 10), 7),
        trace("dead-after-commit", CPU, 8, steps([0.95] * 10 + [0.0] * 10), 8),
    ]


def shifting(source: np.random.Generator) -> list[Trace]:
    """Rounds that draft take 1.8 times as long in the middle third, as beside another process."""
    slow = {arm: 1.8 for arm in CPU if arm != "off"}
    return [
        trace(
            "shifting-costs",
            CPU,
            8,
            [
                Step(
                    lengths=lengths(source, 48, 70, 0.6),
                    drafters=pair(scaled(GOOD, 0.85)),
                    seconds=slow if 7 <= number < 14 else {},
                )
                for number in range(21)
            ],
            9,
        )
    ]


def mixed(source: np.random.Generator) -> list[Trace]:
    """Every third request is hard to draft for and three times as long."""

    def step(number: int) -> Step:
        drawn = lengths(source, 64, 50, 0.5)
        tall = tuple(
            min(3 * one, LIMIT) if index % 3 == 2 else one for index, one in enumerate(drawn)
        )
        eagle = Drafter(positions=GOOD, spread=0.3, kinds=(0.3, 0.3, -1.8))
        return Step(
            lengths=tall,
            changed="policy" if number else "",
            drafters={"eagle": eagle, "ngram": NGRAM},
        )

    return [
        trace("mixed-cpu", CPU, 32, [step(number) for number in range(16)], 10),
        trace("mixed-gpu", gpu_costs(), 64, [step(number) for number in range(16)], 11),
    ]


def growing(source: np.random.Generator) -> list[Trace]:
    """N-grams that begin with nothing to look up and are right more and more often.

    No commit announces the change to the bandit.
    """
    steps = [
        Step(
            lengths=lengths(source, 64, 50, 0.5),
            drafters={
                "eagle": scaled(GOOD, 0.9),
                "ngram": Drafter(
                    positions=tuple(round(one * number / 19, 4) for one in (0.95, 0.97, 0.97, 0.97))
                ),
            },
        )
        for number in range(20)
    ]
    return [trace(f"growing-{size}", CPU, size, steps, seed) for size, seed in ((64, 13), (2, 14))]


def wandering(source: np.random.Generator) -> list[Trace]:
    """Both drafters become better and worse at random from step to step; requests differ much."""

    def walk(count: int) -> list[float]:
        return [
            float(one) for one in 0.55 + 0.4 * np.sin(np.cumsum(source.normal(0.0, 0.5, count)))
        ]

    def steps(count: int, rows: int) -> list[Step]:
        return [
            Step(
                lengths=lengths(source, rows, 60, 0.7),
                changed="policy",
                drafters={
                    "eagle": Drafter(positions=scaled(GOOD, eagle).positions, spread=0.8),
                    "ngram": Drafter(
                        positions=scaled((0.7, 0.8, 0.8, 0.8), ngram).positions, spread=0.8
                    ),
                },
            )
            for eagle, ngram in zip(walk(count), walk(count), strict=True)
        ]

    return [
        trace("wandering-cpu", CPU, 24, steps(20, 64), 15),
        trace("wandering-gpu", gpu_costs(), 48, steps(20, 96), 16),
    ]


RECORDED_DRAFTS = {"eagle": 7, "ngram": 4}
"""Drafts recorded from every token."""
RIGHT_AT_MOST = 9


class Listener:
    """Replaces an engine's drafting: collects the drafts of all speculators and proposes none."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        # speculator, request, response token -> drafts
        self.proposals: dict[tuple[str, int, int], list[int]] = {}

    def draft(
        self, parts: Sequence[DraftPart], last: Tensor, params: DrawParams
    ) -> tuple[Nodes, list[DraftPart]]:
        """Records all drafts; returns only the root nodes."""
        engine = self._engine
        slots = engine._scheduler.ready()
        running = [engine._scheduler.running[slot] for slot in slots]
        store = engine._store
        batch = DraftBatch(
            slots,
            [one.length for one in running],
            store.token_ids,
            store.hidden,
            prompts=[len(one.request.prompt) for one in running],
        )
        for name, speculator in engine._speculation.drafters.live.items():
            speculator.catch_up(batch)
            proposed = speculator.propose(batch, DraftShape(RECORDED_DRAFTS[name])).tokens.tolist()
            for one, drafts in zip(running, proposed, strict=True):
                self.proposals[name, one.request.request_id, len(one.tokens)] = drafts
        return Nodes(last), []


def record_step(questions: Sequence[str], samples: int, limit: int, seed: int) -> Step:
    """One rollout: `samples` responses to each question at temperature 1."""
    demo = demo_folder()
    arms = ("off", "eagle:7_1_8", "ngram:4_1_5")
    settings = {
        "model_dir": str(demo / "policy_trained"),
        "drafter": str(demo / "drafter_trained"),
        "arms": arms,
    }
    engine = EmbeddedEngine(EmbeddedSpec.model_validate(settings))
    assert isinstance(engine, EmbeddedEngine)
    listener = Listener(engine)
    engine._speculation.draft = listener.draft  # type: ignore[method-assign]
    engine.force_arm("off")
    codec = TextCodec(demo / "policy_trained")
    prompts = [codec.encode(question) for question in questions for _ in range(samples)]
    for number, prompt in enumerate(prompts):
        engine.enqueue(
            Request(number, prompt, Sampling(seed=seed * 1000 + number, max_tokens=limit))
        )

    said: dict[int, tuple[int, ...]] = {}
    while engine.has_work:
        said |= {chunk.request_id: chunk.token_ids for chunk in engine.step()}
    runs = {
        name: tuple(
            "".join(
                str(right(listener.proposals[name, number, start], said[number][start:]))
                for start in range(len(said[number]))
            )
            for number in range(len(prompts))
        )
        for name in RECORDED_DRAFTS
    }
    return Step(lengths=tuple(len(said[number]) for number in range(len(prompts))), runs=runs)


def right(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """Number of leading drafts that equal the response's tokens, at most RIGHT_AT_MOST."""
    count = 0
    for draft, token in zip(drafts, tokens, strict=False):
        if draft != token:
            break
        count += 1
    return min(count, RIGHT_AT_MOST)


def recorded(source: np.random.Generator) -> list[Trace]:
    """Traces of the demo's trained policy and drafter on held-out questions: 16 questions per step,
    4 responses each.
    """
    questions = [task.prompt for task in read_tasks(demo_folder() / "tasks_heldout.jsonl")]
    steps = [
        record_step(questions[16 * number : 16 * number + 16], 4, 160, number)
        for number in range(24)
    ]
    return [trace("recorded-demo", CPU, 64, steps, 12)]


FAMILIES: tuple[Callable[[np.random.Generator], list[Trace]], ...] = (
    stationary,
    drifting,
    draining,
    dead,
    shifting,
    mixed,
    recorded,
    growing,
    wandering,
)


def main() -> None:
    """Writes one file per trace."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for number, family in enumerate(FAMILIES):
        for one in family(np.random.default_rng([SEED, number])):
            path = folder / f"{one.name}.json"
            path.write_text(one.model_dump_json(exclude_defaults=True) + "\n", encoding="utf-8")
            print(
                f"{path.name}: {sum(len(step.lengths) for step in one.steps)} responses, "
                f"{path.stat().st_size} bytes"
            )


if __name__ == "__main__":
    main()
