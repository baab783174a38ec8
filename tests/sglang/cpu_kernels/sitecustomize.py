"""Runs at the start of every Python process that has this folder on its path; it must cost next to
nothing.

Owns three things. The folder `sglang-cpu` of the environment joins the path: it holds a torchvision
that SGLang imports, for image models only, and that nobody else may find. And torchvision gets an
empty `_meta_registrations`, since its own fails on import where its compiled half, linked to CUDA,
does not load. SGLang's torch code of experts is ours (sgl_kernel/experts.py). Another sitecustomize
further down the path, which this one hides, is run as well.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType


def _run_hidden(name: str = "sitecustomize") -> None:
    here = Path(__file__).resolve().parent
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    spec = PathFinder.find_spec(name, others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


sys.path.append(str(Path(sys.prefix) / "sglang-cpu"))
sys.modules.setdefault(
    "torchvision._meta_registrations", ModuleType("torchvision._meta_registrations")
)
_experts = ModuleType("sglang.srt.layers.moe.fused_moe_native")
# torch is imported on SGLang's first access
_experts.__getattr__ = lambda name: getattr(import_module("sgl_kernel.experts"), name)  # type: ignore[method-assign]
sys.modules.setdefault(_experts.__name__, _experts)
_run_hidden()
