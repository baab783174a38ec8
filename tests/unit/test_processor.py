"""Fields of /proc/cpuinfo are read by name; memory goes into huge pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.processor import HUGE_PAGE, processor_field, use_huge_pages


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


def test_memory_goes_into_huge_pages_with_its_numbers() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").is_file():
        pytest.skip("this system has no huge pages")
    parts = [torch.arange(3 * HUGE_PAGE, dtype=torch.int32) for _ in range(2)]
    before = huge_bytes()
    use_huge_pages((one.data_ptr(), one.nbytes) for one in parts)
    if (gained := huge_bytes() - before) == 0:
        pytest.skip("this system gives no huge pages")
    # How many pages there are depends on the free memory.
    assert gained % HUGE_PAGE == 0
    assert gained <= sum(one.nbytes for one in parts) + 2 * HUGE_PAGE
    for one in parts:
        assert torch.equal(one, torch.arange(3 * HUGE_PAGE, dtype=torch.int32))


def huge_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHuge"))
