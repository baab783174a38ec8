"""Packs samples into one row, position reset. Pure; owns no buffer, no model, not what a row means (packed.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafter_trainer.buffer import FeatureSample
from paceline.speculators import PackedRow


def pack(samples: Sequence[FeatureSample], *, window: int) -> PackedRow:
    """One row from samples of one head; a sample longer than `window` positions gives its last `window`."""
    states, tokens, drafts, targets, positions, parents, documents, valid = [], [], [], [], [], [], [], []
    first = 0
    for number, sample in enumerate(samples):
        length = min(sample.positions, window)
        start = sample.positions - length
        rows = sample.hidden[start:].float()
        states.append(rows[:-1])
        targets.append(rows[1:, -sample.hidden_size :])
        tokens.append(sample.token_ids[start + 1 : start + 1 + length])
        drafts.append(sample.token_ids[start + 2 : start + 2 + length])
        valid.append(sample.generated[start + 2 : start + 2 + length])
        positions.append(torch.arange(length))
        before = torch.arange(first - 1, first - 1 + length)
        before[:1] = -1
        parents.append(before)
        documents.append(torch.full((length,), number))
        first += length
    return PackedRow(
        states=torch.cat(states),
        next_states=torch.cat(targets),
        next_tokens=torch.cat(tokens),
        draft_tokens=torch.cat(drafts),
        positions=torch.cat(positions),
        parents=torch.cat(parents),
        documents=torch.cat(documents),
        valid=torch.cat(valid),
        lm_head_hash=samples[0].lm_head_hash,
        layers=samples[0].layers,
    )
