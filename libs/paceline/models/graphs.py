"""Compiles a piece of a model ahead of time and keeps what came of it. Owns the compiler, the
folder of graphs and what both need; what is compiled is each spec's affair (models/between.py,
speculators/eagle/graph.py).

torch's AOTInductor makes a library that is called with tensors: weights are inputs and the number
of rows is free, so one graph serves all layers, batches and versions of a shape. It has no guards,
which cost torch.compile 0.1 ms a call. Attention and the cache are in no graph: a compiled write
into the static cache copies the cache.

A compiler takes a quarter of a minute, in a process of its own, once for each shape: graphs are
kept in the user's cache (XDG_CACHE_HOME) and loaded in no time. A file is named by what it was made
of and by its bytes, since a damaged library computes other numbers without a word.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.file_hashes import file_hash
from paceline.models import decoder, products
from paceline.plugins import import_object
from paceline.telemetry import get_logger

COMPILE_S = 300.0
"""A compiler that takes longer is given up."""
ROWS = 8
"""Of the example that is traced; the graph takes any number."""
DIGITS = 32
"""Of hashes in the name of a file."""

Graph: TypeAlias = Callable[[list[Tensor]], list[Tensor]]
"""What a spec's module makes of its inputs: those with rows, then the parts."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class GraphSpec(ABC):
    """What a graph is compiled for: a dataclass of plain values, at the top of its module."""

    @abstractmethod
    def module(self) -> nn.Module:
        """What is compiled: forward takes the inputs that have rows, then a list of parts."""

    @abstractmethod
    def example(self) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs of ROWS rows, and parts, of the shapes and dtypes that it is called with."""

    @property
    def name(self) -> str:
        """Another one for other shapes, sources, releases of torch and processors."""
        specs = [one.__module__ for one in type(self).__mro__ if issubclass(one, GraphSpec)]
        modules = {*specs, decoder.__name__, products.__name__}
        sources = [Path(str(sys.modules[one].__file__)).read_bytes() for one in sorted(modules)]
        made_by = [torch.__version__, torch.backends.cpu.get_cpu_capability()]
        said = json.dumps([type(self).__qualname__, asdict(self), made_by]).encode()
        return hashlib.sha256(b"\0".join([said, *sources])).hexdigest()[:DIGITS]


def compiled(spec: GraphSpec) -> Graph | None:
    """The graph of a spec, compiled where nobody has before or where what is kept is damaged; None
    where the compiler fails or takes longer than COMPILE_S, which is said.

    Raises ConfigError when the C++ compiler that torch would call is not there, or when others may
    write where graphs are kept.
    """
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            "a compiled engine needs a C++ compiler",
            seen=f"no {compiler} on PATH",
            allowed="g++, or the one CXX names",
        )
    folder = graphs_folder()
    path = _kept(spec.name, folder)
    if path is None:
        log.info("compiling", seconds_at_most=COMPILE_S, what=type(spec).__name__, to=str(folder))
        why = _compiled_apart(spec, folder)
        path = _kept(spec.name, folder)
        if path is None:
            log.warning("not compiled; the engine is as without", why=why)
            return None
    try:
        loaded: Any = torch._inductor.aoti_load_package(str(path))
    except RuntimeError as error:  # whole, but not for the libraries of this machine
        log.warning("not compiled; the engine is as without", why=str(error))
        return None
    # boxed_run: what a call of the graph adds to it is a third of its time
    graph: Graph = loaded.loader.boxed_run
    return graph


def graphs_folder() -> Path:
    """Where graphs are kept, this user's alone: they are programs. Raises ConfigError."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "paceline" / "graphs"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(
            "others may write where compiled graphs are kept",
            seen=f"{folder}, mode {found.st_mode & 0o777:o}, user {found.st_uid}",
            allowed=f"a folder of user {os.geteuid()} that no other may write",
        )
    return folder


def _kept(name: str, folder: Path) -> Path | None:
    """The graph of that name as it was made; one that is damaged is removed, which is said."""
    for path in sorted(folder.glob(f"{name}-*.pt2")):
        try:
            hashed = file_hash(path)
        except FileNotFoundError:  # removed by another engine that starts
            continue
        if path.stem == f"{name}-{hashed[:DIGITS]}":
            return path
        log.warning("a compiled graph is damaged; it is removed", graph=str(path))
        path.unlink(missing_ok=True)
    return None


def _compiled_apart(spec: GraphSpec, folder: Path) -> str:
    """Compiles in a process of its own, so that the engine holds nothing of the compiler; returns
    why that failed, if it did.
    """
    kind = f"{type(spec).__module__}:{type(spec).__qualname__}"
    command = [sys.executable, "-m", __name__, kind, json.dumps(asdict(spec)), str(folder)]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=COMPILE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no graph after {COMPILE_S:.0f} s"
    return f"status {done.returncode}: {done.stderr.strip()[-500:]}"


def compile_to(spec: GraphSpec, folder: Path) -> None:
    """The graph in that folder; of several processes that want it one compiles."""
    with (folder / f"{spec.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _kept(spec.name, folder):
            return
        made = folder / f"{spec.name}.{os.getpid()}.pt2"
        rows = torch.export.Dim("rows", min=1, max=1 << 20)
        with_rows, parts = spec.example()
        free: tuple[Any, ...] = (*({0: rows} for _ in with_rows), [None] * len(parts))
        with torch.no_grad():
            exported = torch.export.export(spec.module(), (*with_rows, parts), dynamic_shapes=free)
            torch._inductor.aoti_compile_and_package(exported, package_path=str(made))
        made.replace(folder / f"{spec.name}-{file_hash(made)[:DIGITS]}.pt2")


def main(arguments: Sequence[str]) -> int:
    """`python -m paceline.models.graphs MODULE:SPEC VALUES FOLDER`: compiles one graph."""
    kind, values, folder = arguments
    spec: GraphSpec = import_object(kind)(**json.loads(values))
    compile_to(spec, Path(folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
