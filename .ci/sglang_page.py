"""Writes docs/sglang.md: the releases that are driven, the hook points, a run's memory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from paceline.cli.plan import parse_gpus, plan_run
from paceline.services.rollout_gateway.engines.sglang.hook_points import (
    HOOK_POINTS,
    RELEASES,
    HookPoint,
)

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


def sglang_page() -> str:
    """The page; the plan is what the command of the example's head prints."""
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
        *("", "## Memory of a run on eight GPUs", ""),
        f"`{EXAMPLE}` with Qwen2.5-7B on GPUs of 80 GiB. A turn is everything that a service needs",
        "while it computes, with what the others keep on the same GPU meanwhile: with",
        "`memory_saver` the engine keeps nothing, and the drafter trainer moves to the CPU.",
        "Activations and logits are those of the longest trajectory, computed from the model's",
        "shape; none of these figures was measured on a GPU yet.",
        "",
        "<!-- not run: it needs the model's directory; .ci/docs computes these lines -->",
        "```console",
        f"$ paceline plan --config {EXAMPLE} --gpus {GPUS}",
        *plan_lines(),
        "```",
    ]
    return "\n".join(lines) + "\n"


def row(point: HookPoint) -> str:
    """A line of the table of hook points."""
    told = [f"`{point.parameters}`" if point.parameters else "none"]
    told += [f"from {release} on `{other}`" for release, other in point.moved.items()]
    return f"| `{point.target}` | {point.kind} | `{point.hook}` | {'; '.join(told)} |"


def plan_lines() -> Iterator[str]:
    """What `paceline plan` prints; Qwen's config.json stands in a folder of its own here."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN), encoding="utf-8")
        plan = plan_run([Path(EXAMPLE)], [f"gateway.model={folder}"], parse_gpus(GPUS))
    yield from plan.lines
