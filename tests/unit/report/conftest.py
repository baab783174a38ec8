"""The made-up run of synthetic_run.py, read as a report reads a run."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import synthetic_run

from paceline.report.journal import RunHistory, read_history


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    return synthetic_run


@pytest.fixture
def history(tmp_path: Path, synthetic: ModuleType) -> RunHistory:
    """30 steps."""
    synthetic.write_journal(tmp_path / "journal.jsonl", 30)
    return read_history(tmp_path / "journal.jsonl")
