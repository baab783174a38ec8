"""Lays trajectories out as tensors: a batch and its packed micro-batches.

Shape letters: B trajectories, N tokens of all trajectories, T trained tokens among the N, R rows, W
row width, M trained tokens of a micro-batch, U distinct tokens among the M.
"""

import json
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from paceline.services.policy_trainer.audit import cell_name, drafted_so_far, is_audited
from paceline.trajectory import Trajectory

Tokens = Int[np.ndarray, " L"]
_NONE = torch.zeros(0, dtype=torch.int64)
_NO_TOKENS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """All trajectories of a step, concatenated in the order of the sorted batch."""

    rewards: Float[Tensor, " B"]
    groups: Int[Tensor, " B"]  # counted from 0
    sessions: Int[Tensor, " B"]  # counted from 0
    lengths: Int[Tensor, " B"]  # tokens of each trajectory
    temperatures: Float[Tensor, " B"]  # 0 (greedy) is stored as 1
    token_ids: Int[Tensor, " N"]
    trained: Int[Tensor, " T"]  # indices of trained tokens; never the first token of a trajectory
    owners: Int[Tensor, " T"]  # trajectory of each trained token
    behavior_logprobs: Float[Tensor, " T"]
    lags: Int[Tensor, " T"]  # policy versions between the drawing weights and the step's start
    ways: Int[Tensor, " T"]  # number of the token's path; -1: unknown
    way_names: UInt8[Tensor, " C"]  # JSON of the paths' [fields of DrawSpan, arm so far]
    audited: Bool[Tensor, " B"]  # trajectories in the audit's sample

    @property
    def targets(self) -> Int[Tensor, " T"]:
        """The tokens whose log-probs are computed."""
        return self.token_ids[self.trained]

    @property
    def weights(self) -> Float[Tensor, " B"]:
        """Weight of a trajectory in its group: one over the branches of its session."""
        return 1.0 / torch.bincount(self.sessions, minlength=1)[self.sessions].float()

    def inputs(self, numbers: Iterable[int]) -> list[Tokens]:
        """The tokens of trajectories without the last tokens, which are only targets."""
        ids, starts = self.token_ids.numpy(), self.starts
        return [ids[starts[i] : starts[i + 1] - 1] for i in numbers]

    def masks_by_way(self, tokens: Int[Tensor, " M"]) -> dict[str, Bool[Tensor, " M"]]:
        """Masks [M] of the given trained tokens by arm, by number format, and by prefix (computed
        for the token's own request, or reused).
        """
        masks = dict[str, Tensor]()
        for (arm, numbers, reused, *_), own in self._by_way(tokens):
            start = "reused" if reused else "computed"
            for key in (f"arm={arm}", f"numbers={numbers}", f"start={start}"):
                masks[key] = masks[key] | own if key in masks else own
        return masks

    def masks_by_cell(self, tokens: Int[Tensor, " M"], lag: int) -> dict[str, Bool[Tensor, " M"]]:
        """Masks [M] of audited tokens with that lag, by audit cell."""
        mine = self.audited[self.owners[tokens]] & (self.lags[tokens] == lag)
        masks = dict[str, Tensor]()
        for (_, numbers, reused, stale, so_far), own in self._by_way(tokens):
            name, own = cell_name(so_far, numbers, reused=reused, stale=stale), own & mine
            if own.any():
                masks[name] = masks[name] | own if name in masks else own
        return masks

    def _by_way(
        self, tokens: Int[Tensor, " M"]
    ) -> Iterator[tuple[tuple[str, str, bool, bool, str], Bool[Tensor, " M"]]]:
        """Each path of the given tokens, with a mask [M] of its tokens."""
        names = json.loads(self.way_names.numpy().tobytes())
        chosen = self.ways[tokens]
        for way in chosen[chosen >= 0].unique().tolist():
            yield names[way], chosen == way

    @property
    def starts(self) -> list[int]:
        """Index of each trajectory's first token, and the end of the last one."""
        return [0, *torch.cumsum(self.lengths, 0).tolist()]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed rows and their trained tokens.

    Trained tokens of several trajectories after the same prefix are predicted once.
    """

    input_ids: Int[Tensor, "R W"]
    position_ids: Int[Tensor, "R W"]
    # end of the subtree that attends to each token (packing.py); None: one trajectory per row
    subtree_ends: Int[Tensor, "R W"] | None
    predict_at: Int[Tensor, " U"]  # flat index into R * W of the token before each prediction
    targets: Int[Tensor, " U"]
    temperatures: Float[Tensor, " U"]
    predictions: Int[Tensor, " M"]  # index into the U of each trained token
    tokens: Int[Tensor, " M"]  # index into the batch's T
    sequences: Int[Tensor, " M"]  # number of the trajectory, from 0 within the micro-batch
    positions: Int[Tensor, " M"]  # of the trained token in its trajectory


def make_batch(
    trajectories: Sequence[Trajectory], policy_version: int, audit_share: float = 0.0
) -> TrainBatch:
    """Tensors of a step's trajectories. The step starts from the weights of `policy_version`, and
    audits about `audit_share` of the trajectories.

    Trajectories without gradient are included, since means cover them too.
    """
    lengths = [len(one.token_ids) for one in trajectories]
    starts = np.cumsum([0, *lengths])
    mask = _flat([one.loss_mask for one in trajectories], np.bool_)
    mask[starts[:-1]] = False  # a first token has no prediction
    trained = np.flatnonzero(mask)
    versions = np.full(len(mask), policy_version)
    ways, names = np.full(len(mask), -1), dict[tuple[Any, ...], int]()
    for start, one in zip(starts, trajectories, strict=False):
        for span in one.version_spans:
            versions[start + span.start : start + span.end] = span.policy_version
        for drawn, so_far in zip(one.draw_spans, drafted_so_far(one.draw_spans), strict=True):
            way = names.setdefault((*astuple(drawn)[2:], so_far), len(names))
            ways[start + drawn.start : start + drawn.end] = way
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
        token_ids=torch.from_numpy(_flat([one.token_ids for one in trajectories], np.int64)),
        trained=torch.from_numpy(trained),
        owners=torch.from_numpy(owners[trained]),
        behavior_logprobs=torch.from_numpy(logprobs[trained]),
        lags=torch.from_numpy(policy_version - versions[trained]),
        ways=torch.from_numpy(ways[trained]),
        way_names=torch.tensor(list(json.dumps(list(names)).encode()), dtype=torch.uint8),
        audited=torch.tensor([is_audited(one, audit_share) for one in trajectories]).bool(),
    )


class TreeRow:
    """A row while it is being filled."""

    def __init__(self) -> None:
        self.width = 0
        self._tokens: list[Tokens] = []
        self._positions: list[Tokens] = []
        self._ended: list[tuple[Tokens, int]] = []  # columns, and subtree ends
        # Of the last trajectory: tokens, columns.
        self._last: tuple[Tokens, Tokens] = (_NO_TOKENS, _NO_TOKENS)
        self._group = -1

    def add(self, tokens: Tokens, group: int) -> Tokens:
        """The columns of a trajectory's tokens; columns of a common beginning with the last
        trajectory of the group are reused.
        """
        before, columns = self._last
        shared = common_prefix(before, tokens) if group == self._group else 0
        self._ended.append((columns[shared:], self.width))
        new = np.arange(self.width, self.width + len(tokens) - shared)
        self._tokens.append(tokens[shared:])
        self._positions.append(np.arange(shared, len(tokens)))
        self.width += len(new)
        columns = np.concatenate([columns[:shared], new])
        self._last, self._group = (tokens, columns), group
        return columns

    def padded(self, width: int) -> tuple[Tokens, Tokens, Tokens]:
        """(token ids, positions, subtree ends) of `width` columns. A padding token is its own
        document.
        """
        empty = np.zeros(width - self.width, np.int64)
        ends = np.arange(1, width + 1)
        for columns, end in [*self._ended, (self._last[1], self.width)]:
            ends[columns] = end
        return (
            np.concatenate([*self._tokens, empty]),
            np.concatenate([*self._positions, empty]),
            ends,
        )


def common_prefix(one: Tokens, other: Tokens) -> int:
    """Length of the common beginning."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def make_micro_batch(batch: TrainBatch, rows: Sequence[Sequence[int]]) -> MicroBatch:
    """Packs the trajectories of `rows`; neighbours of a group share their prefix. Without rows, one
    padding token without a trained token: an idle rank must still join the collectives.
    """
    starts = batch.starts
    groups = batch.groups.tolist()
    ends = torch.searchsorted(batch.owners, torch.arange(len(groups)), right=True).tolist()
    layouts = [TreeRow() for _ in rows] or [TreeRow()]
    tokens, sequences, positions, before = [_NONE], [_NONE], [_NONE], []
    for r, row in enumerate(rows):
        for i, inputs in zip(row, batch.inputs(row), strict=True):
            columns = torch.from_numpy(layouts[r].add(inputs, groups[i]))
            own = torch.arange(ends[i - 1] if i else 0, ends[i])
            position = batch.trained[own] - starts[i]
            before.append((r, columns[position - 1]))
            tokens.append(own)
            sequences.append(torch.full_like(own, len(sequences) - 1))
            positions.append(position)

    width = max(1, *(layout.width for layout in layouts))
    filled = zip(*(layout.padded(width) for layout in layouts), strict=True)
    input_ids, position_ids, subtree_ends = (torch.from_numpy(np.stack(part)) for part in filled)
    token = torch.cat(tokens)
    at = torch.cat([_NONE, *(r * width + columns for r, columns in before)])
    distinct, predictions = _distinct(
        at, batch.targets[token], batch.temperatures[batch.owners[token]]
    )
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        subtree_ends=None if bool((subtree_ends == width).all()) else subtree_ends,
        predict_at=distinct[0],
        targets=distinct[1],
        temperatures=distinct[2],
        predictions=predictions,
        tokens=token,
        sequences=torch.cat(sequences),
        positions=torch.cat(positions),
    )


def _distinct(
    at: Int[Tensor, " M"], targets: Int[Tensor, " M"], temperatures: Float[Tensor, " M"]
) -> tuple[tuple[Tensor, Tensor, Tensor], Int[Tensor, " M"]]:
    """The distinct triples, and the index of each triple among them."""
    heats, heat = temperatures.unique(return_inverse=True)
    vocabulary = int(targets.max()) + 1 if len(targets) else 1
    names, which = ((at * vocabulary + targets) * max(1, len(heats)) + heat).unique(
        return_inverse=True
    )
    first = torch.zeros_like(names).scatter_(0, which, torch.arange(len(which)))
    return (at[first], targets[first], temperatures[first]), which


def _flat(parts: Sequence[Sequence[Any]], dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def _numbered(names: Iterable[Hashable]) -> Int[Tensor, " B"]:
    """The number of each name, counted from 0 in order of appearance."""
    numbers: dict[Hashable, int] = {}
    found = [numbers.setdefault(name, len(numbers)) for name in names]
    return torch.tensor(found, dtype=torch.int64)
