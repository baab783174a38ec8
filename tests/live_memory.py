"""Measures memory: bytes of the tensors that this process can reach, and its resident bytes."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages of this rank's parts of the tensors."""
    sizes = {}
    for one in tensors:
        part = one.to_local() if isinstance(one, DTensor) else one
        if part.layout == torch._mkldnn:  # type: ignore[attr-defined]  # has no storage
            sizes[id(part)] = part.numel() * part.element_size()
            continue
        storage = part.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def live_bytes() -> int:
    """Bytes of the storages of all tensors that Python objects refer to, and of gradients."""
    gc.collect()
    found = [
        one
        for one in gc.get_objects()
        if issubclass(type(one), Tensor) and not isinstance(one, DTensor) and not one.is_meta
    ]
    weights = (one for one in found if isinstance(one, nn.Parameter))
    gradients = [one.grad for one in weights if one.grad is not None]
    return storage_bytes([*found, *gradients])


def resident_bytes() -> int:
    """Bytes of this process in physical memory, without freed blocks that malloc keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def device_bytes() -> tuple[int, int]:
    """Bytes in use on the CUDA device: of this process's tensors, and of all processes."""
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), total - free
