"""Writes and reads sharded tensors and Hugging Face directories, and moves pieces between ranks.

FSDP2 shards tensors by rows. Each file has its rank's rows of a sharded tensor; the header's
metadata holds the first row and the total number of rows under `rows`. Other tensors are whole in
rank 0's file, as all are in a file without such metadata.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.errors import ConfigError, DataLoss
from paceline.models.reading import TEMPLATE_FOLDER
from paceline.tensors import NamedTensor, TensorLayout, from_numpy, safetensors_header
from paceline.training.process import from_all_ranks
from paceline.whole_files import sync_file

ROWS = "rows"
Piece = tuple[int, int | None, Any]
"""(first row, rows of the whole tensor, or None for a whole piece, slices of the piece)."""


def rows_of(count: int, ranks: int, rank: int) -> slice:
    """A rank's rows under FSDP2: even pieces of the first dimension, rounded up, as far as the rows
    reach.
    """
    piece = -(-count // ranks)
    return slice(min(rank * piece, count), min((rank + 1) * piece, count))


def local_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, live; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's rows of `whole`, as `like` of the same shape is sharded; all rows if `like` is
    whole.
    """
    here = _sharded_rows(like)
    return whole if here is None else whole[here]


def write_shard(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    rank: int,
    wrote: Callable[[], None] = lambda: None,
) -> str:
    """Writes what this rank holds of the tensors; returns the file's sha256, hex. The file is
    synced to the disk. Calls `wrote` after each tensor and after each part that is on the disk.
    """
    held, rows = [], {}
    for name, tensor in tensors.items():
        here = _sharded_rows(tensor)
        if here is not None:
            rows[name] = [here.start, tensor.shape[0]]
        if rank == 0 or (here is not None and here.start < here.stop):
            held.append(named_tensor(name, local_of(tensor)))

    digest = hashlib.sha256()
    header = safetensors_header((one.layout for one in held), {ROWS: json.dumps(rows)})
    with path.open("wb") as file:
        for view in (memoryview(header), *(one.view for one in held)):
            digest.update(view)
            file.write(view)
            wrote()
    sync_file(path, wrote)
    return digest.hexdigest()


def read_shards(files: Sequence[Path], tensors: Mapping[str, Tensor]) -> set[str]:
    """Overwrites the tensors, for any sharding, from the files; returns the names found.

    Raises DataLoss when a shape or dtype differs or rows are missing, and the errors of safetensors
    and JSON for an invalid file.
    """
    with ExitStack() as stack:
        found = _pieces(files, tensors, stack)
        for name, pieces in found.items():
            _fill(name, tensors[name], pieces)
    return set(found)


