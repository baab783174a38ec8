"""Binds the files of a spooled version to each other, and detects any changed file.

The header of model.safetensors holds the content's hash (CRC-32 by chunk, see content_hash) and the
sha256 of manifest.json. The rest of the header follows from the manifest.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from google.protobuf import json_format

from paceline.errors import DataLoss, InvalidInput
from paceline.tensors import safetensors_header
from paceline.v1.weights_pb2 import Manifest
from paceline.weight_documents import DOCUMENTS
from paceline.weights.chunks import content_hash
from paceline.weights.manifest import check_manifest, layouts

TENSORS, MANIFEST = "model.safetensors", "manifest.json"


def header_of(manifest: Manifest, text: bytes, content: str) -> bytes:
    """The header of model.safetensors. `text`: manifest.json; `content`: hash of the stream."""
    described = {key: value for key, value in manifest.metadata.items() if key not in DOCUMENTS}
    bound = {"format": "pt", "content": content, "manifest": hashlib.sha256(text).hexdigest()}
    return safetensors_header(layouts(manifest), {**described, **bound})


def hash_of(manifest: Manifest, stream: memoryview | bytes | bytearray) -> str:
    """content_hash of the whole stream."""
    view, step = memoryview(stream), manifest.chunk_bytes
    return content_hash(zlib.crc32(view[at : at + step]) for at in range(0, len(view), step))


def read_manifest(directory: Path) -> Manifest:
    """Raises DataLoss when manifest.json is absent or invalid."""
    path = directory / MANIFEST
    try:
        manifest = json_format.Parse(path.read_bytes(), Manifest())
        check_manifest(manifest, max_bytes=manifest.total_bytes)
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
        raise DataLoss(
            f"{path} is damaged, or {MANIFEST} beside it",
            seen=content,
            allowed=manifest.content_hash,
        )
    for key, found in documents.items():
        if found != manifest.metadata[key].encode():
            raise DataLoss(f"{directory / DOCUMENTS[key]} is damaged", seen="another text")


def _checksums(file: BinaryIO, chunk_bytes: int) -> Iterator[int]:
    while data := file.read(chunk_bytes):
        yield zlib.crc32(data)
