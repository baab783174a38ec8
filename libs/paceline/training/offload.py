"""Frees the device memory of tensors while another process computes on the device."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline.training.shards import local_of


@dataclass(frozen=True, slots=True)
class Aside:
    """A tensor's values while its device memory is free."""

    copy: Tensor
    nbytes: int
    """Bytes of its storage: shards are padded beyond the tensor's view."""


def lay_aside(
    tensors: Mapping[str, Tensor], into: Mapping[str, Aside] | None = None
) -> dict[str, Aside]:
    """Copies tensors to the CPU (pinned with CUDA) and frees their device memory; each tensor has
    its own storage. `into`: the result of an earlier call, which is overwritten.

    The tensors keep their identity, so views and the optimiser's references stay valid.
    """
    aside = {}
    for key, tensor in tensors.items():
        if into is None:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        else:
            copy = into[key].copy
        aside[key] = Aside(copy.copy_(tensor.detach()), tensor.untyped_storage().nbytes())
    for tensor in tensors.values():
        tensor.untyped_storage().resize_(0)
    return aside


@torch.no_grad()
def bring_back(tensors: Mapping[str, Tensor], aside: Mapping[str, Aside]) -> None:
    """Undoes `lay_aside`."""
    for key, tensor in tensors.items():
        tensor.untyped_storage().resize_(aside[key].nbytes)
        tensor.copy_(aside[key].copy)


def give_back_cached() -> None:
    """Returns torch's cached memory to CUDA: freed blocks and cuBLAS workspaces, 32 MiB per stream
    of a Hopper GPU, which the next product allocates again. No effect on a CPU.
    """
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


class Offload:
    """Tensors that leave their device and return together, including sharded and quantised ones."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._parts = {_key(part): part for tensor in tensors for part in _plain_parts(tensor)}
        self._aside: dict[str, Aside] | None = None
        self._away = False

    def leave(self) -> None:
        """Copies the values to the CPU and frees the device memory."""
        if not self._away:
            self._aside = lay_aside(self._parts, self._aside)
            self._away = True
            give_back_cached()

    def enter(self) -> None:
        """Undoes `leave`."""
        if self._away:
            assert self._aside is not None
            bring_back(self._parts, self._aside)
            self._away = False

    def numbers(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor, on either device; read only."""
        part = local_of(tensor)
        if not self._away:
            return part
        if is_traceable_wrapper_subclass(part):
            return _rebuilt(part, {name: self.numbers(one) for name, one in _inner(part)})
        assert self._aside is not None
        return self._aside[_key(part)].copy


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors of a rank's part: codes and scales of a quantised tensor."""
    part = local_of(tensor)
    if is_traceable_wrapper_subclass(part):
        for _, inner in _inner(part):
            yield from _plain_parts(inner)
    else:
        yield part


def _inner(tensor: Any) -> list[tuple[str, Tensor]]:
    return [(name, getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]


def _rebuilt(tensor: Any, parts: dict[str, Tensor]) -> Tensor:
    context = tensor.__tensor_flatten__()[1]
    made: Tensor = type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
    return made


def _key(tensor: Tensor) -> str:
    return str(tensor.untyped_storage()._cdata)
