"""Lays trajectories out as tensors: a batch, and its packed micro-batches.

Shape letters: B trajectories, N tokens of all trajectories, T trained ones of them, R rows, W row
width, M trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from paceline.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """All trajectories of a step, laid end to end in the order of the sorted batch."""

    rewards: Float[Tensor, " B"]
    groups: Int[Tensor, " B"]  # counted from 0
    sessions: Int[Tensor, " B"]  # counted from 0
    lengths: Int[Tensor, " B"]  # tokens of each trajectory
    temperatures: Float[Tensor, " B"]  # 0 (greedy) stands as 1
    drafted: Bool[Tensor, " B"]  # whether a drafter helped to draw it
    token_ids: Int[Tensor, " N"]
    trained: Int[Tensor, " T"]  # which of them are; never the first of a trajectory
    owners: Int[Tensor, " T"]  # trajectory of each trained token
    behavior_logprobs: Float[Tensor, " T"]
    lags: Int[Tensor, " T"]  # policy versions between the weights that drew it and the step's start

    @property
    def weights(self) -> Float[Tensor, " B"]:
        """What a trajectory counts in its group: one over the branches of its session."""
        return 1.0 / torch.bincount(self.sessions, minlength=1)[self.sessions].float()

    @property
    def starts(self) -> list[int]:
        """Number of each trajectory's first token, and of the one after the last."""
        return [0, *torch.cumsum(self.lengths, 0).tolist()]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed rows and their trained tokens.

    A padding token has position 0, a document of its own.
    """

    input_ids: Int[Tensor, "R W"]
    position_ids: Int[Tensor, "R W"]
    predict_at: Int[Tensor, " M"]  # flat index into R * W of the token before each trained token
    targets: Int[Tensor, " M"]
    temperatures: Float[Tensor, " M"]
    tokens: Int[Tensor, " M"]  # which of the batch's T
    sequences: Int[Tensor, " M"]  # number of the trajectory, from 0 within the micro-batch
    positions: Int[Tensor, " M"]  # of the trained token in its trajectory


def make_batch(trajectories: Sequence[Trajectory], policy_version: int) -> TrainBatch:
    """Tensors of a step's trajectories; it starts from the weights of `policy_version`.

    Those that will carry no gradient are in it too: they are part of what a mean is taken over.
    """
    lengths = [len(one.token_ids) for one in trajectories]
    starts = np.cumsum([0, *lengths])
    mask = _flat([one.loss_mask for one in trajectories], np.bool_)
    mask[starts[:-1]] = False  # nothing predicts a first token
    trained = np.flatnonzero(mask)
    versions = np.full(len(mask), policy_version)
    for start, one in zip(starts, trajectories, strict=False):
        for span in one.version_spans:
            versions[start + span.start : start + span.end] = span.policy_version
    owners = np.repeat(np.arange(len(lengths)), lengths)
    logprobs = _flat([one.behavior_logprobs for one in trajectories], np.float32)
    return TrainBatch(
        rewards=torch.tensor([one.reward or 0.0 for one in trajectories], dtype=torch.float32),
        groups=_numbered(one.group_id for one in trajectories),
        sessions=_numbered(one.key.session_id for one in trajectories),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        temperatures=torch.tensor(
            [one.temperature or 1.0 for one in trajectories], dtype=torch.float32
        ),
        drafted=torch.tensor(
            [one.speculation.drafted_rounds > 0 for one in trajectories], dtype=torch.bool
        ),
        token_ids=torch.from_numpy(_flat([one.token_ids for one in trajectories], np.int64)),
        trained=torch.from_numpy(trained),
        owners=torch.from_numpy(owners[trained]),
        behavior_logprobs=torch.from_numpy(logprobs[trained]),
        lags=torch.from_numpy(policy_version - versions[trained]),
    )


def make_micro_batch(batch: TrainBatch, rows: Sequence[Sequence[int]]) -> MicroBatch:
    """Packs the trajectories of `rows`; without rows, one padding token without a trained one (a
    rank with nothing to do still joins the collectives).
    """
    lengths, starts = batch.lengths.tolist(), batch.starts
    ends = torch.searchsorted(batch.owners, torch.arange(len(lengths)), right=True).tolist()
    width = max([1, *(sum(lengths[i] - 1 for i in row) for row in rows)])
    shape = (max(1, len(rows)), width)
    input_ids = torch.zeros(shape, dtype=torch.int64)
    position_ids = torch.zeros(shape, dtype=torch.int64)
    empty = torch.zeros(0, dtype=torch.int64)
    predict_at, tokens, sequences, positions = [empty], [empty], [empty], [empty]
    for r, row in enumerate(rows):
        column = 0
        for i in row:
            inputs = lengths[i] - 1  # the last token is only ever a target
            input_ids[r, column : column + inputs] = batch.token_ids[starts[i] : starts[i] + inputs]
            position_ids[r, column : column + inputs] = torch.arange(inputs)
            own = torch.arange(ends[i - 1] if i else 0, ends[i])
            position = batch.trained[own] - starts[i]
            predict_at.append(position - 1 + r * width + column)
            tokens.append(own)
            sequences.append(torch.full_like(own, len(sequences) - 1))
            positions.append(position)
            column += inputs

    token = torch.cat(tokens)
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        predict_at=torch.cat(predict_at),
        targets=batch.token_ids[batch.trained[token]],
        temperatures=batch.temperatures[batch.owners[token]],
        tokens=token,
        sequences=torch.cat(sequences),
        positions=torch.cat(positions),
    )


def _flat(parts: Sequence[Sequence[Any]], dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def _numbered(names: Iterable[Hashable]) -> Int[Tensor, " B"]:
    """The number of each name, counted from 0 as they come."""
    numbers: dict[Hashable, int] = {}
    found = [numbers.setdefault(name, len(numbers)) for name in names]
    return torch.tensor(found, dtype=torch.int64)
