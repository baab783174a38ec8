"""What both sides train: a batch of the demo's lengths, and models of two kinds of heads."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from benchmarks.demo_runs import demo_folder
from benchmarks.simulation.lengths import Recorded
from paceline.trajectory import BranchKey, Trajectory, VersionSpan

SPEC_VARIABLE = "PACELINE_BENCH_POLICY"
"""What a side is to do, as JSON."""
PROMPT = 7
"""Tokens of the demo's prompts, about."""
WIDE_VOCABULARY = 152_064
"""Of Qwen2.5: logits of one token are 608 kB in fp32."""


@dataclass(frozen=True, slots=True)
class Work:
    """A batch of `groups` groups of 8, of which `still` have no variance."""

    groups: int
    still: int
    vocabulary: int
    longest: int = 1 << 30

    def trajectories(self) -> list[Trajectory]:
        """The same at every call."""
        draw, lengths, made = random.Random(7), Recorded.of_demo(), []
        for group in range(self.groups):
            for sample, tokens in enumerate(lengths.of_group(group, 8)):
                generated = min(tokens, self.longest)
                right = float(group < self.still or draw.random() < 0.5)
                made.append(self._trajectory(group, sample, generated, right, draw))
        return made

    def _trajectory(
        self, group: int, sample: int, generated: int, reward: float, draw: random.Random
    ) -> Trajectory:
        length = PROMPT + generated
        return Trajectory(
            key=BranchKey("bench", f"{group}.{sample}"),
            step=0,
            task_id=str(group),
            group_id=str(group),
            group_size=8,
            task_index=group,
            sample_index=sample,
            token_ids=tuple(draw.randrange(self.vocabulary) for _ in range(length)),
            loss_mask=(0,) * PROMPT + (1,) * generated,
            behavior_logprobs=(0.0,) * PROMPT + (-1.0,) * generated,
            version_spans=(VersionSpan(PROMPT, length, 0),),
            reward=reward,
            seed=0,
            temperature=1.0,
        )


def demo_model() -> Path:
    """The demo's start policy. Raises NotFound outside a checkout."""
    return demo_folder() / "policy_start"


def wide_model(folder: Path) -> Path:
    """A small decoder with a head of 152k, made in the folder."""
    import torch  # the bench itself needs none
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WIDE_VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
