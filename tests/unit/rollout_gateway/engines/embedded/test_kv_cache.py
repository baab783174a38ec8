"""Copies and moves of the slot store between slots and positions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from paceline.models.config import read_config
from paceline.services.rollout_gateway.engines.embedded.kv_cache import SlotStore

MODEL = Path(__file__).parents[5] / "examples" / "demo" / "policy_start"


def store() -> SlotStore:
    weights: Any = SimpleNamespace(config=read_config(MODEL), head=torch.zeros(1))
    return SlotStore(weights, 2, 8, keep_hidden=True)


def test_hidden_states_are_copied_with_the_cached_tokens_of_a_prefix() -> None:
    one = store()
    one.hidden[0] = torch.arange(1.0, 9.0)[:, None]
    one.copy(0, 1, 1, 3)
    assert one.hidden[1, :, 0].tolist() == [0, 2, 3, 0, 0, 0, 0, 0]


def test_the_accepted_path_of_a_tree_follows_its_root() -> None:
    one = store()
    one.kv.data[:] = torch.arange(8.0)[:, None]
    one.keep_path(torch.tensor([1]), torch.tensor([3]), torch.tensor([[0, 2]]))
    assert one.kv.data[0, 1, 0, :, 0].tolist() == [0, 1, 2, 3, 5, 5, 6, 7]
