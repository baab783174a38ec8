"""Sharded training state: optimiser, checkpoints, Hugging Face directories. Imports torch."""

from collections.abc import Sequence

STORE_VARIABLE = "PACELINE_RANK_STORE"
"""Names the file over which ranks find each other: fresh for each group, in a private directory."""


def first_fit(
    lengths: Sequence[int], row_tokens: int, order: Sequence[int], *, open_rows: int | None = None
) -> list[list[int]]:
    """Sequence numbers of each row. In the given order, each sequence goes into the first open row
    with room.

    No row holds more than `row_tokens`, so no sequence may be longer. At most `open_rows` rows are
    open: a new row closes the fullest.
    """
    rows: list[list[int]] = []
    free: dict[int, int] = {}
    for index in order:
        row = next((r for r, room in free.items() if room >= lengths[index]), None)
        if row is None:
            if len(free) == open_rows:
                del free[min(free, key=free.__getitem__)]
            row = len(rows)
            rows.append([])
            free[row] = row_tokens
        rows[row].append(index)
        free[row] -= lengths[index]

    return rows
