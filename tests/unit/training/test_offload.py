"""Tensors give their memory back and have their numbers again afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torchao.optim.subclass_8bit import OptimState8bit

from paceline.training.offload import Offload
from paceline.training.shards import local_of

pytestmark = pytest.mark.usefixtures("one_rank")
NUMBERS = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


def tensors(mesh: DeviceMesh) -> dict[str, Tensor]:
    quantised = OptimState8bit.zeros(NUMBERS.shape)
    quantised.copy_(NUMBERS)
    return {
        "plain": NUMBERS.clone(),
        "sharded": distribute_tensor(NUMBERS.clone(), mesh, [Shard(0)]),
        "quantised": quantised,
        "empty": torch.zeros(0, 3),
    }


def storages(tensor: Tensor) -> Iterator[int]:
    for part in ("codes", "scale"):
        if hasattr(tensor, part):
            yield getattr(tensor, part).untyped_storage().nbytes()
    if type(tensor) is Tensor:
        yield tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("kind", ["plain", "sharded", "quantised", "empty"])
def test_what_has_left_holds_no_memory_is_read_from_the_copy_and_comes_back(
    mesh: DeviceMesh, kind: str
) -> None:
    one = tensors(mesh)[kind]
    before = local_of(one).clone() if kind != "quantised" else local_of(one).dequantize()
    offload = Offload([one])
    for _ in range(2):  # the second time into the memory of the first
        offload.leave()
        offload.leave()
        assert set(storages(local_of(one))) == {0}
        away = local_of(offload.numbers(one))
        found = away.dequantize() if kind == "quantised" else away
        assert torch.equal(found, before)
        offload.enter()
        offload.enter()
        here = local_of(one).dequantize() if kind == "quantised" else local_of(one)
        assert torch.equal(here, before)


def test_numbers_that_changed_between_two_absences_are_the_new_ones() -> None:
    one = NUMBERS.clone()
    offload = Offload([one])
    offload.leave()
    offload.enter()
    one.mul_(2)
    offload.leave()
    assert torch.equal(offload.numbers(one), NUMBERS * 2)
    offload.enter()
    assert torch.equal(one, NUMBERS * 2)


def test_views_of_one_storage_leave_and_come_back_each_with_its_numbers() -> None:
    flat = NUMBERS.flatten().clone()  # as FSDP2 keeps the gradients of a group of parameters
    views = [flat[:4096].view(32, 128), flat[4096:].view(32, 128), flat[4096:5000]]
    before = [one.clone() for one in views]
    offload = Offload(views)
    offload.leave()
    assert flat.untyped_storage().nbytes() == 0
    assert all(map(torch.equal, map(offload.numbers, views), before))
    offload.enter()
    assert all(map(torch.equal, views, before))
