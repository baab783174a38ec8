"""Zeroed tensors whose memory is taken page by page at the first write, and can be given back.

An unread part of a large tensor costs addresses alone. Other devices than Linux's CPU allocate all
of it at once and keep it.
"""

import ctypes
import math
import mmap
import os
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import ResourceExhausted

_ON_LINUX = sys.platform == "linux"
_NORESERVE = 0x4000
"""Linux's MAP_NORESERVE: the limit of promised memory does not count untouched pages."""
_libc = ctypes.CDLL(None, use_errno=True)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. Raises ResourceExhausted if the system has no such range of addresses."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not _ON_LINUX or device.type != "cpu" or not nbytes:
        return torch.zeros(*shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    try:
        memory = mmap.mmap(-1, nbytes, flags=flags)
    except OSError as error:
        raise ResourceExhausted("no memory for keys and values", seen=nbytes) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a write would take 2 MiB
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def give_back(tensor: Tensor) -> None:
    """Returns the whole pages of a contiguous part of such a tensor, which then holds zeros there.

    Numbers on its first and last page may stay. Raises OSError if the system refuses.
    """
    if not _ON_LINUX or tensor.device.type != "cpu":
        return
    start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    start, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if stop <= start:
        return
    place = ctypes.c_void_p(start), ctypes.c_size_t(stop - start)
    if _libc.madvise(*place, mmap.MADV_DONTNEED):
        number = ctypes.get_errno()
        raise OSError(number, f"madvise of {stop - start} bytes: {os.strerror(number)}")
