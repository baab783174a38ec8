"""The parts of a version: the layout of its content, and the checks of its manifest and files.

The module has no imports, so that readers of a file do not import the code for pushes.

The header of model.safetensors holds the content's hash (CRC-32 by chunk, see content_hash) and the
sha256 of manifest.json. The rest of the header follows from the manifest.
"""

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from google.protobuf import json_format

from paceline.errors import DataLoss, InvalidInput, WeightsError
from paceline.tensors import (
    DOCUMENTS,
    MAX_TENSORS,
    NamedTensor,
    TensorLayout,
    is_finite,
    safetensors_header,
)
from paceline.v1 import weights_pb2 as pb
from paceline.v1.engine_pb2 import WeightTarget
from paceline.weights.chunks import content_hash, in_threads

ENCODING_NAMES = {pb.WEIGHT_ENCODING_FULL: "full", pb.WEIGHT_ENCODING_SPARSE_DELTA: "sparse_delta"}
"""Word for each accepted encoding, used in reports and metrics."""

TARGET_NAMES = {1: "policy", 2: "drafter", 3: "policy_head"}
"""Word for each WeightTarget, used in messages and directory names."""

MIN_CHUNK_BYTES = 4 << 10
MAX_CHUNK_BYTES = 4 << 20
"""Bounds of chunk_bytes; the upper one stays below the servers' message cap (8 MiB)."""
CHUNK_BYTES = MAX_CHUNK_BYTES
"""Default chunk_bytes: each message costs both event loops some tenths of a millisecond."""


def target_name(target: int) -> str:
    """Word for a target; raises InvalidInput for an unknown one."""
    if target not in TARGET_NAMES:
        raise InvalidInput("weight target is unknown", seen=target, allowed=TARGET_NAMES)
    return TARGET_NAMES[target]


def version_name(manifest: pb.Manifest) -> str:
    """Target and version of a manifest in words."""
    return f"{target_name(manifest.target)} version {manifest.version}"


def unchecked_manifest(
    target: WeightTarget | int,
    version: int,
    layouts: Sequence[TensorLayout],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    lm_head_hash: str = "",
    metadata: Mapping[str, str] | None = None,
) -> pb.Manifest:
    """Manifest of a full push of tensors in this order, without checksums."""
    manifest = pb.Manifest(
        target=WeightTarget.Name(target),
        version=version,
        chunk_bytes=chunk_bytes,
        encoding=pb.WEIGHT_ENCODING_FULL,
        lm_head_hash=lm_head_hash,
        metadata=metadata or {},
        tensors=_specs(layouts),
        total_bytes=sum(layout.nbytes for layout in layouts),
    )
    check_manifest(manifest)
    return manifest


def whole_of(manifest: pb.Manifest) -> pb.Manifest:
    """The manifest of a full push of the version, as the spool keeps it."""
    if manifest.encoding == pb.WEIGHT_ENCODING_FULL:
        return manifest
    whole = pb.Manifest()
    whole.CopyFrom(manifest)
    whole.encoding = pb.WEIGHT_ENCODING_FULL
    whole.ClearField("base_version")
    whole.ClearField("delta")
    return whole


def _specs(layouts: Iterable[TensorLayout]) -> Iterator[pb.TensorSpec]:
    """Specs of adjacent tensors without gaps."""
    offset = 0
    for one in layouts:
        yield pb.TensorSpec(
            name=one.name, dtype=one.dtype, shape=one.shape, offset=offset, nbytes=one.nbytes
        )
        offset += one.nbytes


def check_finite(tensors: Iterable[NamedTensor]) -> None:
    """Raises WeightsError for a tensor with NaN or infinity; no such version is served."""
    if name := first_not_finite(tensors):
        raise not_finite(name)


def first_not_finite(tensors: Iterable[NamedTensor]) -> str:
    """Name of the first tensor with NaN or infinity; "" without such a tensor."""
    names = in_threads(lambda one: "" if is_finite(one) else one.name, tensors)
    return next(filter(None, names), "")


def not_finite(name: str) -> WeightsError:
    """The error for such a tensor."""
    return WeightsError(
        f"tensor {name} holds numbers that are not finite",
        reason="NOT_FINITE",
        seen="NaN or infinity",
        allowed="finite numbers",
    )


def check_manifest(manifest: pb.Manifest) -> None:
    """Raises InvalidInput unless the manifest is acceptable: known names, offsets without gap or
    overlap. The reader of a document checks it.
    """
    target_name(manifest.target)
    if manifest.encoding not in ENCODING_NAMES:
        seen = _encoding_name(manifest.encoding)
        allowed = ", ".join(map(pb.WeightEncoding.Name, ENCODING_NAMES))
        raise InvalidInput("encoding of a push is unknown", seen=seen, allowed=allowed)

    if not MIN_CHUNK_BYTES <= manifest.chunk_bytes <= MAX_CHUNK_BYTES:
        allowed = f"{MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}"
        message = "chunk_bytes is out of range"
        raise InvalidInput(message, seen=manifest.chunk_bytes, allowed=allowed)

    if not manifest.total_bytes:
        raise InvalidInput("a version has no bytes", seen=0, allowed="1 or more")

    _check_tensors(manifest)
    _check_delta(manifest)


