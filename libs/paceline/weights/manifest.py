"""What a version consists of: building, checking and cutting a manifest.

Owns the stream's layout; no transport.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from paceline.errors import InvalidInput, WeightsError
from paceline.tensors import MAX_TENSORS, NamedTensor, TensorLayout, is_finite
from paceline.v1.engine_pb2 import WeightTarget
from paceline.v1.weights_pb2 import WEIGHT_ENCODING_FULL, Manifest, TensorSpec, WeightEncoding

TARGET_NAMES = {1: "policy", 2: "drafter", 3: "policy_head"}
"""Word of each WeightTarget, used in messages and directory names."""

CONFIG, ACCEPTANCE = "config", "acceptance"
DOCUMENTS = {CONFIG: "config.json", ACCEPTANCE: "acceptance.json"}
"""Keys of a manifest's metadata that hold the text of a JSON object, and the file beside the
tensors that it becomes: what the tensors are, and what of a drafter's drafts is accepted.
"""
MAX_DOCUMENT_BYTES = 64 << 10

MIN_CHUNK_BYTES = 4 << 10
MAX_CHUNK_BYTES = 4 << 20
"""Bounds of chunk_bytes; the upper one stays below the servers' message cap (8 MiB)."""


def target_name(target: int) -> str:
    """Word of a target; InvalidInput when it is none."""
    if target not in TARGET_NAMES:
        raise InvalidInput("weight target is unknown", seen=target, allowed=TARGET_NAMES)
    return TARGET_NAMES[target]


def build_manifest(
    target: WeightTarget | int,
    version: int,
    tensors: Sequence[NamedTensor],
    *,
    chunk_bytes: int = 1 << 20,
    lm_head_hash: str = "",
    metadata: Mapping[str, str] | None = None,
) -> Manifest:
    """Manifest of a full push of `tensors` in this order; reads every byte.

    Raises WeightsError when a number is not finite.
    """
    check_finite(tensors)
    manifest = Manifest(
        target=WeightTarget.Name(target),
        version=version,
        chunk_bytes=chunk_bytes,
        encoding=WEIGHT_ENCODING_FULL,
        lm_head_hash=lm_head_hash,
        metadata=metadata or {},
        tensors=_specs(tensors),
        total_bytes=sum(tensor.layout.nbytes for tensor in tensors),
    )
    check_manifest(manifest, max_bytes=manifest.total_bytes)
    checksums = (
        zlib.crc32(data) for _, data in cut_chunks(manifest, tensors, range(chunk_count(manifest)))
    )
    manifest.content_hash = content_hash(checksums)
    return manifest


def _specs(tensors: Iterable[NamedTensor]) -> Iterator[TensorSpec]:
    """One tensor behind the other, without a gap."""
    offset = 0
    for tensor in tensors:
        nbytes = tensor.layout.nbytes
        yield TensorSpec(
            name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, offset=offset, nbytes=nbytes
        )
        offset += nbytes


def check_finite(tensors: Iterable[NamedTensor]) -> None:
    """Raises WeightsError for a tensor with NaN or infinity: no version with one is served."""
    for tensor in tensors:
        if not is_finite(tensor):
            raise WeightsError(
                f"tensor {tensor.name} holds numbers that are not finite",
                reason="NOT_FINITE",
                seen="NaN or infinity",
                allowed="finite numbers",
            )


def content_hash(checksums: Iterator[int]) -> str:
    """Name of the content: sha256 over the chunks' CRC-32, each a little-endian u32, hex."""
    return hashlib.sha256(b"".join(crc.to_bytes(4, "little") for crc in checksums)).hexdigest()


def check_manifest(manifest: Manifest, *, max_bytes: int) -> None:
    """Raises InvalidInput unless the manifest can be received: known names, offsets without gap or
    overlap, documents that are JSON objects of at most MAX_DOCUMENT_BYTES.
    """
    target_name(manifest.target)
    for key in DOCUMENTS:
        if key in manifest.metadata:
            _check_document(key, manifest.metadata[key])
    if manifest.encoding != WEIGHT_ENCODING_FULL:
        seen = _encoding_name(manifest.encoding)
        raise InvalidInput(
            "this receiver takes full pushes only", seen=seen, allowed="WEIGHT_ENCODING_FULL"
        )

    if not MIN_CHUNK_BYTES <= manifest.chunk_bytes <= MAX_CHUNK_BYTES:
        allowed = f"{MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}"
        raise InvalidInput(
            "chunk_bytes is out of range", seen=manifest.chunk_bytes, allowed=allowed
        )

    if not 0 < manifest.total_bytes <= max_bytes:
        raise InvalidInput(
            "total_bytes is out of range", seen=manifest.total_bytes, allowed=f"1 to {max_bytes}"
        )

    _check_tensors(manifest)


