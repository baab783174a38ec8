"""Writes and checks the hashes of a directory's files: `manifest.json`, {"sha256": {file: hex}}.

A flipped byte in the manifest is detected too: a hash no longer matches, or the JSON is invalid.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from paceline.errors import DataLoss

MANIFEST = "manifest.json"


def file_hash(path: Path) -> str:
    """sha256 of a file's bytes, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_hashes(directory: Path, known: Mapping[str, str] | None = None) -> None:
    """Writes the manifest of all files below the directory.

    `known`: existing hashes by path relative to the directory, computed while the files were
    written.
    """
    hashes = dict(known or {})
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name != MANIFEST and name not in hashes:
            hashes[name] = file_hash(path)
    text = json.dumps({"sha256": hashes}, indent=1, sort_keys=True) + "\n"
    (directory / MANIFEST).write_text(text, encoding="utf-8")


def read_hashes(directory: Path) -> dict[str, str]:
    """The hash of each file. Raises DataLoss if the manifest cannot be read."""
    path = directory / MANIFEST
    try:
        hashes = json.loads(path.read_text(encoding="utf-8"))["sha256"]
        if not hashes or not all(isinstance(one, str) for one in hashes.values()):
            raise ValueError("no hash of a file")
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise DataLoss(f"{path} is no list of hashes", seen=str(error)[:120]) from error
    return dict(hashes)


def check_hashes(directory: Path, part: int = 0, parts: int = 1, *, only: str = "") -> None:
    """Checks the files in the manifest against their hashes.

    Checks share `part` of `parts` shares, or the file `only`. Raises DataLoss with the name of the
    first file that differs or cannot be read.
    """
    hashes = read_hashes(directory)
    checked = {only: hashes.get(only, "")} if only else hashes
    for name, written in sorted(checked.items())[part::parts]:
        try:
            seen = file_hash(directory / name)
        except (OSError, ValueError) as error:
            raise DataLoss(f"{directory / name} cannot be read", seen=str(error)[:120]) from error
        if seen != written:
            raise DataLoss(f"{directory / name} is damaged", seen=seen, allowed=written)
