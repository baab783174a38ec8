"""AdamW with moments in eight bits (Dettmers et al. 2021, arXiv 2110.02861), by torchao.

Each block of 256 numbers has one scale, its largest absolute value. Moments with fewer than 4096
numbers, or with a partial block, stay float32.
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
    """An optimiser with zero moments under these names. Raises ConfigError if torchao is not
    installed.

    `settings`: arguments of torch's AdamW.
    """
    if find_spec("torchao") is None:
        raise ConfigError(
            "moments of eight bits need torchao: pip install 'paceline[int8]'",
            seen="optimizer.moments=int8",
            allowed="float32 without it",
        )
    from torchao.optim import AdamW8bit  # takes seconds to import
    from torchao.optim.subclass_8bit import OptimState8bit

    class Exact(AdamW8bit):
        """Writing moments as float32 and reading them again preserves every bit."""

        @staticmethod
        def _subclass_zeros(p: Tensor, signed: bool, block_size: int) -> Tensor:
            made = OptimState8bit.zeros(p.shape, signed, block_size, p.device, dtype=p.dtype)
            if signed:
                # torchao's lowest level is -0.993. A block with a negative largest number would get
                # another scale after every reading.
                made.qmap[0] = -1.0
            return made

        def step(self, closure: Any = None) -> Any:
            # On a CPU these kernels need a compiler and tens of seconds to compile.
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
