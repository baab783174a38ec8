"""What both sides train: a batch of the demo's lengths, and models of two kinds of heads."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from benchmarks.demo_runs import demo_folder
from benchmarks.simulation.lengths import Recorded
from paceline.tasks import draw_tasks, read_tasks
from paceline.trajectory import BranchKey, Trajectory, VersionSpan

SPEC_VARIABLE = "PACELINE_BENCH_POLICY"
"""What a side is to do, as JSON."""
SIBLINGS = 8
PROMPT = 7
"""Tokens of the demo's prompts, about."""
WIDE_VOCABULARY = 152_064
"""Of Qwen2.5: logits of one token are 608 kB in fp32."""


@dataclass(frozen=True, slots=True)
class Work:
    """A batch of groups of SIBLINGS, of which the first `still` have no variance."""

    samples: str  # JSON file: [[tokens of the prompt, [token ids of a sample, ...]], ...] by group
    still: int = 0

    def trajectories(self) -> list[Trajectory]:
        """The same at every call."""
        draw, made = random.Random(7), []
        for group, (prompt, samples) in enumerate(json.loads(Path(self.samples).read_text())):
            for number, token_ids in enumerate(samples):
                right = float(group < self.still or draw.random() < 0.5)
                made.append(self._trajectory(group, number, prompt, token_ids, right))
        return made

    def _trajectory(
        self, group: int, sample: int, prompt: int, token_ids: list[int], reward: float
    ) -> Trajectory:
        length = len(token_ids)
        generated = length - prompt
        return Trajectory(
            key=BranchKey("bench", f"{group}.{sample}"),
            step=0,
            task_id=str(group),
            group_id=str(group),
            group_size=8,
            task_index=group,
            sample_index=sample,
            token_ids=tuple(token_ids),
            loss_mask=(0,) * prompt + (1,) * generated,
            behavior_logprobs=(0.0,) * prompt + (-1.0,) * generated,
            version_spans=(VersionSpan(prompt, length, 0),),
            reward=reward,
            seed=0,
            temperature=1.0,
        )


def demo_samples(
    file: Path, groups: int, policy: str = "policy_start", *, longest: int = 96
) -> Path:
    """Writes what a policy of the demo says to the first tasks of a run, by transformers: `longest`
    tokens of an answer at most.
    """
    import torch
    from transformers import AutoTokenizer

    from paceline.training.shards import load_causal_lm

    model, found = demo_folder() / policy, []
    tokenizer, lm = AutoTokenizer.from_pretrained(model), load_causal_lm(model, torch.float32)
    torch.manual_seed(7)
    for task in islice(draw_tasks(read_tasks(demo_folder() / "tasks_train.jsonl"), 0), groups):
        prompt = tokenizer(task.prompt, return_tensors="pt").input_ids
        drawn = lm.generate(
            prompt.repeat(SIBLINGS, 1),
            attention_mask=torch.ones_like(prompt).repeat(SIBLINGS, 1),
            do_sample=True,
            top_k=0,
            max_new_tokens=longest,
            pad_token_id=lm.config.pad_token_id,
        )
        ends = (drawn == lm.config.eos_token_id).long()
        lengths = torch.where(ends.any(1), ends.argmax(1) + 1, drawn.shape[1]).tolist()
        samples = [one[:length] for one, length in zip(drawn.tolist(), lengths, strict=True)]
        found.append([prompt.shape[1], samples])
    file.write_text(json.dumps(found))
    return file


def random_samples(file: Path, groups: int, vocabulary: int) -> Path:
    """Writes random answers of the demo's lengths to random prompts."""
    draw, lengths, found = random.Random(7), Recorded.of_demo(), []
    for group in range(groups):
        prompt = [draw.randrange(vocabulary) for _ in range(PROMPT)]
        answers = [
            [draw.randrange(vocabulary) for _ in range(n)]
            for n in lengths.of_group(group, SIBLINGS)
        ]
        found.append([PROMPT, [prompt + answer for answer in answers]])
    file.write_text(json.dumps(found))
    return file


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
