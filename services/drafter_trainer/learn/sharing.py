"""Sends each rank its row from rank 0, as plain tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from paceline.services.drafter_trainer.learn.membership import Members
from paceline.speculators.packed import PackedRow

_WORDS = ("stop", "wait", "snapshot", "again", "save", "join", "row")
_HASH_BYTES = 8  # a head's hash is 16 hexadecimal digits
_INTEGERS = ("next_tokens", "draft_tokens", "positions", "documents", "valid")


def announce(word: str, members: Members) -> None:
    """Rank 0 announces the next action to the members.

    "stop": the activation is over; "wait": another word follows later; "snapshot": a snapshot;
    "again": training continues from other weights; "save": a checkpoint; "join": other members, by
    the next command.
    """
    members.agree(_WORDS.index(word))


def hand_out(rows: Sequence[PackedRow], members: Members) -> PackedRow:
    """Rank 0 sends row r to rank r and returns its own. There is one row per member, all with one
    head.
    """
    announce("row", members)
    for rank, row in enumerate(rows[1:], start=1):
        layers = row.layers.encode()
        widths = (len(row), row.states.shape[1], row.next_states.shape[1], len(layers))
        dist.send(torch.tensor([*widths, *bytes.fromhex(row.lm_head_hash)]), rank)
        dist.send(torch.frombuffer(bytearray(layers), dtype=torch.uint8), rank)
        dist.send(torch.cat([row.states, row.next_states], dim=1), rank)
        dist.send(torch.stack([getattr(row, name).long() for name in _INTEGERS]), rank)
    return rows[0]


def receive(members: Members) -> PackedRow | str:
    """On other members: the next row, or one of the announced words."""
    (index,) = members.agree(0)
    return _receive_row() if _WORDS[index] == "row" else _WORDS[index]


def _receive_row() -> PackedRow:
    size = torch.zeros(4 + _HASH_BYTES, dtype=torch.int64)
    dist.recv(size, 0)
    length, width, hidden_size, named, *hash_bytes = size.tolist()
    layers = torch.empty(named, dtype=torch.uint8)
    dist.recv(layers, 0)
    states = torch.empty(length, width + hidden_size)
    dist.recv(states, 0)
    integers = torch.empty(len(_INTEGERS), length, dtype=torch.int64)
    dist.recv(integers, 0)
    next_tokens, draft_tokens, positions, documents, valid = integers
    return PackedRow(
        states=states[:, :width],
        next_states=states[:, width:],
        next_tokens=next_tokens,
        draft_tokens=draft_tokens,
        positions=positions,
        documents=documents,
        valid=valid.bool(),
        lm_head_hash=bytes(hash_bytes).hex(),
        layers=bytes(layers.tolist()).decode(),
    )
