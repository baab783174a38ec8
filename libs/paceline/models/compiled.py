"""The part of the forward that torch.compile may have. Owns what is compiled and what that needs;
not when it is used.

Compiled is finish_layer: output projection, norm and MLP, one graph for all layers, row counts and
versions of a model. Attention and the cache are not: a compiled write into the static cache copies
the whole cache, five times the step of a small model, and the whole stack as one graph compiles for
minutes.

On the CPU measured (two cores, AVX-512) nothing is gained: every call checks its guards, about 0.1
ms. A step of 12 layers of 128 x 352 takes 3.0 instead of 1.8 ms, one of 8 layers of 512 x 1408
takes 10.7 instead of 9.9 ms.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys

import torch

from paceline.errors import ConfigError
from paceline.models.decoder import Finish, finish_layer


@functools.cache
def compiled_finish() -> Finish:
    """finish_layer under torch.compile. Its first calls take seconds: one row is another graph than
    several.

    Raises ConfigError when the C++ compiler that torch would call is not there.
    """
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            "torch.compile needs a C++ compiler",
            seen=f"no {compiler} on PATH",
            allowed="g++, or the one CXX names",
        )
    return torch.compile(finish_layer, dynamic=True)
