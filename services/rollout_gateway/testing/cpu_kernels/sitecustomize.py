"""Runs at the start of every Python process that has this folder on its path; it must cost next to
nothing.

Owns two things. The folder `sglang-cpu` of the environment joins the path: it holds a torchvision
that SGLang imports, for image models only, and that nobody else may find. And torchvision gets an
empty `_meta_registrations`, since its own fails on import where its compiled half, linked to CUDA,
does not load. Another sitecustomize further down the path, which this one hides, is run as well.
"""

from __future__ import annotations

import sys
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
_run_hidden()
