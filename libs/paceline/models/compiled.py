"""What is between two attentions of a decoder, as one compiled graph. Owns what is compiled, where
it is kept and what that needs; not when it is used.

The graph is a layer's finish_layer and the following one's project_inputs, compiled ahead of time
by torch's AOTInductor: weights are inputs and the number of rows is free from two on, so one graph
serves all layers, batches and versions of a model. It has no guards, which cost torch.compile
0.1 ms a call. Attention and the cache are not in it: a compiled write into the static cache copies
the cache.

A compiler takes a quarter of a minute, in a process of its own, once for each shape of a model:
graphs are kept in the user's cache (XDG_CACHE_HOME) and loaded in no time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.models import decoder
from paceline.models.config import ModelConfig
from paceline.models.decoder import Between, LayerWeights, finish_layer, project_inputs
from paceline.telemetry import get_logger

COMPILE_S = 300.0
"""A compiler that takes longer is given up."""
ROWS = 8
"""Of the example that is traced; the graph takes two and more."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """What a graph is compiled for."""

    hidden: int
    attended: int
    """Nq D"""
    projected: int
    """(Nq + 2 Nkv) D"""
    intermediate: int
    eps: float
    qkv_bias: bool
    output_bias: bool
    dtype: str

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype) -> GraphSpec:
        """The graph of a model."""
        heads = config.num_heads + 2 * config.num_kv_heads
        return cls(
            config.hidden_size,
            config.num_heads * config.head_dim,
            heads * config.head_dim,
            config.intermediate_size,
            config.rms_norm_eps,
            config.qkv_bias,
            config.output_bias,
            str(dtype).removeprefix("torch."),
        )

    @property
    def name(self) -> str:
        """Another one for other shapes, sources, releases of torch and processors."""
        sources = [Path(str(one)).read_bytes() for one in (__file__, decoder.__file__)]
        made_by = [torch.__version__, torch.backends.cpu.get_cpu_capability()]
        said = json.dumps([asdict(self), made_by]).encode()
        return hashlib.sha256(b"\0".join([said, *sources])).hexdigest()[:32]


class _BetweenLayers(nn.Module):
    """finish_layer, then project_inputs of the following layer."""

    def __init__(self, spec: GraphSpec) -> None:
        super().__init__()
        self._spec = spec

    def forward(self, x: Tensor, attended: Tensor, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        """`parts`: see _parts."""
        output, post_norm, gate_up, down, input_norm, qkv, *biases = parts
        given = iter(biases)
        layer = LayerWeights(
            input_norm=input_norm,
            qkv=qkv,
            qkv_bias=next(given) if self._spec.qkv_bias else None,
            qk_norm=None,
            output=output,
            output_bias=next(given) if self._spec.output_bias else None,
            post_norm=post_norm,
            gate_up=gate_up,
            down=down,
        )
        x = finish_layer(layer, x, attended, self._spec.eps)
        return x, project_inputs(layer, x, self._spec.eps)


def _parts(layer: LayerWeights, following: LayerWeights) -> list[Any]:
    """Of a layer what comes behind its attention, of the following one what comes before."""
    biases = (following.qkv_bias, layer.output_bias)
    return [
        layer.output,
        layer.post_norm,
        layer.gate_up,
        layer.down,
        following.input_norm,
        following.qkv,
        *(one for one in biases if one is not None),
    ]


def compiled_between(config: ModelConfig, dtype: torch.dtype) -> Between | None:
    """The graph of a model, compiled where nobody has before; None where the compiler fails or
    takes longer than COMPILE_S, which is said.

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
    spec = GraphSpec.of(config, dtype)
    path = graphs_folder() / f"{spec.name}.pt2"
    if not path.exists():
        log.info("compiling", seconds_at_most=COMPILE_S, graph=str(path))
        if (why := _compiled_apart(spec, path)) is not None:
            log.warning("not compiled; the engine is as without", why=why)
            return None
    graph: Any = torch._inductor.aoti_load_package(str(path))

    def between(
        layer: LayerWeights, following: LayerWeights, x: Tensor, attended: Tensor
    ) -> tuple[Tensor, Tensor]:
        # boxed_run: what a call of the graph adds to it is a third of its time
        x, qkv = graph.loader.boxed_run([x, attended, *_parts(layer, following)])
        return x, qkv

    return between


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


def _compiled_apart(spec: GraphSpec, path: Path) -> str | None:
    """Compiles in a process of its own, so that the engine holds nothing of the compiler; why it
    failed, None: it is there.
    """
    command = [sys.executable, "-m", __name__, json.dumps(asdict(spec)), str(path)]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=COMPILE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no graph after {COMPILE_S:.0f} s"
    if done.returncode == 0 and path.exists():
        return None
    return f"status {done.returncode}: {done.stderr.strip()[-500:]}"


def compile_to(spec: GraphSpec, path: Path) -> None:
    """The graph at `path`; of several processes that want it one compiles."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return
        made = path.with_suffix(f".{os.getpid()}.pt2")
        rows = torch.export.Dim("rows", min=2, max=1 << 20)
        example = _example(spec)
        free: tuple[Any, ...] = ({0: rows}, {0: rows}, [None] * len(example[2]))
        with torch.no_grad():
            exported = torch.export.export(_BetweenLayers(spec), example, dynamic_shapes=free)
            torch._inductor.aoti_compile_and_package(exported, package_path=str(made))
        made.replace(path)


def _example(spec: GraphSpec) -> tuple[Tensor, Tensor, list[Tensor]]:
    dtype = getattr(torch, spec.dtype)
    sizes: list[tuple[int, ...]] = [
        (spec.hidden, spec.attended),
        (spec.hidden,),
        (2 * spec.intermediate, spec.hidden),
        (spec.hidden, spec.intermediate),
        (spec.hidden,),
        (spec.projected, spec.hidden),
        *([(spec.projected,)] if spec.qkv_bias else []),
        *([(spec.hidden,)] if spec.output_bias else []),
    ]
    parts = [torch.ones(size, dtype=dtype) for size in sizes]
    x = torch.ones(ROWS, spec.hidden, dtype=dtype)
    return x, torch.ones(ROWS, spec.attended, dtype=dtype), parts


def main(arguments: Sequence[str]) -> int:
    """`python -m paceline.models.compiled SPEC PATH`: compiles one graph."""
    spec, path = arguments
    compile_to(GraphSpec(**json.loads(spec)), Path(path))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
