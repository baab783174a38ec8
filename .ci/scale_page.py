"""Writes docs/scale.md: what 8, 64 and 1,024 GPUs ask for, by paceline.local.scale_plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from draft_page import drafts, table

from paceline.local.memory_plan import parameters
from paceline.local.scale_plan import GPUS, MODELS, Hardware, ScalePlan, StepWork, fewest_gpus

GB = 1e9
Cell = Callable[[ScalePlan], str]

STANDING = """
# At scale

Written by `make docs` from `scale_plan.py`, `draft_plan.py` and `push_tree.py` of
`libs/paceline/local`. The page computes memory, bytes and seconds of runs with 8, 64 and 1,024
GPUs, for policies of 7B, 32B and 235B-A22B (235 billion weights, 22 billion active per token).

## Origin of the figures

- Run: whole runs on one machine with 2 cores or one GPU ([benchmarks](benchmarks.md)), and on Ray
  clusters with several nodes on one machine. No run had a second machine, a second GPU or a policy
  of billions of weights.
- Run with simulated events: the coordinator with 8 to 4,096 slots. `paceline bench scale` measures
  the CPU time and bytes of its real machine, records and journal
  ([figures](benchmarks.md#slots-and-hosts-paceline-bench-scale)).
- Simulated: step times, idle time and the drafter's use of it, for 8 to 4,096 slots on 1 to 512
  hosts under every schedule. Seconds are virtual, with published costs for 8 GPUs or assumed costs.
- Computed: a push to many hosts, and every figure on this page. The arithmetic of the push is
  compared with sends one by one in a test. Ranks of the trainer send their rows to one
  gateway; hosts of engine workers that do not share its spool copy from it by such a tree.
- Computed only: 235B-A22B. SGLang serves mixtures of experts, but the trainers do not train them.

Bytes are exact except for norms, biases and routers. Memory is the sum of `paceline plan`, without
fragmentation. Seconds are lower bounds: they assume no messages, no imbalance, and no traffic
between the GPUs of a worker or between ranks.

## Formulas

`P` is the number of a model's weights, `A` the number of weights active per token: embedding, head,
and in each layer hidden x (2 x heads x head size + 2 x kv heads x head size + 3 x intermediate). A
mixture has `E` experts, of which a token uses `k`. Its intermediate size counts `E` experts in `P`
and `k` in `A`. A round of `b` requests reads E (1 - (1 - k / E)^b) experts, for an even choice.

- Push: 2 P bytes, in bfloat16. "A hundredth changed" is a delta
  ([measured](benchmarks.md#weights-and-hidden-rows) on small models).
- Checkpoint: 12 P bytes, weights and two moments in float32.
- Policy, per GPU: 16 P / GPUs bytes for weights, gradients and moments in float32. Gathered are two
  layers, embedding and head in bfloat16, and the gradients of one layer, embedding and head in
  float32. Activations are the inputs of all layers and the values for the backward of one layer, in
  bfloat16, for a row of the longest trajectory. `paceline plan` computes the same with
  `reshard_after_forward`, `recompute_activations` and `compute_dtype = "bfloat16"`.
- Engine, per GPU: 2 P / GPUs of a worker. Keys and values take the rest of its share. A token needs
  4 x layers x head size bytes for each kv head on that GPU (at least one).
- Trajectories: 9 bytes per token for id, mask and log-prob, prompts included.
- Hidden rows: 2 bytes x 3 layers x hidden per token, if all are captured. Rows above the byte
  budget of the features' Redis are dropped and counted.
- Round: the longer of two times. Reading: bytes of weights, keys and values over the memory
  bandwidth. Computing: 2 A x requests over the operations per second.
- Tail: the longest response alone on its worker, one token per round. Full batches: a worker's
  share in rounds with as many requests as fit. A rollout takes at least the longer of both.
- Policy step: 8 A operations per token, because activations are computed twice.
- One sender: (hosts - 1) x bytes / bandwidth. Tree of `a`: a host sends each chunk of 4 MiB, when
  it is there, to its `a` children in turn: (chunks - 1) x a turns, and the last chunk's way down.
"""


def scale_page() -> str:
    """The page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield STANDING.strip()
    yield from _assumed(Hardware(), StepWork())
    yield from _models()
    yield from _section(
        "Memory of a GPU, GB", "Engine and policy take turns on all GPUs of a run.", MEMORY
    )
    yield from _section(
        "Bytes of a step, GB", "Versions, checkpoints and the content of Redis.", BYTES
    )
    yield from _section(
        "Seconds of a step, at best",
        "Work grows with the GPUs, so rollouts and policy step keep their time. The push grows.",
        SECONDS,
    )
    yield from drafts()


def _assumed(gpu: Hardware, work: StepWork) -> Iterator[str]:
    yield from ("", "Assumed:", "")
    yield f"- A GPU of {gpu.memory >> 30} GiB (H100 SXM); the engine takes {gpu.pool:.0%} of it."
    yield f"- {gpu.flops / 1e12:.0f} TFLOPS in bfloat16, with a utilisation of {gpu.computed:.0%}."
    yield f"- {gpu.read_bytes_s / 1e12:.2f} TB/s of memory, with a utilisation of {gpu.read:.0%}."
    yield "- Hosts of 8 GPUs with 100 Gbit/s in each direction."
    yield f"- {work.samples} samples per GPU and step: prompts of {work.prompt} tokens,"
    yield f"  responses of {work.response:,} tokens in the mean and {work.longest:,} at most."


def _models() -> Iterator[str]:
    yield from ("", "## Models", "")
    rows = [
        (
            one.name,
            f"{parameters(one.stored) / GB:.2f}",
            f"{parameters(one.active) / GB:.2f}",
            f"{one.used} of {one.experts}" if one.experts > 1 else "dense",
            str(one.tensor_parallel),
            str(fewest_gpus(one)),
        )
        for one in MODELS
    ]
    names = (
        "weights, 10^9",
        "active per token, 10^9",
        "experts",
        "GPUs of a worker",
        "fewest GPUs",
    )
    yield from table(("model", *names), rows)
    yield "\n`fewest GPUs`: the smallest power of two with enough memory for the policy's turn."


def _section(title: str, words: str, columns: Mapping[str, Cell]) -> Iterator[str]:
    yield from ("", f"## {title}", "", words, "")
    plans = [ScalePlan(model, gpus) for model in MODELS for gpus in GPUS]
    rows = [
        (plan.model.name, f"{plan.gpus:,}", *(cell(plan) for cell in columns.values()))
        for plan in plans
    ]
    yield from table(("model", "GPUs", *columns), rows)


def _gb(size: float) -> str:
    return f"{size / GB:,.1f}"


def _part(*names: str) -> Cell:
    return lambda plan: _gb(sum(plan.policy.parts[name] for name in names))


def _engine(name: str) -> Cell:
    return lambda plan: _gb(plan.engine.parts[name])


MEMORY: dict[str, Cell] = {
    "engine: weights": _engine("weights"),
    "keys and values": _engine("keys and values"),
    "tokens that fit a worker": lambda plan: f"{plan.cached_tokens:,}",
    "policy: weights, gradients, moments": _part("weights", "gradients", "optimizer"),
    "gathered": _part("gathered"),
    "activations, logits": _part("activations", "logits"),
    "policy's turn": lambda plan: _gb(plan.policy.total),
    "fits 80 GiB": lambda plan: "yes" if plan.fits else "no",
}
BYTES: dict[str, Cell] = {
    "push": lambda plan: _gb(plan.push_bytes),
    "a hundredth changed": lambda plan: f"{plan.push_bytes / 100 / GB:.2f}",
    "checkpoint": lambda plan: _gb(plan.checkpoint_bytes),
    "per GPU": lambda plan: f"{plan.checkpoint_bytes / plan.gpus / GB:.2f}",
    "trajectories": lambda plan: f"{plan.trajectory_bytes / GB:.2f}",
    "hidden rows of all tokens": lambda plan: f"{plan.feature_bytes / GB:,.0f}",
}
SECONDS: dict[str, Cell] = {
    "tail": lambda plan: f"{plan.tail_s:.0f}",
    "full batches": lambda plan: f"{plan.busy_s:.0f}",
    "concurrent requests per worker": lambda plan: str(plan.requests),
    "policy step": lambda plan: f"{plan.train_s:.0f}" if plan.fits else "does not fit",
    "push, one sender": lambda plan: f"{plan.direct_s:,.1f}",
    **{
        f"tree of {arity}": (lambda plan, arity=arity: f"{plan.tree_s(arity):.1f}")
        for arity in (1, 2, 4)
    },
}
