"""The part of the forward that torch.compile may have. Owns what is compiled and what that needs; not when it is used.

Compiled is finish_layer: output projection, norm and MLP, one graph for all layers, row counts and versions of a model.
Attention and the cache are not: a compiled write into the static cache copies the whole cache, five times the step.
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
    """finish_layer under torch.compile. Its first calls take seconds: one row is another graph than several.

    Raises ConfigError when the C++ compiler that torch would call is not there.
    """
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            "torch.compile needs a C++ compiler", seen=f"no {compiler} on PATH", allowed="g++, or the one CXX names"
        )
    return torch.compile(finish_layer, dynamic=True)
