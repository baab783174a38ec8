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
Rollouts and learner take turns on all GPUs. A GPU must hold the service with the current turn and
the idle memory of the other services. With `memory_saver` the engine keeps nothing. The policy
keeps its shards. The drafter trains on the GPUs of finished workers while the other workers decode
stragglers.
""",
        [EXAMPLE],
        "8x80",
    ),
    (
        "Disaggregated, 8 GPUs",
        """
Four GPUs generate and four train, at the same time. Tokens are up to two versions old. The policy's
shards are twice as large, and it has its GPUs for itself. On the workers' GPUs, `memory_fraction`
may rise to the limit of the engine's turn.
""",
        [EXAMPLE, APART],
        "8x80",
    ),
    (
        "Colocated, 64 GPUs",
        """
Every GPU has a rank of the policy. Shards are an eighth as large; gathered weights and activations
are the same. All machines change turns together.
""",
        [EXAMPLE, LARGE],
        "64x80",
    ),
    (
        "Disaggregated, 64 GPUs",
        """
Two machines train and six generate.
""",
        [EXAMPLE, LARGE_APART],
        "64x80",
    ),
)
HEAD = """# Where services compute

Written by `make docs` from the code.

A slot is a GPU. `coordinator.placement` sets whether the policy trainer has its own slots:

| | `colocated` | `disaggregated` |
|---|---|---|
| slots of the policy | lent by the workers | `learner_slots` of its own |
| schedule | any; a step suspends rollouts | any; with `sync` one side always waits |
| age of tokens | 0 in `sync` | up to `max_policy_lag` |
| GPU memory | that of the largest turn | that of the larger side |
| suits | on-policy steps, few GPUs | rollouts and training that would wait for each other |

Disaggregated settings are files to add to a run's own settings. The plans below are for Qwen2.5-7B
on GPUs of 80 GiB, on one and on eight machines. They are computed from the model's shape and were
not measured on GPUs. `examples/ray/README.md` starts such runs on several machines."""
TAIL = """
`--gpus` plans for GPUs that this machine lacks. A run is refused before its start if workers and
learner need more GPUs than available, or if the largest turn does not fit."""


def placement_page() -> str:
    """The page; the plans are what the commands print."""
    lines = HEAD.split("\n")
    for title, text, files, gpus in PLACES:
        lines += ["", f"## {title}", *text.split("\n"), *plan_block(files, gpus, QWEN)]
    return "\n".join([*lines, *TAIL.split("\n")]) + "\n"
