"""Assigns units to ranks, rows and micro-batches, in plain integers.

A unit is a tree of trajectories with a common beginning (prefixes.py), or a single trajectory. Rows
are short (`row_tokens`), because attention covers the whole row and is then masked. A longer
trajectory has its own row. Rows of similar length share a micro-batch, since a micro-batch is as
wide as its widest row.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.training.packing import first_fit


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