def _check_tensors(manifest: Manifest) -> None:
    """Raises InvalidInput unless the tensors fill the stream one after the other."""
    if len(manifest.tensors) > MAX_TENSORS:
        raise InvalidInput(
            "a push has too many tensors",
            seen=len(manifest.tensors),
            allowed=f"at most {MAX_TENSORS}",
        )

    offset = 0
    names = set()
    for spec in manifest.tensors:
        layout = TensorLayout(spec.name, spec.dtype, tuple(spec.shape))
        if spec.name in names:
            raise InvalidInput("two tensors of a manifest have the same name", seen=spec.name)
        if spec.nbytes != layout.nbytes:
            raise InvalidInput(
                f"nbytes of {spec.name} does not fit its shape",
                seen=spec.nbytes,
                allowed=layout.nbytes,
            )
        if spec.offset != offset:
            fault = "overlaps" if spec.offset < offset else "leaves a gap"
            raise InvalidInput(f"offset of {spec.name} {fault}", seen=spec.offset, allowed=offset)
        names.add(spec.name)
        offset += spec.nbytes

    if offset != manifest.total_bytes:
        raise InvalidInput(
            "total_bytes is not the sum of the tensors", seen=manifest.total_bytes, allowed=offset
        )


def _check_document(key: str, text: str) -> None:
    size = len(text.encode())
    if size > MAX_DOCUMENT_BYTES:
        raise InvalidInput(
            f"{key} of a version is too long",
            seen=f"{size} bytes",
            allowed=f"{MAX_DOCUMENT_BYTES} bytes",
        )
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{key} of a version is not JSON", seen=str(error)[:120]) from error
    if not isinstance(document, dict):
        raise InvalidInput(
            f"{key} of a version is no JSON object", seen=text[:120], allowed="an object"
        )


def layouts(manifest: Manifest) -> list[TensorLayout]:
    """Tensors of the stream, in order, without bytes."""
    return [TensorLayout(spec.name, spec.dtype, tuple(spec.shape)) for spec in manifest.tensors]


def chunk_count(manifest: Manifest) -> int:
    """Number of chunks of the stream."""
    return int(-(-manifest.total_bytes // manifest.chunk_bytes))


def chunk_span(manifest: Manifest, index: int) -> tuple[int, int]:
    """Byte range of chunk `index`; InvalidInput when there is none."""
    if not 0 <= index < chunk_count(manifest):
        raise InvalidInput(
            "chunk index is out of range", seen=index, allowed=f"0 to {chunk_count(manifest) - 1}"
        )
    start = index * manifest.chunk_bytes
    return start, min(start + manifest.chunk_bytes, manifest.total_bytes)


def cut_chunks(
    manifest: Manifest, tensors: Sequence[NamedTensor], wanted: Sequence[int]
) -> Iterator[tuple[int, memoryview]]:
    """(index, bytes) of each wanted chunk; a view where the chunk lies within one tensor, else a
    joined copy.

    `wanted` ascends. Raises InvalidInput when the tensors are not those of the manifest.
    """
    described = [(spec.name, spec.dtype, tuple(spec.shape)) for spec in manifest.tensors]
    given = [(tensor.name, tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    if described != given:
        odd = next(
            (pair for pair in zip(given, described, strict=False) if pair[0] != pair[1]),
            (len(given), len(described)),
        )
        raise InvalidInput("tensors are not those of the manifest", seen=odd[0], allowed=odd[1])

    first = 0
    for index in wanted:
        start, end = chunk_span(manifest, index)
        while manifest.tensors[first].offset + manifest.tensors[first].nbytes <= start:
            first += 1
        yield index, _slice(manifest, tensors, first, start, end)


def _slice(
    manifest: Manifest, tensors: Sequence[NamedTensor], first: int, start: int, end: int
) -> memoryview:
    """Bytes [start, end) of the stream; tensor `first` holds byte `start`."""
    parts = []
    while start < end:
        offset = manifest.tensors[first].offset
        part = tensors[first].view[start - offset : end - offset]
        parts.append(part)
        start += len(part)
        first += 1
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def _encoding_name(encoding: int) -> str:
    known = encoding in WeightEncoding.values()
    return str(WeightEncoding.Name(encoding)) if known else str(encoding)
