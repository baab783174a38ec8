"""Writes docs/sglang.md: supported releases, hook points, layouts and the router."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from paceline.services.rollout_gateway.engines.sglang.hook_points import (
    HOOK_POINTS,
    RELEASES,
    HookPoint,
)
from paceline.services.rollout_gateway.engines.sglang.refused import REFUSED

LAYOUTS = """
## GPUs of one worker

A worker is one scheduler of SGLang and its tensor-parallel ranks
(`gateway.engine.sglang.tensor_parallel_size`). What the gateway says between two rounds reaches
every rank there: all prepare a version, all load it in the same round, and a token has one
policy version. What is divided otherwise inside a worker keeps that:

- **Experts** (`expert_parallel_size`, SGLang's `ep_size`): the GPUs of a worker form so many
  groups, each with its share of a model's experts; within a group each expert is divided. The
  memory of the weights is the same either way. Qwen3's models with experts
  (`Qwen3MoeForCausalLM`) are served and take versions, which `tests/sglang/test_experts.py`
  shows on two ranks. They are not trained: both trainers and the embedded engine refuse them by
  name.
- `arguments` passes on how SGLang moves tokens to experts (`moe_a2a_backend`, `deepep_mode`,
  `moe_runner_backend`) and all else that has no schedulers of its own. Of these nothing was
  tried on GPUs yet.

Layouts with schedulers that a commit would not reach in one round are refused before anything
starts:

| arguments | why | instead |
|---|---|---|
"""
ROUTER = """
## SGLang's router in front

With `gateway.engine.sglang.router = "http://HOST:30000"` a gateway stands in the list of an
SGLang router (`pip install sglang-router`) while it serves: it enters with its HTTP address and
the name of its model, enters again within ten seconds where the router has forgotten, and leaves
when it stops. Where the router's list has a key of its own (`--control-plane-api-keys`),
`$PACELINE_ROUTER_KEY` is it. Start the router with `--policy manual`, and let callers send
`x-smg-routing-key` with a name of their conversation: one key goes to one gateway.

What is so and stays so:

- Completions, chat and responses come through, streams too. `/v1/sessions`, `/v1/messages` and
  `/tokenize` do not: the router has no such paths. An agent with a session opens it at its
  gateway and speaks with that gateway.
- A conversation without a session key is found again at the gateway that has it: with another
  policy than `manual`, or without the header, its turns become sessions of several gateways.
- The router writes requests anew: of a chat the fields that it does not know are gone without a
  word (`return_token_ids`, `user` and their like), and a prompt of token ids is refused. Who
  needs these speaks with a gateway directly.
- Callers' keys pass through. Give the router no `--api-key`: it would put its own key before
  that of each caller, and a request with two is refused.
- A gateway with TLS is entered as https; the router then needs its authority
  (`--ca-cert-paths`), which was not tried.
- Samples of a run (`RunTasks`), weights and commands are gRPC between the services and never
  pass the router. It balances what agents ask, no more.
- Its health checks ask `/health`: 503 takes a gateway out while no worker serves.

`tests/integration/gateway/test_sglang_router.py` runs all of this over router 0.3.2 where
`$SGLANG_ROUTER_PYTHON` has it, and the list alone where not.
"""


PROFILE = """
## A policy in int8

With `gateway.engine.sglang.profile = "int8_w8a8"` (`engine.dtype = "bfloat16"`, the extra `int8`)
the decoder layers' matrices are in int8 with a scale for each row, and activations are rounded per
token: SGLang's method `w8a8_int8`. The start policy and every version are rounded as they are
loaded, into the storages that serve, by the function that rounds for the embedded engine; sets
have the profile as their third member and keep it
([ADR 70](adr/0070-weights-are-updated-in-place-by-profile.md)). The run needs a
`policy_trainer.algorithm.correction`, as with every profile.

- On a CPU without AMX SGLang has no product of int8, and refuses. There ours is taken:
  `tests/sglang/test_profile.py` runs it, with a canary, drafts and refused versions.
- SGLang's kernels, on CUDA and on CPUs with AMX, have not been run.
- SGLang 0.5.21 has no int8 weights with activations as they are: torchao is gone from it.
- A model with experts is refused, and a drafter stays as it is.
"""


def sglang_page() -> str:
    """The page."""
    lines = [
        "# SGLang as the engine",
        "",
        "Written by `make docs` from the code.",
        *("", "## Releases", ""),
        f"SGLang {' and '.join(RELEASES)}; every other release is refused by name.",
        "`make setup-sglang` installs the first and `make test-sglang` runs the tests over it,",
        "`SGLANG=RELEASE` behind either takes another. The torch and transformers of",
        "`constraints.txt` are those that the first asks for; with these the tests have passed",
        "over each, on the CPU.",
        "",
        "The plugin takes hold of SGLang at these functions, below `sglang.srt`. A test compares",
        "their parameters with those of the installed release.",
        *("", "| function | kind | ours | its parameters |", "|---|---|---|---|"),
        *map(row, HOOK_POINTS),
        *LAYOUTS.rstrip().split("\n"),
        *refusals(),
        *PROFILE.rstrip().split("\n"),
        *ROUTER.rstrip().split("\n"),
    ]
    return "\n".join(lines) + "\n"


def row(point: HookPoint) -> str:
    """A line of the table of hook points."""
    told = [f"`{point.parameters}`" if point.parameters else "none"]
    told += [f"from {release} on `{other}`" for release, other in point.moved.items()]
    return f"| `{point.target}` | {point.kind} | `{point.hook}` | {'; '.join(told)} |"


def refusals() -> Iterator[str]:
    """Lines of the table of arguments that a worker cannot have."""
    for refusal, found in groupby(REFUSED, REFUSED.__getitem__):
        yield f"| {', '.join(f'`{name}`' for name in found)} | {refusal.why} | {refusal.instead} |"
