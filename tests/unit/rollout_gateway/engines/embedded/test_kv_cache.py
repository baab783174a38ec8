"""Copies and moves of the slot store between slots and positions, and its memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from live_memory import resident_bytes

from paceline.models.config import read_config
from paceline.services.rollout_gateway.engines.embedded.kv_cache import SlotStore

MODEL = Path(__file__).parents[5] / "examples" / "demo" / "policy_start"


MIB = 2**20


def store(slots: int = 2, capacity: int = 8) -> SlotStore:
    weights: Any = SimpleNamespace(config=read_config(MODEL), head=torch.zeros(1))
    return SlotStore(weights, slots, capacity, keep_hidden=True)


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


def test_a_store_takes_memory_for_the_tokens_of_its_slots_alone() -> None:
    before = resident_bytes()
    one = store(slots=96, capacity=1 << 14)
    assert one.kv.data.nbytes + one.hidden.nbytes > 2**32
    ids = one.token_ids.nbytes
    assert resident_bytes() - before < ids + 4 * MIB

    held, length = resident_bytes(), 1 << 12
    one.kv.data[:, 0, :, :length] = 1
    one.hidden[0, :length] = 1
    one.copy(0, 90, 0, length)
    taken = resident_bytes() - held
    assert taken >= 2 * length * one.token_bytes - MIB
    assert taken < 2.1 * length * one.token_bytes + 4 * MIB

    one.move(0, 1, length)
    one.clear(90, length)
    assert one.kv.data[:, 1, :, :length].min() == 1
    assert not one.kv.data[:, 0, :, 1:].any()  # masked numbers are read, and must be finite
    assert resident_bytes() - held < 0.6 * taken


def test_a_released_store_is_empty_and_comes_back_with_zeros() -> None:
    one = store()
    size = one.kv.data.nbytes + one.hidden.nbytes
    one.kv.data[:] = torch.nan
    one.hidden[:] = torch.nan
    assert one.release() == size
    assert one.kv.data.nbytes == one.hidden.nbytes == 0
    one.allocate()
    assert one.kv.data.nbytes + one.hidden.nbytes == size
    assert not one.kv.data.any()
    assert not one.hidden.any()
