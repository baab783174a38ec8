"""Rows computed by the target's forward, against transformers one sequence at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from random_models import save_random
from transformers import PreTrainedModel

from paceline.errors import InvalidInput
from paceline.models.loading import hash_head, read_tensors
from paceline.services.drafter_trainer.learn.membership import on_cpu
from paceline.services.drafter_trainer.offline.data import Example
from paceline.services.drafter_trainer.offline.plan import Document
from paceline.services.drafter_trainer.offline.target import TargetModel
from paceline.speculators.base import CaptureSpec
from paceline.training.hugging_face import load_causal_lm

pytestmark = pytest.mark.usefixtures("one_rank")

CAPTURE = CaptureSpec(inner=(0, 2))
HIDDEN = 48


def samples() -> list[Example]:
    random = np.random.default_rng(2)
    return [
        Example(random.integers(3, 97, n), np.arange(n) >= prompt)
        for n, prompt in ((12, 4), (3, 1), (20, 9))
    ]


def documents() -> list[Document]:
    first, second, third = samples()
    return [Document(first, 0, 10), Document(second, 0, 1), Document(third, 5, 8)]


def oracle(model: PreTrainedModel, sample: Example) -> torch.Tensor:
    """[n, 3 H]: what enters layers 0 and 2, and the state after the final norm."""
    with torch.no_grad():
        states = model(
            torch.from_numpy(sample.token_ids)[None], output_hidden_states=True
        ).hidden_states
    return torch.cat([states[0], states[2], states[3]], dim=-1)[0]


def test_a_row_pairs_the_state_at_a_token_with_the_tokens_after_it(tmp_path: Path) -> None:
    model = save_random(tmp_path, "llama")
    target = TargetModel(load_causal_lm(tmp_path, torch.float32), tmp_path, CAPTURE, on_cpu(1).mesh)
    states = target.forward(documents())
    row = target.row(documents(), states)
    assert row.layers == "0,2,last"
    assert row.lm_head_hash == hash_head(read_tensors(tmp_path)["lm_head.weight"])
    t = 0
    for number, document in enumerate(documents()):
        expected, sample = oracle(model, document.sample), document.sample
        for position in range(document.length):
            at = document.start + position
            torch.testing.assert_close(row.states[t], expected[at], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(
                row.next_states[t], expected[at + 1, -HIDDEN:], atol=1e-5, rtol=1e-5
            )
            assert int(row.next_tokens[t]) == sample.token_ids[at + 1]
            assert int(row.draft_tokens[t]) == sample.token_ids[at + 2]
            assert bool(row.valid[t]) == bool(sample.mask[at + 2])
            assert (int(row.positions[t]), int(row.documents[t])) == (position, number)
            t += 1
    assert t == len(row) == 19


def test_a_layer_the_model_lacks_is_refused(tmp_path: Path) -> None:
    save_random(tmp_path, "llama")
    with pytest.raises(InvalidInput, match=r"seen: 3,last; allowed: 0 to 2, last"):
        TargetModel(
            load_causal_lm(tmp_path, torch.float32),
            tmp_path,
            CaptureSpec(inner=(3,)),
            on_cpu(1).mesh,
        )
