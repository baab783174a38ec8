"""Serves later versions of a model in the storages of the first (FlashRL; Liu et al. 2025). Every
holder of a tensor, such as a view or a captured CUDA graph, then computes with the new numbers.

A version is checked: `staged`. Serving it is then one copy per tensor (`serve_staged`). A version
that is served in its stored dtype is copied from its own mapped files, which may lose their names
meanwhile. Any other version is first rounded and assembled tensor by tensor (loading.py) into an
unnamed file. This needs memory for the largest tensor as loaded; staged data is in the page cache
and on the disk.

An interrupted copy leaves earlier tensors new and later tensors old. The process then ends, and its
successor reads the serving set from its own files.
"""

from __future__ import annotations

import math
import mmap
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from paceline.errors import ResourceExhausted
from paceline.models import loading, products
from paceline.models.adapters import read_version
from paceline.models.config import ModelConfig
from paceline.models.decoder import DecoderWeights, Matrix
from paceline.models.profiles import Profile, chosen_profile
from paceline.models.quantised import QuantisedMatrix
from paceline.models.rope import rotation_table

ALIGNED = 64
"""Alignment in bytes of each tensor in the file."""


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A version in files, to be read in the layout of the serving storages."""

    profile: Profile | None
    tensors: Mapping[str, Tensor]
    """Views of a mapped file, or joined rows of one, on the CPU."""
    head_hash: str
    path: Path
    """Directory from which the version was read."""


@dataclass(frozen=True, slots=True)
class _Stored(Mapping[str, Tensor]):
    """Tensors by place, assembled at each access."""

    records: Mapping[str, loading.ServedTensor]
    stored: Mapping[str, Tensor]

    def __getitem__(self, place: str) -> Tensor:
        return self.records[place].unrounded(self.stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An engine's way of serving the versions of one model."""

    config: ModelConfig
    dtype: torch.dtype
    positions: int
    """Rows of the rotation table, at least the cache capacity."""
    profile: Profile | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    start: Path | None = None
    """The model to which versions of adapters are added."""

    @property
    def number_format(self) -> str:
        """Number format for the spans of tokens."""
        return self.profile.name if self.profile else str(self.dtype).removeprefix("torch.")

    def under(self, profile: str) -> ServedModel:
        """The same model under a profile; "": not rounded. Raises InvalidInput for an
        unknown name.
        """
        return replace(self, profile=chosen_profile(profile))

    def load(self, path: Path) -> DecoderWeights:
        """Loads a version into new storages.

        Raises InvalidInput, DataLoss, WeightsError or ConfigError.
        """
        return self.build(read_version(path, self.start))

    def build(self, tensors: Mapping[str, Tensor]) -> DecoderWeights:
        """Builds a model in new memory, beside the serving weights. The largest tensor is
        temporarily in memory twice. Embedding, norms and head are never rounded.

        Raises WeightsError (see check_tensors) or as `quantised`.
        """
        named = loading.checked_model(self.config, tensors)
        built = {
            record.place: record.built(named, self.dtype, self.device, self.profile)
            for record in loading.model_records(self.config)
        }
        rotation = rotation_table(self.config.rope, self.config.head_dim, self.positions)
        head_hash = loading.hash_head(named)
        return loading.assembled(self.config, built, rotation.to(self.device), head_hash)

    def _storages(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Storages of a checked model's tensors by name, built as they are requested."""
        for record in loading.model_records(self.config):
            matrix = record.built(tensors, self.dtype, self.device, self.profile)
            yield from storages_of({record.place: matrix})

    def _serves_as_stored(self, tensors: Mapping[str, Tensor]) -> bool:
        whole = self.profile is None and isinstance(tensors, dict)  # else adapters are added
        return whole and {one.dtype for one in tensors.values()} == {self.dtype}

    def staged(self, path: Path) -> StagedWeights:
        """Reads a version. An unnamed file is in its directory if that is writable, else among
        temporary files.

        Raises as `load`, and ResourceExhausted if the disk is full.
        """
        named = loading.checked_model(self.config, read_version(path, self.start))
        tensors: Mapping[str, Tensor]
        if self._serves_as_stored(named):
            records = {record.place: record for record in loading.model_records(self.config)}
            tensors = _Stored(records, named)
        else:
            with _unnamed_file(path) as file:
                tensors = _written(file, self._storages(named))
        return StagedWeights(self.profile, tensors, loading.hash_head(named), path)


def serve_staged(weights: DecoderWeights, staged: StagedWeights) -> DecoderWeights:
    """The weights after copying each tensor of a version, staged for the same model and profile,
    into the present storages; `weights` itself if the version has the same numbers.

    If a copy raises, earlier tensors are new and later tensors are old.
    """
    found, changed = storages(weights), False
    for name, tensor in staged.tensors.items():
        changed |= overwrite(found[name], tensor)
    return replace(weights, head_hash=staged.head_hash) if changed else weights


def overwrite(storage: Tensor, numbers: Tensor) -> bool:
    """Replaces the numbers of a serving storage. Returns False if the storage had them before: a
    step without a gradient leaves the weights as they are.
    """
    if storage.device == numbers.device and torch.equal(*map(_bits, (storage, numbers))):
        return False
    storage.copy_(numbers)
    products.renew_copy(storage)
    return True


def _bits(numbers: Tensor) -> Tensor:
    return numbers.view(torch.uint8)


def beside(weights: DecoderWeights, staged: StagedWeights) -> DecoderWeights:
    """The version in new storages, with the parts common to all versions: for a version with
    another profile than the serving one.
    """
    device = weights.head.device
    built: dict[str, Matrix] = {}
    for name, tensor in staged.tensors.items():
        place, _, kind = name.rpartition(".")
        own = tensor.to(device, copy=True)
        if kind == "values" and staged.profile is not None:
            scales = staged.tensors[f"{place}.scales"].to(device, copy=True)
            built[place] = QuantisedMatrix(own, scales, staged.profile)
        elif kind != "scales":
            built[name] = own
    return loading.assembled(weights.config, built, weights.rotation, staged.head_hash)


def storages(weights: DecoderWeights) -> dict[str, Tensor]:
    """The second record: storages by name, a tied head under the embedding's alone."""
    parts: dict[str, Matrix] = {"embed": weights.embed}
    for index, layer in enumerate(weights.layers):
        for one in fields(layer):
            part = getattr(layer, one.name)
            if part is not None:
                parts[f"layers.{index}.{one.name}"] = part
    parts["norm"] = weights.norm
    if weights.head is not weights.embed:
        parts["head"] = weights.head
    return dict(storages_of(parts))


def storages_of(parts: Mapping[str, Matrix]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by name, both parts of a rounded matrix."""
    for place, part in parts.items():
        if isinstance(part, QuantisedMatrix):
            yield f"{place}.values", part.values
            yield f"{place}.scales", part.scales
        else:
            yield place, part


def _unnamed_file(directory: Path) -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(dir=directory)
    except OSError:  # a directory that this user cannot write to
        return tempfile.TemporaryFile()


def _written(file: IO[bytes], tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Views of the file after all tensors are written."""
    places: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
    end = 0
    for name, tensor in tensors:
        places[name] = (end, tensor.dtype, tuple(tensor.shape))
        raw = tensor.cpu().contiguous().view(torch.uint8).numpy()
        try:
            file.seek(end)
            file.write(raw.data)
            file.flush()
        except OSError as error:
            message = f"no room to stage {name}: {error.strerror}"
            seen = f"{end + raw.nbytes} bytes"
            raise ResourceExhausted(message, seen=seen, allowed="what the disk has left") from error
        end += -(-raw.nbytes // ALIGNED) * ALIGNED
    file.truncate(end)
    # Private: torch requires writable memory.
    mapped = mmap.mmap(file.fileno(), end, access=mmap.ACCESS_COPY)
    return {
        name: torch.frombuffer(mapped, dtype=dtype, count=math.prod(shape), offset=begin).view(
            shape
        )
        for name, (begin, dtype, shape) in places.items()
    }
