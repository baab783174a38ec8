"""Gathers sharded tensors and returns whole tensors unchanged."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def whole_of(tensor: Tensor) -> Tensor:
    """The whole tensor; a collective if the tensor is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
