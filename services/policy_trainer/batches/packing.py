"""Cuts a batch into mini-batches of whole groups, and assigns their units to ranks, rows and
micro-batches.

A unit is a tree of trajectories with a common beginning, or a single trajectory. Rows
are short (`row_tokens`), because attention covers the whole row and is then masked. A longer
trajectory has its own row. Rows of similar length share a micro-batch, since a micro-batch is as
wide as its widest row.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.services.policy_trainer.algorithms.losses import token_weights
from paceline.services.policy_trainer.batches.batch import (
    MicroBatch,
    Tokens,
    TrainBatch,
    common_prefix,
    make_micro_batch,
)
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.training import first_fit
from paceline.training.process import on_device


@dataclass(frozen=True, slots=True)
class Unit:
    """Trajectories of one group, adjacent in one row."""

    members: tuple[int, ...]
    tokens: int  # tokens of their tree


class Neighbour(NamedTuple):
    """A sequence, after the one of its group with the longest common beginning."""

    number: int
    tokens: int
    shared: int  # tokens shared with the previous sequence; 0 for the first


def neighbours(sequences: Sequence[Tokens], groups: Iterable[int]) -> list[list[Neighbour]]:
    """Each group's sequences sorted by tokens, so that sequences with long common beginnings are
    adjacent.
    """
    by_group: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        by_group.setdefault(group, []).append(number)
    found = []
    for members in by_group.values():
        members.sort(key=lambda i: (sequences[i].astype(">i8").tobytes(), i))
        shared = [common_prefix(sequences[i], sequences[j]) for i, j in pairwise(members)]
        lengths = [len(sequences[i]) for i in members]
        found.append(list(map(Neighbour, members, lengths, [0, *shared])))
    return found


def prefix_units(groups: Iterable[Sequence[Neighbour]], row_tokens: int) -> list[Unit]:
    """Groups adjacent sequences, split where a tree would exceed `row_tokens`; a longer sequence is
    alone.
    """
    units: list[Unit] = []
    for members in groups:
        unit: list[int] = []
        used = 0
        for number, own, shared in members:
            new = own - shared if unit else own
            if unit and used + new > row_tokens:
                units.append(Unit(tuple(unit), used))
                unit, used, new = [], 0, own
            unit.append(number)
            used += new
        units.append(Unit(tuple(unit), used))
    return units


def assign_ranks(lengths: Sequence[int], world_size: int) -> list[list[int]]:
    """Sequence numbers of each rank with balanced token counts: longest first, each to the rank
    with the fewest tokens.

    Deterministic: ties go to the lower sequence number and the lower rank. Each list is ascending.
    """
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for index in _longest_first(lengths):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    return [sorted(share) for share in shares]


def pack_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Sequence numbers of each row, widest row first. A sequence longer than `row_tokens` is alone;
    the rest is packed first fit.
    """
    order = _longest_first(lengths)
    alone = [[i] for i in order if lengths[i] > row_tokens]
    rows = first_fit(lengths, row_tokens, order[len(alone) :])
    return alone + sorted(rows, key=lambda row: -sum(lengths[i] for i in row))


def split_rows(
    rows: Sequence[Sequence[int]], lengths: Sequence[int], tokens_per_micro_batch: int
) -> list[list[list[int]]]:
    """Rows of each micro-batch: consecutive rows, at least one, while rows x longest row stays
    within the budget.
    """
    micro_batches: list[list[list[int]]] = []
    width = 0
    for row in rows:
        used = sum(lengths[i] for i in row)
        wider = max(width, used)
        if micro_batches and wider * (len(micro_batches[-1]) + 1) <= tokens_per_micro_batch:
            micro_batches[-1].append(list(row))
            width = wider
        else:
            micro_batches.append([list(row)])
            width = used
    return micro_batches


def plan_micro_batches(
    lengths: Sequence[int], *, world_size: int, row_tokens: int, tokens_per_micro_batch: int
) -> list[list[list[list[int]]]]:
    """plan[rank][micro-batch][row] = sequence numbers. Every rank gets equally many micro-batches,
    some perhaps empty, because all ranks must join the collectives of each.
    """
    plan = []
    for share in assign_ranks(lengths, world_size):
        own = [lengths[i] for i in share]
        rows = pack_rows(own, row_tokens)
        micro_batches = split_rows(rows, own, tokens_per_micro_batch)
        plan.append([[[share[i] for i in row] for row in rows] for rows in micro_batches])
    rounds = max(len(micro_batches) for micro_batches in plan)
    return [
        micro_batches + [[] for _ in range(rounds - len(micro_batches))] for micro_batches in plan
    ]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


