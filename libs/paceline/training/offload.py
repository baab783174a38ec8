"""Frees the device memory of tensors while another process computes on the device."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline.training.shards import local_of


def give_back_cached() -> None:
    """Returns torch's cached memory to CUDA: freed blocks and cuBLAS workspaces, 32 MiB per stream
    of a Hopper GPU, which the next product allocates again. No effect on a CPU.
    """
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


_Key = tuple[int, ...]


class Offload:
    """Tensors that leave their device and return together, including sharded and quantised ones.

    They keep their identity, so views and the optimiser's references stay valid.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._parts = {_key(part): part for tensor in tensors for part in _plain_parts(tensor)}
        self._copies: dict[_Key, Tensor] = {}  # on the CPU, pinned with CUDA
        self._nbytes: dict[_Key, int] = {}  # of the storage: views share it, and shards are padded
        self._away = False

    @torch.no_grad()
    def leave(self) -> None:
        """Copies the values to the CPU and frees the device memory."""
        if self._away:
            return
        for key, tensor in self._parts.items():
            if key not in self._copies:
                pinned = tensor.is_cuda
                self._copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._copies[key].copy_(tensor)
            self._nbytes[key] = tensor.untyped_storage().nbytes()
        for tensor in self._parts.values():
            tensor.untyped_storage().resize_(0)
        self._away = True
        give_back_cached()

    @torch.no_grad()
    def enter(self) -> None:
        """Undoes `leave`."""
        if self._away:
            for key, tensor in self._parts.items():
                if not tensor.untyped_storage().nbytes():
                    tensor.untyped_storage().resize_(self._nbytes[key])
                tensor.copy_(self._copies[key])
            self._away = False

    def numbers(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor, on either device; read only."""
        part = local_of(tensor)
        if not self._away:
            return part
        if is_traceable_wrapper_subclass(part):
            return _rebuilt(part, {name: self.numbers(one) for name, one in _inner(part)})
        return self._copies[_key(part)]


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


def _key(tensor: Tensor) -> _Key:
    """Storage, offset and shape: FSDP2's gradients are views of one storage."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), *tensor.shape
