"""AdamW whose moments are kept in eight bits (Dettmers et al. 2021, arXiv 2110.02861), by torchao.

Blocks of 256 numbers have one scale, their largest size; moments of fewer than 4096 numbers, or of
no whole number of blocks, stay float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import ConfigError


def quantised_adamw(
    parameters: Iterable[Tensor], settings: Mapping[str, Any], moments: Iterable[str]
) -> Optimizer:
    """With moments of zeros under these names. Raises ConfigError where torchao is not installed.

    settings: of torch's AdamW.
    """
    if find_spec("torchao") is None:
        raise ConfigError(
            "moments of eight bits need torchao: pip install 'paceline[int8]'",
            seen="optimizer.moments=int8",
            allowed="float32 without it",
        )
    from torchao.optim import AdamW8bit  # seconds of import
    from torchao.optim.subclass_8bit import OptimState8bit

    class Exact(AdamW8bit):
        """Moments that are written as float32 and read again are the same bit for bit."""

        @staticmethod
        def _subclass_zeros(p: Tensor, signed: bool, block_size: int) -> Tensor:
            made = OptimState8bit.zeros(p.shape, signed, block_size, p.device, dtype=p.dtype)
            if signed:
                # torchao's lowest level is -0.993, so that a block whose largest number is negative
                # would have another scale after every reading.
                made.qmap[0] = -1.0
            return made

        def step(self, closure: Any = None) -> Any:
            # On a CPU its kernels take tens of seconds to compile, and a compiler.
            on_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
            with torch.compiler.set_stance("force_eager" if on_cpu else "default"):
                return super().step(closure)

    made = Exact(parameters, **settings)
    for group in made.param_groups:
        for parameter in group["params"]:
            fresh = {
                name: made._new_buffer(parameter, signed=not i) for i, name in enumerate(moments)
            }
            made.state[parameter] = {"step": torch.zeros(()), **fresh}
    return made