def read_each(files: Sequence[Path], like: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors of the files by name, sorted, one at a time, with the shapes and dtypes of
    `like`. Raises as read_shards.
    """
    with ExitStack() as stack:
        for name, pieces in sorted(_pieces(files, like, stack).items()):
            whole = torch.empty(like[name].shape, dtype=like[name].dtype)
            _fill(name, whole, pieces)
            yield name, whole


def _pieces(
    files: Sequence[Path], names: Iterable[str], stack: ExitStack
) -> dict[str, list[Piece]]:
    """The pieces of each tensor in the files, which stay open until the stack ends."""
    pieces: dict[str, list[Piece]] = {}
    for path in files:
        file = stack.enter_context(safe_open(path, framework="pt"))
        rows = json.loads((file.metadata() or {}).get(ROWS, "{}"))
        for name in sorted(set(file.keys()) & set(names)):
            piece = (*rows.get(name, (0, None)), file.get_slice(name))
            pieces.setdefault(name, []).append(piece)
    return pieces


def _fill(name: str, tensor: Tensor, pieces: Sequence[Piece]) -> None:
    if not tensor.shape:
        ((_, _, whole),) = pieces
        _take(name, local_of(tensor), whole[...], list(whole.get_shape()), tensor)
        return
    here = _sharded_rows(tensor) or slice(0, tensor.shape[0])
    held = 0
    for first, count, piece in pieces:
        shape = piece.get_shape()
        last = first + shape[0] if shape else first
        begin, end = max(first, here.start), max(min(last, here.stop), here.start)
        whole = [last if count is None else count, *shape[1:]]
        target = local_of(tensor)[begin - here.start : end - here.start]
        _take(name, target, piece[begin - first : max(end, begin) - first], whole, tensor)
        held += last - first
    if held != tensor.shape[0]:
        message = f"a checkpoint misses a part of {name}"
        raise DataLoss(message, seen=f"{held} rows", allowed=tensor.shape[0])


def _take(name: str, target: Tensor, part: Tensor, shape: Sequence[int], tensor: Tensor) -> None:
    """Copies a piece of a whole tensor of that shape into its place."""
    seen, allowed = (tuple(shape), part.dtype), (tuple(tensor.shape), tensor.dtype)
    if seen != allowed:
        raise DataLoss(f"{name} of the checkpoint differs", seen=seen, allowed=allowed)
    target.copy_(part)


def _sharded_rows(tensor: Tensor) -> slice | None:
    """Rows of a sharded tensor on this rank; None if it is whole."""
    if not isinstance(tensor, DTensor):
        return None
    (placement,), mesh = tensor.placements, tensor.device_mesh
    if not placement.is_shard():
        return None
    assert placement.is_shard(0), f"only rows are sharded here, not {placement}"
    here = rows_of(tensor.shape[0], mesh.size(), mesh.get_local_rank())
    assert len(tensor.to_local()) == here.stop - here.start
    return here


def named_tensor(name: str, tensor: Tensor) -> NamedTensor:
    """The bytes of a contiguous tensor on the CPU."""
    if tensor.dtype == torch.bfloat16:
        return from_numpy(name, tensor.detach().view(torch.uint16).numpy(), "BF16")
    return from_numpy(name, tensor.detach().numpy())


def tensors_of(state: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a nested state by their paths of keys, joined by "/"."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield path + key, value
        elif isinstance(value, Mapping):
            yield from tensors_of(value, f"{path}{key}/")


PIECE_BYTES = 64 << 20
"""Most bytes per transfer, except for a single longer row."""


@torch.no_grad()
def convert(rows: Tensor, into: Tensor) -> None:
    """Copies rows from any device into CPU memory, which may have another dtype."""
    step = max(1, PIECE_BYTES * len(rows) // max(1, rows.numel() * into.dtype.itemsize))
    for start in range(0, len(rows), step):
        piece = slice(start, start + step)
        into[piece].copy_(rows[piece].to(into.dtype))


def bytes_in_order(own: memoryview) -> Iterator[memoryview]:
    """On rank 0 the bytes of all ranks, by rank, each piece valid until the next one; empty on the
    other ranks, which must iterate too. Collective.
    """
    rank = dist.get_rank()
    for owner, nbytes in enumerate(from_all_ranks(len(own))):
        for start in range(0, nbytes, PIECE_BYTES):
            if owner == rank == 0:
                yield own[start : start + PIECE_BYTES]
            elif rank == owner:
                dist.send(torch.frombuffer(own[start : start + PIECE_BYTES], dtype=torch.uint8), 0)
            elif rank == 0:
                piece = torch.empty(min(PIECE_BYTES, nbytes - start), dtype=torch.uint8)
                dist.recv(piece, owner)
                yield piece.numpy().data


_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".index.json")


def load_causal_lm(directory: Path, dtype: torch.dtype) -> Any:
    """The transformers module of a directory, on the CPU. Raises ConfigError if it has no model."""
    from transformers import AutoModelForCausalLM  # takes seconds to import, and only ranks need it

    try:
        return AutoModelForCausalLM.from_pretrained(
            directory,
            local_files_only=True,
            use_safetensors=True,
            dtype=dtype,
            attn_implementation="sdpa",
        )
    except (OSError, ValueError) as error:
        message = f"no model can be loaded from {directory}: {error}"
        raise ConfigError(message, seen=directory) from error


def write_causal_lm(
    weights: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, Sequence[int]],
    start: Path,
    directory: Path,
) -> None:
    """Writes fp32 weights with the other files of the start model.

    `weights` are in the order of `shapes`; at most one of the tensors is in memory at a time.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in start.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHT_FILES):
            shutil.copyfile(path, directory / path.name)
    templates = start / TEMPLATE_FOLDER
    if templates.is_dir():
        shutil.copytree(templates, directory / TEMPLATE_FOLDER, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    described = json.dumps({**config, "dtype": "float32"}, indent=2)
    (directory / "config.json").write_text(described, encoding="utf-8")
    layouts = [TensorLayout(name, "F32", tuple(shape)) for name, shape in shapes.items()]
    with (directory / "model.safetensors").open("wb") as file:
        file.write(safetensors_header(layouts, {"format": "pt"}))
        for (name, tensor), layout in zip(weights, layouts, strict=True):
            one = named_tensor(name, tensor.contiguous())
            assert one.layout == layout, f"{one.layout} is written in the place of {layout}"
            file.write(one.view)