def _check_delta(manifest: pb.Manifest) -> None:
    """Raises InvalidInput unless a delta has all delta fields, and a full push none."""
    is_delta = manifest.encoding == pb.WEIGHT_ENCODING_SPARSE_DELTA
    delta = manifest.delta
    if is_delta != manifest.HasField("delta") or (manifest.base_version and not is_delta):
        message = "a base and a delta stand in the manifest of a delta, and in no other"
        seen = f"{_encoding_name(manifest.encoding)} on version {manifest.base_version}"
        raise InvalidInput(message, seen=seen, allowed="all or nothing")
    if not is_delta:
        return
    if manifest.base_version == manifest.version:
        raise InvalidInput("a delta is its own base", seen=manifest.version, allowed="another")
    if not 0 < delta.nbytes <= manifest.total_bytes:
        message = "nbytes of a delta is out of range"
        raise InvalidInput(message, seen=delta.nbytes, allowed=f"1 to {manifest.total_bytes}")
    if not (manifest.content_hash and delta.stream_hash and delta.base_hash):
        message = "a delta names its content, its stream and its base"
        hashes = (manifest.content_hash, delta.stream_hash, delta.base_hash)
        raise InvalidInput(message, seen=hashes, allowed="three hashes")


def _check_tensors(manifest: pb.Manifest) -> None:
    """Raises InvalidInput unless the tensors fill the stream without gaps."""
    if len(manifest.tensors) > MAX_TENSORS:
        message = "a push has too many tensors"
        raise InvalidInput(message, seen=len(manifest.tensors), allowed=f"at most {MAX_TENSORS}")

    offset = 0
    names = set()
    for spec in manifest.tensors:
        layout = TensorLayout(spec.name, spec.dtype, tuple(spec.shape))
        if spec.name in names:
            raise InvalidInput("two tensors of a manifest have the same name", seen=spec.name)
        if spec.nbytes != layout.nbytes:
            message = f"nbytes of {spec.name} does not fit its shape"
            raise InvalidInput(message, seen=spec.nbytes, allowed=layout.nbytes)
        if spec.offset != offset:
            fault = "overlaps" if spec.offset < offset else "leaves a gap"
            raise InvalidInput(f"offset of {spec.name} {fault}", seen=spec.offset, allowed=offset)
        names.add(spec.name)
        offset += spec.nbytes

    if offset != manifest.total_bytes:
        message = "total_bytes is not the sum of the tensors"
        raise InvalidInput(message, seen=manifest.total_bytes, allowed=offset)


def views(manifest: pb.Manifest, content: memoryview) -> list[NamedTensor]:
    """The tensors as views of the whole content, in order."""
    return [
        NamedTensor(one.name, one.dtype, one.shape, content[spec.offset :][: spec.nbytes])
        for spec, one in zip(manifest.tensors, layouts(manifest), strict=True)
    ]


def layouts(manifest: pb.Manifest) -> list[TensorLayout]:
    """Tensors of the stream, in order, without bytes."""
    return [TensorLayout(spec.name, spec.dtype, tuple(spec.shape)) for spec in manifest.tensors]


def _encoding_name(encoding: int) -> str:
    known = encoding in pb.WeightEncoding.values()
    return str(pb.WeightEncoding.Name(encoding)) if known else str(encoding)


TENSORS, MANIFEST = "model.safetensors", "manifest.json"


def header_of(manifest: pb.Manifest, text: bytes, content: str) -> bytes:
    """The header of model.safetensors. `text`: manifest.json; `content`: hash of the stream."""
    described = {key: value for key, value in manifest.metadata.items() if key not in DOCUMENTS}
    bound = {"format": "pt", "content": content, "manifest": hashlib.sha256(text).hexdigest()}
    return safetensors_header(layouts(manifest), {**described, **bound})


def hash_of(manifest: pb.Manifest, stream: memoryview | bytes | bytearray) -> str:
    """content_hash of the whole stream."""
    view, step = memoryview(stream), manifest.chunk_bytes
    parts = (view[at : at + step] for at in range(0, len(view), step))
    return content_hash(in_threads(zlib.crc32, parts))


def read_manifest(directory: Path) -> pb.Manifest:
    """Raises DataLoss when manifest.json is absent or invalid."""
    path = directory / MANIFEST
    try:
        manifest = json_format.Parse(path.read_bytes(), pb.Manifest())
        check_manifest(manifest)
    except (OSError, ValueError, json_format.ParseError, InvalidInput) as error:
        raise DataLoss(f"{path} is not a manifest", seen=str(error)[:120]) from error
    return manifest


def check_spooled(directory: Path) -> None:
    """Reads a version's files; about 1 s per GB. Raises DataLoss with the name of a
    damaged file.
    """
    manifest = read_manifest(directory)
    path = directory / TENSORS
    try:
        with path.open("rb") as file:
            header = file.read(max(path.stat().st_size - manifest.total_bytes, 0))
            content = content_hash(_checksums(file, manifest.chunk_bytes))
        documents = {
            key: (directory / name).read_bytes()
            for key, name in DOCUMENTS.items()
            if key in manifest.metadata
        }
        text = (directory / MANIFEST).read_bytes()
    except OSError as error:
        raise DataLoss(f"{directory} cannot be read", seen=str(error)[:120]) from error
    if header != header_of(manifest, text, content):
        message = f"{path} is damaged, or {MANIFEST} beside it"
        raise DataLoss(message, seen=content, allowed=manifest.content_hash)
    for key, found in documents.items():
        if found != manifest.metadata[key].encode():
            raise DataLoss(f"{directory / DOCUMENTS[key]} is damaged", seen="another text")


def _checksums(file: BinaryIO, chunk_bytes: int) -> Iterator[int]:
    while data := file.read(chunk_bytes):
        yield zlib.crc32(data)
