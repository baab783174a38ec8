"""A rank that receives the other ranks' messages, for test_process.py."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist

from paceline.training.process import from_all_ranks, from_rank_zero, tensors_from_rank_zero


@dataclass(frozen=True)
class Told:
    numbers: torch.Tensor
    bits: torch.Tensor
    none: torch.Tensor


def refuse(event: str, _: object) -> None:
    """An audit hook: the way in of a pickle is looking a class up by its name."""
    if event == "pickle.find_class":
        raise AssertionError("something was unpickled")


def main() -> None:
    sys.addaudithook(refuse)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    zero = rank == 0
    assert from_rank_zero([3, "x", None] if zero else None) == [3, "x", None]
    assert from_all_ranks([[rank, [rank] * rank]]) == [[[0, []]], [[1, [1]]]]
    given = Told(torch.arange(5), torch.tensor([True, False]), torch.zeros(0))
    told = tensors_from_rank_zero(Told, given if zero else None)
    assert told is not None
    for field in fields(Told):
        assert torch.equal(getattr(told, field.name), getattr(given, field.name))
        assert getattr(told, field.name).dtype == getattr(given, field.name).dtype
    assert tensors_from_rank_zero(Told, None) is None
    dist.barrier()
    dist.destroy_process_group()
