"""Gathers sharded tensors and returns whole tensors unchanged."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def whole_of(tensor: Tensor) -> Tensor:
    """A collective where the tensor is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
