"""Writes what drafts bring on many GPUs, a part of docs/scale.md, by paceline.local.draft_plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from paceline.local.draft_plan import MEASURED, RECOVERY_STEPS, DraftPlan
from paceline.local.scale_plan import GPUS, MODELS, ScalePlan

REQUESTS = (1, 16, 64, 256)

WORDS = """
## Drafts, and a drafter that learns in idle time

What co-training would bring where weights are read from memory, which a core with 64 rows cannot
show: the demo's acceptance lengths, put into the sums above. That another model's answers can be
foreseen as well is assumed, not known.

- A chain of K drafts, each right in a share `a` where those before are, gives E = 1 + a + ... + a^K
  tokens a round. `a` follows from the demo's measured E.
- One draft: a dense layer of the policy's shape, the 2 hidden x hidden that join a state and a
  token, and the head; read once, or multiplied with every request, whatever is longer. A round
  verifies K + 1 tokens of each request. Speed is E times a round without drafts over K drafts and a
  round with them, at the best K of those that were measured.
- Rollout: the longest response alone, or full batches, each at its speed. Step: that and the policy
  step in turn, on the same GPUs.
- Idle: what a worker's share in full batches leaves of the co-trained rollout. An optimiser step of
  the drafter: 6 operations a token for each weight that it learns, 4 for each of the head, and
  Muon's iterations, in batches of 7.4 tokens for each hidden unit.
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
    yield from ("", "Tokens/s of a worker, over one without drafts, by its requests at once:", "")
    columns = [f"{arm}, {requests}" for requests in REQUESTS for arm in MEASURED]
    yield from table(("model", *columns), map(_speeds, plans))
    yield from ("", f"Whole steps on {GPUS[-1]:,} GPUs:", "")
    yield from table(("model", *STEP), map(_step, plans))
    yield f"""
`back`: RL steps until as many optimiser steps have been made, {RECOVERY_STEPS}, as the demo's
drafter needed to be back at 95% of its acceptance when the tasks changed. `products`: their share
of an optimiser step, the rest of which is Muon's."""


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
