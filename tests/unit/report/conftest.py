"""The made-up run of synthetic.py, read as a report reads a run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from paceline.report.journal import RunHistory, read_history
from paceline.report.spans import SpanReport, read_report

_spec = importlib.util.spec_from_file_location(
    "synthetic_run", Path(__file__).with_name("synthetic.py")
)
assert _spec is not None
assert _spec.loader is not None
_synthetic = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_synthetic)


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    return _synthetic


@pytest.fixture
def history(tmp_path: Path, synthetic: ModuleType) -> RunHistory:
    """30 steps."""
    synthetic.write_journal(tmp_path / "journal.jsonl", 30)
    return read_history(tmp_path / "journal.jsonl")


@pytest.fixture
def spans(tmp_path: Path, synthetic: ModuleType) -> SpanReport:
    synthetic.write_spans(tmp_path / "spans")
    return read_report(tmp_path / "spans")
