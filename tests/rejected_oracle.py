"""Where rejected rows stand, read from their stamps by the ring's words alone, and what
transformers says there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel


def contexts_of_rows(rows: npt.NDArray[Any], sequence: Sequence[int]) -> list[tuple[int, ...]]:
    """Tokens up to each row of one request, its own the last; rows in the order of writing."""
    found: list[tuple[int, ...]] = []
    for index, row in enumerate(rows):
        stamp, position, token = int(row["parent"]), int(row["position"]), int(row["token_id"])
        above = tuple(sequence[:position]) if stamp < 2 else found[index - (stamp - 1)]
        assert stamp < 2 or (index >= stamp - 1 and rows["parent"][index - (stamp - 1)] > 0)
        assert len(above) == position
        found.append((*above, token))
    return found


def contexts_of_batch(
    parents: Sequence[int], token_ids: Sequence[int], path: Sequence[int]
) -> list[tuple[int, ...]]:
    """Tokens up to each rejected row of a batch whose sequence begins at position 0."""
    rows = len(path) - 1
    found: list[tuple[int, ...]] = []
    for parent, token in zip(parents, token_ids, strict=True):
        above = tuple(path[: parent + 1]) if parent < rows else found[parent - rows]
        found.append((*above, token))
    return found


def last_states(
    model: PreTrainedModel, contexts: Sequence[Sequence[int]], inner: Sequence[int] = ()
) -> npt.NDArray[np.float32]:
    """[n, W]: transformers' states at the last token of each: those that enter `inner`, then after
    the final norm.
    """
    width = max(len(one) for one in contexts)
    padded = torch.tensor([[*one, *[0] * (width - len(one))] for one in contexts])
    with torch.inference_mode():
        hidden = model(padded, output_hidden_states=True).hidden_states
    states = torch.cat([hidden[index] for index in (*inner, -1)], dim=-1)
    ends = torch.tensor([len(one) - 1 for one in contexts])
    return np.asarray(states[torch.arange(len(contexts)), ends].numpy())
