"""Writes docs/sglang.md: the supported release, hook points, layouts and the router."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.services.rollout_gateway.engines.sglang.hook_points import HOOK_POINTS, RELEASE
from paceline.services.rollout_gateway.engines.sglang.spec import REFUSALS

LAYOUTS = """
## GPUs of one worker

A worker is one scheduler of SGLang and its tensor-parallel ranks
(`gateway.engine.sglang.tensor_parallel_size`). The gateway's commands reach every rank between the
same two rounds. All ranks prepare a version and load it in the same round, so each token has one
policy version. Two more layouts keep this property:

- **Experts** (`expert_parallel_size`, SGLang's `ep_size`). The GPUs of a worker form this number of
  groups. Each group has its share of the experts, and each expert is divided within its group. The
  memory of the weights does not change. Qwen3's models with experts (`Qwen3MoeForCausalLM`) are
  served and receive versions (`tests/sglang/test_experts.py`, two ranks). The trainers and the
  embedded engine refuse them by name.
- **Arguments.** `arguments` passes SGLang's transport of tokens to experts (`moe_a2a_backend`,
  `deepep_mode`, `moe_runner_backend`) and all other options without further schedulers. They were
  not tried on GPUs.

A commit would not reach all schedulers of other layouts in one round. Such layouts are refused
before the start:

| arguments | reason | alternative |
|---|---|---|
"""
WITHOUT_GPU = """
## Without a GPU

`make setup-sglang` adds plain torch code in place of SGLang's compiled kernels. It serves Llama,
Qwen2 and Qwen3 in float32 and bfloat16, with EAGLE, EAGLE-3 and n-grams. The code is correct and
slow. Use it for tests and trials.

A pretrained model of 135M parameters is served and drafts by three tokens (`eagle:3_1_4`). Its
greedy tokens are those of the unpatched SGLang without drafts, and the gateway receives the counts
of drafted rounds (`tests/integration/gateway/test_real_sglang.py`).
"""
ROUTER = """
## SGLang's router in front

An SGLang router (`pip install sglang-router`) balances the requests of agents over gateways:

<!-- not run: it needs sglang-router and two hosts -->
```console
$ python -m sglang_router.launch_router --policy manual --worker-urls http://HOST1:7408 http://HOST2:7408
```

Callers send `x-smg-routing-key` with the name of their conversation; the router sends each key to
one gateway.

Limits:

- The router passes completions, chat and responses, streams included. It has no paths for
  `/v1/sessions`, `/v1/messages` and `/tokenize`. An agent with a session calls its gateway.
- A conversation without a session key belongs to one gateway. With another policy than `manual`,
  or without the header, its turns become sessions of several gateways.
- The router rewrites requests. It drops unknown fields of a chat silently (`return_token_ids`,
  `user`) and refuses a prompt of token ids. Callers that need these call a gateway directly.
- Callers' keys pass through. Give the router no `--api-key`: it would add its own key, and the
  gateway refuses a request with two keys.
- The URL of a gateway with TLS begins with https. The router then needs its authority
  (`--ca-cert-paths`). This was not tried.
- Samples of a run (`RunTasks`), weights and commands use gRPC between the services. They never pass
  the router, which balances only requests of agents.
- The router's health checks use `/health`. A gateway without a serving worker returns 503.

`tests/integration/gateway/test_sglang_router.py` tests this with router 0.3.2 if
`$SGLANG_ROUTER_PYTHON` has it.
"""


PROFILE = """
## A policy in int8

The profile `gateway.engine.sglang.profile = "int8_w8a8"` needs `engine.dtype = "bfloat16"` and the
extra `int8`. It stores the decoder layers' matrices in int8 with one scale per row, and rounds
activations per token. This is SGLang's method `w8a8_int8`. The embedded engine's rounding function
rounds the start policy and every version during the load into the serving storage. Every version
set has the profile as its third member. Like every profile, it requires a
`policy_trainer.algorithm.correction`.

- On a CPU without AMX, SGLang has no int8 product. Paceline's product replaces it
  (`tests/sglang/test_profile.py`, with a canary, drafts and refused versions).
- SGLang's own kernels (CUDA, CPUs with AMX) have not been run.
- SGLang 0.5.21 has no int8 weights with unrounded activations, because it dropped torchao.
- Models with experts are refused. Drafters are not rounded.
"""


def sglang_page() -> str:
    """The page."""
    lines = [
        "# SGLang as the engine",
        "",
        "Written by `make docs` from the code.",
        *("", "## Release", ""),
        f"SGLang {RELEASE}; every other release is refused by name.",
        "`make setup-sglang` installs it and `make test-sglang` runs its tests.",
        "",
        "The plugin hooks these functions below `sglang.srt`. A test calls each hook with the",
        "parameters of the installed function.",
        *("", "| function | kind | hook |", "|---|---|---|"),
        *(f"| `{one.target}` | {one.kind} | `{one.hook}` |" for one in HOOK_POINTS),
        *LAYOUTS.rstrip().split("\n"),
        *refusals(),
        *PROFILE.rstrip().split("\n"),
        *WITHOUT_GPU.rstrip().split("\n"),
        *ROUTER.rstrip().split("\n"),
    ]
    return "\n".join(lines) + "\n"


def refusals() -> Iterator[str]:
    """Lines of the table of arguments that a worker cannot have."""
    for one in REFUSALS:
        names = ", ".join(f"`{name}`" for name in one.arguments.split())
        yield f"| {names} | {one.why} | {one.instead} |"
