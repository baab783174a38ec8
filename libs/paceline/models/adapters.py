"""Versions that contain only additions to the start policy: W + scale B A for some of its matrices
(LoRA, Hu et al. 2021, arXiv 2106.09685).

Transferred and stored versions are small. The product is added tensor by tensor in float32 while a
version is read, so engines, profiles and updates in place see whole weights.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import DataLoss, WeightsError
from paceline.models.loading import check_tensors, read_tensors, weight_files
from paceline.tensors import ADAPTERS, DOCUMENTS
from paceline.whole_files import file_hash

FILE = DOCUMENTS[ADAPTERS]
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of the names of A [rank, in] and B [out, rank], after the name of their matrix."""


@dataclass(frozen=True, slots=True)
class AddedAdapters:
    """Content of a version's document."""

    scale: float
    """Factor of every product B A."""
    start: str
    """See `hash_of_start`."""
    stored: str = ""
    """Dtype of the start's embedding and head. Their bytes determine the head's hash. Used by the
    sender.
    """

    def text(self) -> str:
        """The document as text for a manifest."""
        return json.dumps({"scale": self.scale, "start": self.start})


def read_version(path: Path, start: Path | None) -> Mapping[str, Tensor]:
    """All tensors of a policy's version, as stored; adapters are added to the model in `start`.

    Raises as read_tensors, and WeightsError for adapters of another start policy or of absent
    matrices.
    """
    if not (path / FILE).is_file():
        return read_tensors(path)
    added = _read_document(path / FILE)
    found = hash_of_start(start) if start is not None else "none"
    if start is None or found != added.start:
        message = "these adapters were trained over another start policy"
        seen = added.start
        raise WeightsError(message, seen=seen, allowed=f"{found}, of {start}", reason="OTHER_START")
    return MergedTensors(read_tensors(start), read_tensors(path), added.scale)


class MergedTensors(Mapping[str, Tensor]):
    """A model's tensors; the adapters' products are added on access."""

    def __init__(
        self, start: Mapping[str, Tensor], adapters: Mapping[str, Tensor], scale: float
    ) -> None:
        """Raises WeightsError for adapters that do not match the model, or are not finite."""
        self._start, self._adapters, self._scale = start, adapters, scale
        shapes: dict[str, tuple[int, ...]] = {}
        for name in adapters:
            stem = name.removesuffix(DOWN).removesuffix(UP)
            weight = start.get(f"{stem}.weight")
            if stem == name or weight is None or weight.ndim != 2:
                message = "an adapter of no matrix of the start policy"
                allowed = f"a matrix's name, with {DOWN} or {UP}"
                raise WeightsError(message, seen=name, allowed=allowed)
            rank = adapters[name].shape[0 if name.endswith(DOWN) else -1]
            shapes[stem + DOWN] = (rank, weight.shape[1])
            shapes[stem + UP] = (weight.shape[0], rank)
        check_tensors(adapters, shapes)

    def __getitem__(self, name: str) -> Tensor:
        weight, stem = self._start[name], name.removesuffix(".weight")
        if stem + UP not in self._adapters:
            return weight
        down, up = self._adapters[stem + DOWN], self._adapters[stem + UP]
        return torch.addmm(weight.float(), up.float(), down.float(), alpha=self._scale)

    def __iter__(self) -> Iterator[str]:
        return iter(self._start)

    def __len__(self) -> int:
        return len(self._start)


def hash_of_start(directory: Path) -> str:
    """Name of a start policy: the sha256 of its weights' files, 16 hex digits.

    Raises InvalidInput for a directory without weights.
    """
    files = weight_files(directory)
    return _hash_of(tuple((one, one.stat().st_size, one.stat().st_mtime_ns) for one in files))


@lru_cache(maxsize=4)
def _hash_of(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Cached while the files are unchanged, since reading them takes a second per gigabyte."""
    hashes = "".join(file_hash(path) for path, _, _ in files)
    return hashlib.sha256(hashes.encode()).hexdigest()[:16]


def _read_document(path: Path) -> AddedAdapters:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        added = AddedAdapters(float(found["scale"]), str(found["start"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataLoss(f"{path} describes no adapters", seen=str(error)[:120]) from error
    if not isfinite(added.scale):
        raise WeightsError(f"scale in {path.name}", seen=added.scale, allowed="finite")
    return added
