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
`libs/paceline/local`: what a run of 8, 64 or 1,024 GPUs keeps, moves and waits for, with policies
of 7B, 32B and 235B-A22B (of 235 billion weights a token is multiplied with 22).

## What was run, what simulated, what only computed

- Run: whole runs on one machine, of 2 cores and of one GPU ([benchmarks](benchmarks.md)), and over
  nodes of a Ray cluster that were processes of one machine. None had a second machine, a second GPU
  or a policy of billions of weights.
- Run, with simulated events: the coordinator of 8 to 4,096 slots. Its machine, records and journal
  entries are the product's own, and their CPU time and bytes are measured by `paceline bench scale`
  ([figures](benchmarks.md#slots-and-hosts-paceline-bench-scale)).
- Simulated: how long the steps of 8 to 4,096 slots on 1 to 512 hosts are under every schedule, what
  is idle, and what a drafter makes of it. Seconds are virtual, of costs that are published for
  8 GPUs or assumed.
- Computed: a push to many hosts, and every figure on this page. The arithmetic of the push is
  compared with sends one by one in a test. Ranks of the trainer send their rows to one
  gateway.
- Computed and nothing else: 235B-A22B. Mixtures of experts are served by SGLang, and not trained.

Bytes are exact but for norms, biases and routers. Memory is the sum that `paceline plan` makes,
without gaps of an allocator. Seconds are what the hardware allows at best: no message, no
imbalance, no traffic between the GPUs of a worker or between ranks. They are to be read as "not
less than".

## Formulas

`P` are a model's weights, `A` those that a token is multiplied with: embedding, head, and in each
layer hidden x (2 x heads x head size + 2 x kv heads x head size + 3 x intermediate). Of a mixture
of `E` experts, of which a token uses `k`, intermediate is that of `E` experts in `P` and of `k` in
`A`; a round of `b` requests reads E (1 - (1 - k / E)^b) of them, were the choice even.

- Push: 2 P bytes, in bfloat16. A hundredth changed: a delta where few weights moved
  ([measured](benchmarks.md#weights-paceline-bench-weights-repeats-5) on small models).
- Checkpoint: 12 P, weights and two moments in float32.
- Policy, a GPU: 16 P / GPUs for weights, gradients and moments in float32; gathered are two layers,
  embedding and head in bfloat16 and the gradients of one layer and of these ends in float32; of
  activations the inputs of all layers and what the backward of one reads, in bfloat16, of a row as
  long as the longest trajectory. So `paceline plan` has it with `reshard_after_forward`,
  `recompute_activations` and `compute_dtype = "bfloat16"`.
- Engine, a GPU: 2 P / GPUs of a worker; keys and values take the rest of its share. A token needs
  4 x layers x head size bytes for each of its kv heads on that GPU, of which there is one at least.
- Trajectories: 9 bytes a token for id, mask and log-prob, prompts included.
- Hidden rows: 2 bytes x 3 layers x hidden a token, were all captured. The Redis of the features
  keeps to its byte budget, and what finds no room is dropped and counted.
- Round: the bytes of the weights it reads and of all its keys and values over the memory's
  bandwidth, or 2 A x requests over the operations a second, whatever is longer.
- Tail: the longest response alone on its worker, a token a round. Full batches: a worker's share in
  rounds of as many requests as it has room for. A rollout takes at least the longer of both.
- Policy step: 8 A operations a token, since activations are computed twice.
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
        "Bytes of a step, GB", "Versions and checkpoints, and what goes through Redis.", BYTES
    )
    yield from _section(
        "Seconds of a step, at best",
        "Work grows with the GPUs, so rollouts and policy step stay as long; the push does not.",
        SECONDS,
    )
    yield from drafts()


def _assumed(gpu: Hardware, work: StepWork) -> Iterator[str]:
    yield from ("", "Assumed:", "")
    yield f"- A GPU of {gpu.memory >> 30} GiB (H100 SXM); the engine takes {gpu.pool:.0%} of it."
    yield f"- {gpu.flops / 1e12:.0f} TFLOPS in bfloat16, of which {gpu.computed:.0%} are reached."
    yield f"- {gpu.read_bytes_s / 1e12:.2f} TB/s of its memory, of which {gpu.read:.0%} are."
    yield "- Hosts of 8 GPUs that send and receive 100 Gbit/s."
    yield f"- {work.samples} samples a GPU and step: prompts of {work.prompt} tokens,"
    yield f"  responses of {work.response:,} on the mean and {work.longest:,} at most."


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
    names = ("weights, 10^9", "of a token, 10^9", "experts", "GPUs of a worker", "fewest GPUs")
    yield from table(("model", *names), rows)
    yield "\n`fewest GPUs`: the smallest power of two on which the policy's turn fits."


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
    "tokens that a worker has room for": lambda plan: f"{plan.cached_tokens:,}",
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
    "of it a GPU": lambda plan: f"{plan.checkpoint_bytes / plan.gpus / GB:.2f}",
    "trajectories": lambda plan: f"{plan.trajectory_bytes / GB:.2f}",
    "hidden rows of all tokens": lambda plan: f"{plan.feature_bytes / GB:,.0f}",
}
SECONDS: dict[str, Cell] = {
    "tail": lambda plan: f"{plan.tail_s:.0f}",
    "full batches": lambda plan: f"{plan.busy_s:.0f}",
    "requests of a worker at once": lambda plan: str(plan.requests),
    "policy step": lambda plan: f"{plan.train_s:.0f}" if plan.fits else "does not fit",
    "push, one sender": lambda plan: f"{plan.direct_s:,.1f}",
    **{
        f"tree of {arity}": (lambda plan, arity=arity: f"{plan.tree_s(arity):.1f}")
        for arity in (1, 2, 4)
    },
}
