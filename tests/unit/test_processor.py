"""Fields of /proc/cpuinfo are read by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.processor import processor_field


def test_the_first_processor_speaks_and_a_name_that_is_not_there_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "cpuinfo"
    told.write_text("vendor_id\t: GenuineIntel\nmodel name\t: a: b\n\nvendor_id\t: Other\n")
    monkeypatch.setattr("paceline.processor.CPUINFO", told)
    assert processor_field("vendor_id") == "GenuineIntel"
    assert processor_field("model name") == "a: b"
    assert processor_field("model") == ""
    told.unlink()
    assert processor_field("vendor_id") == ""
