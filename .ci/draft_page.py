"""Writes what drafts bring on many GPUs, a part of docs/scale.md, by paceline.local.draft_plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from paceline.local.draft_plan import MEASURED, RECOVERY_STEPS, DraftPlan
from paceline.local.scale_plan import GPUS, MODELS, ScalePlan

REQUESTS = (1, 16, 64, 256)

WORDS = """
## Drafts, and a drafter that learns in idle time

This section estimates the gain of co-training on GPUs, where reading the weights dominates a round.
It puts the demo's acceptance lengths into the formulas above. It assumes, without evidence, that a
drafter predicts a large model equally well.

- Acceptance: a chain of K drafts gives E = 1 + a + ... + a^K tokens per round. `a` is the
  acceptance of a draft after accepted drafts, derived from the demo's measured E.
- One draft: a dense layer of the policy's shape, the 2 hidden x hidden weights that join a state
  and a token, and the head. It takes the longer of one read and one product per request.
- Speed: a round verifies K + 1 tokens per request. The speed is E times a round without drafts,
  over K drafts and a round with drafts, at the best measured K.
- Rollout: the longer of the tail and the full batches, each at its speed. Step: the rollout and the
  policy step in turn, on the same GPUs.
- Idle: the co-trained rollout less a worker's full batches. An optimiser step of the drafter takes
  6 operations per token and trained weight, 4 per weight of the head, and Muon's iterations, with
  7.4 tokens per hidden unit in a batch.
"""


def drafts() -> Iterator[str]:
    """The section."""
    yield from ("", WORDS.strip(), "", "Measured on the demo:", "")
    names = ("drafts of", "K", "E", "a")
    yield from table(
        names,
        (
            (name, str(one.drafts), f"{one.length:.2f}", f"{one.right:.3f}")
            for name, one in MEASURED.items()
        ),
    )
    plans = [DraftPlan(ScalePlan(model, GPUS[-1])) for model in MODELS]
    yield from (
        "",
        "Tokens/s of a worker over a worker without drafts, by concurrent requests:",
        "",
    )
    columns = [f"{arm}, {requests}" for requests in REQUESTS for arm in MEASURED]
    yield from table(("model", *columns), map(_speeds, plans))
    yield from ("", f"Whole steps on {GPUS[-1]:,} GPUs:", "")
    yield from table(("model", *STEP), map(_step, plans))
    yield f"""
`back`: RL steps until {RECOVERY_STEPS} optimiser steps. The demo's drafter needed as many after a
change of tasks to reach 95% of its former acceptance. `products`: their share of an optimiser step;
Muon takes the rest."""


STEP = (
    "rollout, co-trained over none",
    "over n-grams",
    "over frozen",
    "step, co-trained over none",
    "idle, s of a worker",
    "tokens of an optimiser step",
    "optimiser steps",
    "back",
    "products",
)


def _speeds(plan: DraftPlan) -> Sequence[str]:
    work = plan.scale.work
    context = work.prompt + work.response / 2
    speeds = [
        f"{plan.speed(arm, requests, context):.2f}" for requests in REQUESTS for arm in MEASURED
    ]
    return (plan.scale.model.name, *speeds)


def _step(plan: DraftPlan) -> Sequence[str]:
    ours = plan.rollout_s("co-trained")
    over = [f"{plan.rollout_s(arm) / ours:.2f}" for arm in (None, "n-grams", "frozen")]
    return (
        plan.scale.model.name,
        *over,
        f"{plan.step_s() / plan.step_s('co-trained'):.2f}",
        f"{plan.idle_s:.0f}",
        f"{plan.slot_tokens:,}",
        f"{plan.optimiser_steps:.0f}",
        str(math.ceil(RECOVERY_STEPS / plan.optimiser_steps)),
        f"{plan.slot_share:.0%}",
    )


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """In Markdown."""
    yield f"| {' | '.join(names)} |"
    yield "|" + "---|" * len(names)
    for row in rows:
        yield f"| {' | '.join(row)} |"
