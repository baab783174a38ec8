"""Packs samples into one row.

Positions count from the start of a document's window, not of its sequence. Rotary attention depends
on distances only, so a drafter also trains on the angles of short sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.services.drafter_trainer.rows.sample import FeatureSample
from paceline.speculators.packed import PackedRow


def pack(samples: Sequence[FeatureSample], *, window: int) -> PackedRow:
    """One row from samples of one head; of a sample longer than `window` positions, the last
    `window` are used.

    A document is a sample's sequence.
    """
    parts = list[dict[str, Tensor]]()
    for number, sample in enumerate(samples):
        if sample.positions > window:
            sample = sample.cut(sample.positions - window, window)
        here, hidden = torch.arange(sample.positions), sample.hidden.float()
        parts.append(
            {
                "states": hidden[:-1],
                "next_states": hidden[1:, -sample.hidden_size :].detach(),  # a target
                "next_tokens": sample.token_ids[1:-1],
                "draft_tokens": sample.token_ids[2:],
                "positions": here,
                "documents": torch.full_like(here, number),
                "valid": sample.generated[2:],
            }
        )

    return PackedRow(
        **{name: torch.cat([part[name] for part in parts]) for name in parts[0]},
        lm_head_hash=samples[0].lm_head_hash,
        layers=samples[0].layers,
    )
