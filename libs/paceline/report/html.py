"""report.html: one self-contained page about a run. Owns its layout, no drawing and no figure."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from paceline.report.journal import RunHistory
from paceline.report.spans import SpanReport
from paceline.report.summary import Summary


def write_report(path: Path, summary: Summary, history: RunHistory, spans: SpanReport) -> None:
    """Write the page whole or not at all."""
    page = f"<!doctype html><meta charset='utf-8'><pre>{escape(json.dumps(summary, indent=2))}</pre>"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)
