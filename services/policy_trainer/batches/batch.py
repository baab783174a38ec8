"""Lays trajectories out as tensors: a batch, and its packed micro-batches.

Shape letters: B trajectories, N tokens of all trajectories, R rows, W row width, M trained tokens
of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from paceline.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Trajectories that carry gradient, laid end to end in the order of the sorted batch."""

    lengths: Int[Tensor, " B"]  # tokens of each trajectory, at least 2
    advantages: Float[Tensor, " B"]
    temperatures: Float[Tensor, " B"]  # 0 (greedy) stands as 1
    token_ids: Int[Tensor, " N"]
    # the first token of a trajectory is never trained: nothing predicts it
    loss_mask: Bool[Tensor, " N"]
    behavior_logprobs: Float[Tensor, " N"]

    @property
    def trained_tokens(self) -> int:
        """Tokens with loss, over all trajectories."""
        return int(self.loss_mask.sum().item())


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed rows and their trained tokens.

    A padding token has position 0, a document of its own.
    """

    input_ids: Int[Tensor, "R W"]
    position_ids: Int[Tensor, "R W"]
    predict_at: Int[Tensor, " M"]  # flat index into R * W of the token before each trained token
    targets: Int[Tensor, " M"]
    advantages: Float[Tensor, " M"]
    behavior_logprobs: Float[Tensor, " M"]
    temperatures: Float[Tensor, " M"]


def make_batch(trajectories: Sequence[Trajectory], advantages: Float[Tensor, " B"]) -> TrainBatch:
    """Tensors of the trajectories whose advantage is not 0; the others carry no gradient and cost
    no forward.
    """
    kept = [
        (t, a)
        for t, a in zip(trajectories, advantages.tolist(), strict=True)
        if a != 0.0 and any(t.loss_mask[1:])
    ]
    return TrainBatch(
        lengths=torch.tensor([len(t.token_ids) for t, _ in kept], dtype=torch.int64),
        advantages=torch.tensor([a for _, a in kept], dtype=torch.float32),
        temperatures=torch.tensor([t.temperature or 1.0 for t, _ in kept], dtype=torch.float32),
        token_ids=torch.tensor([i for t, _ in kept for i in t.token_ids], dtype=torch.int64),
        loss_mask=torch.tensor(
            [bit for t, _ in kept for bit in (0, *t.loss_mask[1:])], dtype=torch.bool
        ),
        behavior_logprobs=torch.tensor(
            [x for t, _ in kept for x in t.behavior_logprobs], dtype=torch.float32
        ),
    )


def make_micro_batch(batch: TrainBatch, rows: Sequence[Sequence[int]]) -> MicroBatch:
    """Packs the sequences of `rows`; without rows, one padding token without a trained one (a rank
    with nothing to do still joins the collectives).
    """
    lengths = batch.lengths.tolist()
    starts = [0, *torch.cumsum(batch.lengths, 0).tolist()]
    width = max([1, *(sum(lengths[i] - 1 for i in row) for row in rows)])
    shape = (max(1, len(rows)), width)
    input_ids = torch.zeros(shape, dtype=torch.int64)
    position_ids = torch.zeros(shape, dtype=torch.int64)
    predict_at, sources, owners = [], [], []
    for r, row in enumerate(rows):
        column = 0
        for i in row:
            inputs = lengths[i] - 1  # the last token is only ever a target
            input_ids[r, column : column + inputs] = batch.token_ids[starts[i] : starts[i] + inputs]
            position_ids[r, column : column + inputs] = torch.arange(inputs)
            trained = batch.loss_mask[starts[i] + 1 : starts[i + 1]].nonzero().flatten()
            predict_at.append(trained + r * width + column)
            sources.append(trained + starts[i] + 1)
            owners.append(torch.full_like(trained, i))
            column += inputs

    empty = torch.zeros(0, dtype=torch.int64)
    source, owner = torch.cat([empty, *sources]), torch.cat([empty, *owners])
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        predict_at=torch.cat([empty, *predict_at]),
        targets=batch.token_ids[source],
        advantages=batch.advantages[owner],
        behavior_logprobs=batch.behavior_logprobs[source],
        temperatures=batch.temperatures[owner],
    )
