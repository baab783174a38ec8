"""Writes docs/placement.md: one model placed in two ways, on one machine and on eight."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_page import EXAMPLE, QWEN, plan_block

APART = "examples/asynchronous/8gpus_apart.toml"
LARGE = "examples/sglang/64gpus.toml"
LARGE_APART = "examples/asynchronous/64gpus_apart.toml"
PLACES: Sequence[tuple[str, str, Sequence[str], str]] = (
    (
        "Colocated, 8 GPUs",
        """
Rollouts and learner take turns on all GPUs. A GPU has to hold whoever has its turn, and what the
others leave there: with `memory_saver` the engine leaves nothing, and the policy leaves its
shards. The drafter trains on the GPUs of workers that have ended their share while others decode
their stragglers.
""",
        [EXAMPLE],
        "8x80",
    ),
    (
        "Disaggregated, 8 GPUs",
        """
Four GPUs roll out and four train, at the same time; tokens are up to two versions old. The
policy's shards are twice as large, and nobody else is on its GPUs; on those of the workers
`memory_fraction` may rise as far as the engine's turn allows.
""",
        [EXAMPLE, APART],
        "8x80",
    ),
    (
        "Colocated, 64 GPUs",
        """
A rank of the policy on every GPU: its shards are an eighth; what it gathers and its activations
are the same. All machines go from one turn to the next together.
""",
        [EXAMPLE, LARGE],
        "64x80",
    ),
    (
        "Disaggregated, 64 GPUs",
        """
Two machines train and six roll out.
""",
        [EXAMPLE, LARGE_APART],
        "64x80",
    ),
)
HEAD = """# Where services compute

Written by `make docs` from the code.

A slot is a GPU. `coordinator.placement` says whether the policy trainer has slots of its own:

| | `colocated` | `disaggregated` |
|---|---|---|
| slots of the policy | those of workers, which lend them | `learner_slots` beside theirs |
| schedule | any; a step suspends rollouts | any; with `sync` one side always waits |
| age of tokens | 0 in `sync` | up to `max_policy_lag` |
| GPU memory | the largest turn | the larger of two sides |
| right where | steps have to be on-policy, or GPUs are few | GPUs would wait for a side |

Settings of the second kind are files to lay over a run's own. Qwen2.5-7B on GPUs of 80 GiB in
both ways, on one machine and on eight; what each takes is computed from the model's shape, and
nothing of it was measured on GPUs yet. `examples/ray/README.md` starts such
runs on several machines."""
TAIL = """
`--gpus` plans for GPUs that this machine does not have. A run whose workers and learner want
more GPUs than there are is refused before anything starts, and so is one whose largest turn does
not fit."""


def placement_page() -> str:
    """The page; the plans are what the commands print."""
    lines = HEAD.split("\n")
    for title, text, files, gpus in PLACES:
        lines += ["", f"## {title}", *text.split("\n"), *plan_block(files, gpus, QWEN)]
    return "\n".join([*lines, *TAIL.split("\n")]) + "\n"