ROW_TOKENS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Compared widths. The mask of a still wider row takes more memory than it saves."""
NO_BETTER = 2
"""Number of costlier widths after the best width that end the search."""


class Packing(NamedTuple):
    """Units and their places."""

    units: Sequence[Unit]
    plan: Sequence[Sequence[Sequence[Sequence[int]]]]  # [rank][micro-batch][row], as in packing.py


def widths(tokens_per_micro_batch: int) -> Iterator[int]:
    """Widths that fit in a micro-batch; always the narrowest."""
    return (one for one in ROW_TOKENS if one <= max(tokens_per_micro_batch, ROW_TOKENS[0]))


def cheapest(packings: Iterable[Packing], pair_cost: float) -> Packing:
    """The cheapest packing, the first one among equals. Packings must be ordered by row width."""
    best: tuple[float, Packing] | None = None
    worse = 0
    for packing in packings:
        taken = cost(packing, pair_cost)
        if best is None or taken < best[0]:
            best, worse = (taken, packing), 0
        elif taken > best[0]:
            worse += 1
            if worse == NO_BETTER:
                break
    assert best is not None, "a batch has at least one packing"
    return best[1]


def cost(packing: Packing, pair_cost: float) -> float:
    """Cost of the busiest rank, in the matrix products of so many tokens: every cell of a
    micro-batch, and its attention to the whole row. `pair_cost`: cost of one token's attention to
    another, see model.pair_cost.
    """

    def of(rows: Sequence[Sequence[int]]) -> float:
        width = max(sum(packing.units[unit].tokens for unit in row) for row in rows)
        return len(rows) * width * (1.0 + width * pair_cost)

    return max(sum(of(rows) for rows in rounds if rows) for rounds in packing.plan)


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The trajectories of one update (B of the batch), and the loss weight of each token (T of the
    batch; 0 for tokens outside the update).
    """

    members: Bool[Tensor, " B"]
    token_weights: Float[Tensor, " T"]


class Packer:
    """Packs chosen trajectories into rows for this rank."""

    def __init__(self, config: PolicyTrainerConfig, mesh: DeviceMesh, pair_cost: float) -> None:
        """`pair_cost`: cost of the model that reads the rows, see model.pair_cost."""
        self._config = config
        self._mesh = mesh
        self._pair_cost = pair_cost

    def micro_batches(self, batch: TrainBatch, chosen: Bool[Tensor, " B"]) -> Iterator[MicroBatch]:
        """This rank's micro-batches, as many as on every rank, possibly empty. Trajectories without
        a trained token are left out.
        """
        owned = torch.bincount(batch.owners, minlength=len(chosen)) > 0
        numbers = (chosen & owned).nonzero().flatten().tolist()
        units, plan = self._packing(batch, numbers)
        for rows in plan[self._mesh.get_rank()]:
            packed = [[numbers[i] for u in row for i in units[u].members] for row in rows]
            micro = make_micro_batch(batch, packed)
            yield on_device(micro, self._mesh.device_type)

    def accumulate(
        self,
        model: nn.Module,
        batch: TrainBatch,
        part: MiniBatch,
        losses_of: Callable[[MicroBatch], Float[Tensor, " M"]],
        on_micro_batch: Callable[[int, int], None] = lambda number, of: None,
    ) -> float:
        """Accumulates gradients of the mini-batch's loss; returns that loss, equal on all ranks.

        `losses_of`: losses of a micro-batch's tokens. Ranks average their gradients, so each rank's
        part is scaled by the number of ranks. The result is the gradient of the whole mini-batch,
        for any number of ranks and any split.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device_type)
        micro_batches = list(self.micro_batches(batch, part.members))
        for number, micro in enumerate(micro_batches, 1):
            on_micro_batch(number, len(micro_batches))
            # Without a sync every rank accumulates whole gradients.
            last = number == len(micro_batches)
            model.set_requires_gradient_sync(last or self._config.reshard_after_forward)  # type: ignore[operator]
            losses = losses_of(micro)
            loss = (losses * part.token_weights[micro.tokens.cpu()].to(losses.device)).sum()
            (loss * self._mesh.size()).backward()
            total += loss.detach()
        dist.all_reduce(total)
        return float(total)

    def _packing(self, batch: TrainBatch, numbers: Sequence[int]) -> Packing:
        """The packing; equal on every rank."""
        config, inputs = self._config, batch.inputs(numbers)
        alike = neighbours(inputs, batch.groups[list(numbers)].tolist())

        def laid_out(row_tokens: int) -> Packing:
            units = prefix_units(alike, row_tokens)
            plan = plan_micro_batches(
                [unit.tokens for unit in units],
                world_size=self._mesh.size(),
                row_tokens=row_tokens,
                tokens_per_micro_batch=config.tokens_per_micro_batch,
            )
            return Packing(units, plan)

        if config.row_tokens:
            return laid_out(config.row_tokens)
        return cheapest(map(laid_out, widths(config.tokens_per_micro_batch)), self._pair_cost)


def mini_batches(batch: TrainBatch, config: PolicyTrainerConfig) -> list[MiniBatch]:
    """The configured number of mini-batches, without empty mini-batches: group g is in mini-batch g
    modulo that number.
    """
    settings = config.algorithm
    parts = []
    for number in range(settings.mini_batches):
        members = batch.groups % settings.mini_batches == number
        own = members[batch.owners]
        if not own.any():
            continue
        weights = torch.zeros(len(own))
        weights[own] = token_weights(
            settings.aggregation,
            batch.sessions[batch.owners[own]],
            len(batch.sessions[members].unique()),
            settings.aggregation_tokens,
        )
        parts.append(MiniBatch(members, weights))
    return parts
