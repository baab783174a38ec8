"""Hosts of a network copy a version from each other: what each sends, by its interface."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from net_hosts import WITH_NAMESPACES

from benchmarks.copies import CopiesPlan, one_push

pytestmark = [WITH_NAMESPACES, pytest.mark.network, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("fan_out", "copies"), [(0, [3, 0, 0, 0]), (1, [1, 1, 1, 0]), (2, [2, 1, 0, 0])]
)
def test_a_host_sends_a_version_to_as_many_as_copy_from_it(
    fan_out: int, copies: Sequence[int]
) -> None:
    found = one_push(CopiesPlan(hosts=3, megabytes=32, mbit=1000), fan_out)
    assert found.sent == pytest.approx(copies, abs=0.1)
