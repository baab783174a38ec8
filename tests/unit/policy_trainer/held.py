"""Counts the bytes that tensors hold."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Held(TorchDispatchMode):
    """Counts the bytes of all storages that operators have made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.is_mutable:
            return made  # views and in-place results use counted storage
        for one in tree_iter(made):
            if isinstance(one, torch.Tensor):
                self._count(one.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if size and key not in self._seen:
            self._seen.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._let_go, key, size)

    def _let_go(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size
