"""Plans which trajectory goes to which rank, row and micro-batch, in plain integers.

Several trajectories share a row: their positions restart at 0, which is what the attention mask
reads as a document boundary. Rows are short (`row_tokens`), because attention inside a row is
computed for the whole row and then masked.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import InvalidInput


def assign_ranks(lengths: Sequence[int], world_size: int) -> list[list[int]]:
    """Sequence numbers of each rank, token counts balanced: longest first, each to the rank with
    the fewest tokens.

    Deterministic: ties go to the lower sequence number and the lower rank. Each list is ascending.
    """
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    return [sorted(share) for share in shares]


def pack_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Sequence numbers of each row, first fit decreasing; no row is longer than `row_tokens`.

    Raises InvalidInput when one sequence alone is longer than a row or empty.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if not 1 <= length <= row_tokens:
            raise InvalidInput(
                "a sequence does not fit a row", seen=length, allowed=f"1 to {row_tokens} tokens"
            )
        row = next((r for r, free in enumerate(room) if free >= length), None)
        if row is None:
            rows.append([])
            room.append(row_tokens)
            row = len(rows) - 1
        rows[row].append(index)
        room[row] -= length
    return rows


def split_rows(
    rows: Sequence[Sequence[int]], lengths: Sequence[int], tokens_per_micro_batch: int
) -> list[list[list[int]]]:
    """Rows of each micro-batch: consecutive rows while rows x longest row stays within the budget;
    at least one row.
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
    some perhaps empty, because each one is a round of collectives that all ranks must join.
    """
    longest = max([row_tokens, *lengths])
    plan = []
    for share in assign_ranks(lengths, world_size):
        own = [lengths[i] for i in share]
        micro_batches = split_rows(pack_rows(own, longest), own, tokens_per_micro_batch)
        plan.append([[[share[i] for i in row] for row in rows] for rows in micro_batches])
    rounds = max(len(micro_batches) for micro_batches in plan)
    return [
        micro_batches + [[] for _ in range(rounds - len(micro_batches))] for micro_batches in plan
    ]
