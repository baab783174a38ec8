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

    A document is a sample's sequence, followed by its rejected drafts. A draft with token r under
    row i pairs the state h_i with r, as position i pairs h_i with the drawn token. It is placed
    beside position i, under position i - 1.
    """
    parts, first = list[dict[str, Tensor]](), 0
    for number, sample in enumerate(samples):
        if sample.positions > window:
            sample = sample.cut(sample.positions - window, window)
        for part in (_sequence(sample), _drafts(sample)):
            if part is not None:
                parents = part["parents"]
                part["parents"] = torch.where(parents < 0, -1, parents + first)
                part["documents"] = torch.full_like(parents, number)
                parts.append(part)
        first += sample.size

    return PackedRow(
        **{name: torch.cat([part[name] for part in parts]) for name in parts[0]},
        lm_head_hash=samples[0].lm_head_hash,
        layers=samples[0].layers,
    )


def _sequence(sample: FeatureSample) -> dict[str, Tensor]:
    """Positions of the sequence itself."""
    here, hidden = torch.arange(sample.positions), sample.hidden.float()
    return {
        "states": hidden[:-1],
        "next_states": hidden[1:, -sample.hidden_size :].detach(),  # a target
        "next_tokens": sample.token_ids[1:-1],
        "draft_tokens": sample.token_ids[2:],
        "positions": here,
        "parents": here - 1,
        "valid": sample.generated[2:],
    }


def _drafts(sample: FeatureSample) -> dict[str, Tensor] | None:
    """Positions of the rejected drafts, with captured states and without a drawn next token."""
    branches = sample.branches
    if branches is None:
        return None
    hidden = branches.hidden.float()
    return {
        "states": torch.cat([sample.hidden.float(), hidden])[branches.parents],
        "next_states": hidden[:, -sample.hidden_size :],
        "next_tokens": branches.token_ids,
        "draft_tokens": torch.full_like(branches.token_ids, -1),
        "positions": branches.roots + branches.depths,
        # Row i of the sequence is beside position i; the drafts' positions follow its last one.
        "parents": branches.parents - 1,
        "valid": torch.ones_like(branches.token_ids, dtype=torch.bool),
    }
