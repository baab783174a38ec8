"""Rows computed by the target's forward, against transformers one sequence at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from random_models import save_random
from transformers import PreTrainedModel

from paceline.models.loading import hash_head, read_tensors
from paceline.services.drafter_trainer.offline.data import Example
from paceline.services.drafter_trainer.offline.rank import captured
from paceline.services.drafter_trainer.rows.sample import load_policy_head, pack
from paceline.speculators.base import CaptureSpec
from paceline.training.shards import load_causal_lm

CAPTURE = CaptureSpec(inner=(0, 2))
HIDDEN = 48


def samples() -> list[Example]:
    random = np.random.default_rng(2)
    return [
        Example(random.integers(3, 97, n), np.arange(n) >= prompt)
        for n, prompt in ((12, 4), (3, 1), (20, 9))
    ]


BF16 = 2**-8
"""Largest relative error of a stored state."""


def oracle(model: PreTrainedModel, sample: Example) -> torch.Tensor:
    """Return [n, 3 H]: the input states of layers 0 and 2, and the state after the final norm."""
    with torch.no_grad():
        states = model(
            torch.from_numpy(sample.token_ids)[None], output_hidden_states=True
        ).hidden_states
    return torch.cat([states[0], states[2], states[3]], dim=-1)[0]


def test_a_row_pairs_the_state_at_a_token_with_the_tokens_after_it(tmp_path: Path) -> None:
    model, head = save_random(tmp_path, "llama"), load_policy_head(tmp_path, 0)
    policy = load_causal_lm(tmp_path, torch.float32).model
    random = np.random.default_rng(0)
    found = [captured(policy, head, CAPTURE, one).window(8, random) for one in samples()]
    row = pack(found, window=8)
    assert row.layers == "0,2,last"
    assert row.lm_head_hash == hash_head(read_tensors(tmp_path))
    assert torch.bincount(row.documents).tolist() == [8, 1, 8]
    for number, sample in enumerate(samples()):
        expected, own = oracle(model, sample), (row.documents == number).nonzero()[:, 0].tolist()
        # Where its window begins, by its first token.
        (start,) = (sample.token_ids[1:-1] == int(row.next_tokens[own[0]])).nonzero()[0][:1]
        assert row.valid[own].any()
        for position, t in enumerate(own):
            at = int(start) + position
            torch.testing.assert_close(row.states[t], expected[at], atol=1e-5, rtol=BF16)
            torch.testing.assert_close(
                row.next_states[t], expected[at + 1, -HIDDEN:], atol=1e-5, rtol=BF16
            )
            assert int(row.next_tokens[t]) == sample.token_ids[at + 1]
            assert int(row.draft_tokens[t]) == sample.token_ids[at + 2]
            assert bool(row.valid[t]) == bool(sample.mask[at + 2])
            assert int(row.positions[t]) == position
