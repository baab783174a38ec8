"""A reference trainer without packing, ranks or chunks: float64, one sequence a forward, every
formula written out. Tests compare the learner with it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import AdamW
from transformers import LlamaForCausalLM

from paceline.trajectory import Trajectory


@dataclass
class PlainTrainer:
    """GRPO with token weights, a divergence and an entropy, over mini-batches of whole groups."""

    model: Path
    lr: float
    warmup: int
    clip_norm: float
    mini_batches: int = 1
    passes: int = 1
    clip: float = 0.2
    kl: float = 0.0
    entropy: float = 0.0
    cap: float = 0.0
    clipped: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lm = LlamaForCausalLM.from_pretrained(self.model, dtype=torch.float64)
        self.reference = LlamaForCausalLM.from_pretrained(self.model, dtype=torch.float64)
        self.adamw = AdamW(self.lm.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.updates = 0

    def logprobs(self, lm: LlamaForCausalLM, one: Trajectory) -> tuple[Tensor, Tensor]:
        """Return log-probs of a trajectory's trained tokens, and the entropies where they were
        drawn.
        """
        ids = torch.tensor([one.token_ids])
        whole = (lm(ids).logits[0] / one.temperature).log_softmax(-1)
        at = [t for t in range(1, len(one.token_ids)) if one.loss_mask[t]]
        rows = whole[[t - 1 for t in at]]
        entropy = -(rows.exp() * rows).sum(-1)
        return rows.gather(-1, ids[0, at][:, None])[:, 0], entropy

    def step(self, batch: Sequence[Trajectory]) -> None:
        """All updates of a step."""
        with torch.no_grad():
            starts = [self.logprobs(self.lm, one)[0] for one in batch]
            first = [self.logprobs(self.reference, one)[0] for one in batch]
        groups = list(dict.fromkeys(one.group_id for one in batch))
        for _ in range(self.passes):
            for number in range(self.mini_batches):
                chosen = {
                    group for i, group in enumerate(groups) if i % self.mini_batches == number
                }
                part = [i for i, one in enumerate(batch) if one.group_id in chosen]
                self._update(batch, part, starts, first)

    def _update(
        self,
        batch: Sequence[Trajectory],
        part: Sequence[int],
        starts: Sequence[Tensor],
        first: Sequence[Tensor],
    ) -> None:
        total, count = torch.zeros((), dtype=torch.float64), 0
        for i in part:
            siblings = [one.reward or 0.0 for one in batch if one.group_id == batch[i].group_id]
            spread = statistics.stdev(siblings) + 1e-6
            advantage = ((batch[i].reward or 0.0) - statistics.fmean(siblings)) / spread
            policy, entropy = self.logprobs(self.lm, batch[i])
            ratio = (policy - starts[i]).exp()
            bounded = ratio.clamp(1 - self.clip, 1 + self.clip)
            loss = -torch.minimum(ratio * advantage, bounded * advantage)
            self.clipped += (bounded * advantage < ratio * advantage).tolist()
            if self.cap:
                drawn = [
                    x
                    for x, bit in zip(batch[i].behavior_logprobs, batch[i].loss_mask, strict=True)
                    if bit
                ][-len(policy) :]
                weights = (starts[i] - torch.tensor(drawn, dtype=torch.float64)).exp()
                loss = loss * weights.clamp(max=self.cap)
            apart = first[i] - policy
            loss = loss + self.kl * (apart.exp() - apart - 1) - self.entropy * entropy
            total, count = total + loss.sum(), count + len(loss)
        self.adamw.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(self.lm.parameters(), self.clip_norm)
        self.updates += 1
        for group in self.adamw.param_groups:
            group["lr"] = self.lr * min(1.0, self.updates / self.warmup)
        self.adamw.step()
