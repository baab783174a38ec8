"""Writes small files whole or not at all."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ResourceExhausted


def write_whole(path: Path, text: str) -> None:
    """Write a file that its owner alone can read; a kill leaves the old content or the new. Makes
    its directory. Not synced: a loss of power may leave neither.

    Raises ResourceExhausted when it cannot be written.
    """
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch(mode=0o600)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ResourceExhausted(f"{path} cannot be written", seen=error) from error
