"""Lines of span files."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

from paceline.report.spans import read_spans


def test_lines_cut_by_a_kill_are_left_out(tmp_path: Path, synthetic: ModuleType) -> None:
    whole = json.dumps(synthetic.span("step", "coordinator", 1, 0, 5))
    (tmp_path / "a.jsonl").write_text(whole + "\n" + whole[: len(whole) // 2] + "\n[1]\n")
    assert [span.name for span in read_spans(tmp_path)] == ["step"]


def test_a_run_without_spans_has_none(tmp_path: Path) -> None:
    assert list(read_spans(tmp_path / "missing")) == []
