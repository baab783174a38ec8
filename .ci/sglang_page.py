"""Writes docs/sglang.md: the releases that are driven, the hook points, what of SGLang's layouts
and of its router can be used, a run's memory.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from paceline.cli.plan import parse_gpus, plan_run
from paceline.services.rollout_gateway.engines.sglang.hook_points import (
    HOOK_POINTS,
    RELEASES,
    HookPoint,
)
from paceline.services.rollout_gateway.engines.sglang.refused import REFUSED

EXAMPLE = "examples/sglang/qwen2.5-7b-8gpus.toml"
GPUS = "8x80"
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
}
"""The shape of Qwen2.5-7B."""
EXPERTS_EXAMPLE = "examples/sglang/qwen3-30b-a3b.toml"
QWEN_EXPERTS = {
    **QWEN,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
}
"""The shape of Qwen3-30B-A3B."""
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
ROUTER = """
## SGLang's router in front

With `gateway.engine.sglang.router = "http://HOST:30000"` the gateway registers at an SGLang router
(`pip install sglang-router`). It registers its HTTP address and model name, registers again within
ten seconds if the router lost them, and leaves when it stops. `$PACELINE_ROUTER_KEY` holds the
router's control-plane key, if it has one (`--control-plane-api-keys`).

Start the router with `--policy manual`. Callers send `x-smg-routing-key` with the name of their
conversation; the router sends each key to one gateway.

Limits:

- The router passes completions, chat and responses, streams included. It has no paths for
  `/v1/sessions`, `/v1/messages` and `/tokenize`. An agent with a session calls its gateway.
- A conversation without a session key belongs to one gateway. With another policy than `manual`,
  or without the header, its turns become sessions of several gateways.
- The router rewrites requests. It drops unknown fields of a chat silently (`return_token_ids`,
  `user`) and refuses a prompt of token ids. Callers that need these call a gateway directly.
- Callers' keys pass through. Give the router no `--api-key`: it would add its own key, and the
  gateway refuses a request with two keys.
- A gateway with TLS registers as https. The router then needs its authority (`--ca-cert-paths`).
  This was not tried.
- Samples of a run (`RunTasks`), weights and commands use gRPC between the services. They never pass
  the router, which balances only requests of agents.
- The router's health checks use `/health`. A gateway without a serving worker returns 503.

`tests/integration/gateway/test_sglang_router.py` tests this with router 0.3.2 if
`$SGLANG_ROUTER_PYTHON` has it; otherwise it tests only the registration.
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
    """The page; the plan is what the command of the example's head prints."""
    lines = [
        "# SGLang as the engine",
        "",
        "Written by `make docs` from the code.",
        *("", "## Releases", ""),
        f"SGLang {' and '.join(RELEASES)}; every other release is refused by name.",
        "`make setup-sglang` installs the first and `make test-sglang` runs its tests.",
        "`SGLANG=RELEASE` selects another release. `constraints.txt` pins the torch and",
        "transformers of the first release. With them, the tests passed over each release on CPU.",
        "",
        "The plugin hooks these functions below `sglang.srt`. A test compares their parameters",
        "with the installed release.",
        *("", "| function | kind | hook | its parameters |", "|---|---|---|---|"),
        *map(row, HOOK_POINTS),
        *LAYOUTS.rstrip().split("\n"),
        *refusals(),
        *PROFILE.rstrip().split("\n"),
        *ROUTER.rstrip().split("\n"),
        *("", "## Memory of a run on eight GPUs", ""),
        f"`{EXAMPLE}` with Qwen2.5-7B on GPUs of 80 GiB. A turn is the memory of the computing",
        "service plus the idle memory of the other services on the same GPU. With `memory_saver`",
        "the idle engine keeps nothing, and the idle drafter trainer moves to the CPU. Activations",
        "and logits are computed for the longest trajectory. No figure was measured on a GPU.",
        "",
        *plan_block([EXAMPLE], GPUS, QWEN),
        "",
        f"`{EXPERTS_EXAMPLE}`, a gateway over a model with experts:",
        "",
        *plan_block([EXPERTS_EXAMPLE], GPUS, QWEN_EXPERTS),
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


def plan_block(files: Sequence[str], gpus: str, shape: Mapping[str, Any]) -> Iterator[str]:
    """A console block of `paceline plan` and what it prints; the model's config.json stands in a
    folder of its own here.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        overrides = [f"gateway.model={folder}"]
        plan = plan_run([Path(one) for one in files], overrides, parse_gpus(gpus))
    yield "<!-- computed by: .ci/docs, from the model's shape -->"
    yield "```console"
    yield f"$ paceline plan {' '.join(f'--config {one}' for one in files)} --gpus {gpus}"
    yield from plan.lines
    yield "```"
