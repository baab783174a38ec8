"""Remembers how many ranks an operator wants, beside the checkpoints: a trainer that is started
again has as many. Imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path

from paceline.errors import DataLoss
from paceline.whole_files import write_whole

FILE = "ranks.json"


def read_ranks(directory: Path, settings: int, most: int | None = None) -> int:
    """As many as were chosen in the place of `settings`, those of the settings; these where nobody
    has chosen, where they have changed since, or where there is room for `most` only. Raises
    DataLoss for a file that is not one of ours.
    """
    file = directory / FILE
    if not file.exists():
        return settings
    text = file.read_text(encoding="utf-8")
    try:
        found = json.loads(text)
        ranks, instead_of = int(found["ranks"]), int(found["instead_of"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataLoss(f"{file} does not say how many ranks there are", seen=text[:80]) from error
    if ranks < 1:
        raise DataLoss(f"{file} does not say how many ranks there are", seen=ranks, allowed="1 up")
    fits = most is None or ranks <= most
    return ranks if fits and instead_of == settings else settings


def write_ranks(directory: Path, ranks: int, settings: int) -> None:
    """In the place of what was chosen before. Raises ResourceExhausted where there is no room."""
    write_whole(directory / FILE, json.dumps({"ranks": ranks, "instead_of": settings}) + "\n")
