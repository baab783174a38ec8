"""Describes a simulated fleet: its slots, its work and its costs.

The 8 GPUs serve Qwen2.5-7B on H100. One token at a time takes 6.07 ms (TLT, arXiv 2511.16665, table
2). Each running request adds 0.04 ms (decode at batch 1 and 32 in a fork of its code). A step has
64 prompts of 8 samples with at most 32,768 tokens. Lengths are log-normal, so that the last 32 of
512 requests take four fifths of the rollouts (74 to 85 % there). The policy step is compute alone
at 40 % of a GPU's peak. Rollouts are then about 85 % of a step, as in that paper. The 2 cores are
this project's demo.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.simulation.lengths import Lengths, LogNormal, Recorded


@dataclass(frozen=True, slots=True)
class Fleet:
    """Slots, work of a step and costs, in seconds. A slot holds one worker."""

    name: str
    slots: int
    learner_slots: int  # included in `slots`; only for a learner apart
    groups: int  # of a step
    samples: int  # of a group
    lengths: Lengths
    round_s: float  # of a decode round without requests
    request_s: float  # more for each request in the round
    round_tokens: float  # a request and round
    prefill_tokens_s: float  # recomputed keys and values per worker
    trained_tokens_s: float  # a slot of the learner
    push_s: float
    commit_s: float
    release_s: float  # a worker gives its memory back
    resume_s: float  # a worker takes its memory again
    activate_s: float  # model and optimiser of the drafter go to its first slots
    join_s: float  # drafter stopped while more slots join
    micro_batch_s: float  # the drafter stops only between micro-batches
    offload_s: float  # then it leaves its slots
    gate_s: float  # training after which a drafter is promoted, once an activation
    message_s: float = 0.002  # a call and its answer
    checkpoint_s: float = 1.0

    @property
    def step_samples(self) -> int:
        """Samples that a step trains."""
        return self.groups * self.samples

    def rounds(self, tokens: int) -> int:
        """Decode rounds of a response."""
        return math.ceil(tokens / self.round_tokens)

    def round_at(self, running: int) -> float:
        """Seconds of a round with `running` requests."""
        return self.round_s + self.request_s * running


def gpus() -> Fleet:
    """8 GPUs, a policy of 7 billion parameters, long answers."""
    return Fleet(
        name="8 GPUs",
        slots=8,
        learner_slots=2,
        groups=64,
        samples=8,
        lengths=LogNormal(median=900, sigma=1.2, limit=32_768, seed=15),
        round_s=0.00607,
        request_s=0.00004,
        round_tokens=1.0,
        prefill_tokens_s=25_000,
        trained_tokens_s=6_500,
        push_s=2.0,
        commit_s=0.5,
        release_s=1.0,
        resume_s=1.0,
        activate_s=3.0,
        join_s=0.3,
        micro_batch_s=0.05,
        offload_s=0.3,
        gate_s=5.0,
    )


def cores() -> Fleet:
    """The demo on 2 cores, without drafts; docs/benchmarks.md has its costs."""
    return Fleet(
        name="2 cores",
        slots=2,
        learner_slots=1,
        groups=16,
        samples=8,
        lengths=Recorded.of_demo(),
        round_s=0.0025,
        request_s=0.00016,
        round_tokens=1.0,
        prefill_tokens_s=20_000,
        trained_tokens_s=4_500,
        push_s=0.1,
        commit_s=0.02,
        release_s=0.002,
        resume_s=0.002,
        activate_s=0.075,
        join_s=0.005,
        micro_batch_s=0.0144,
        offload_s=0.002,
        gate_s=0.3,
    )
