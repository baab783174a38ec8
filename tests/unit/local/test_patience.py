"""Deadlines stretch with the load of the machine, or by the factor that is given."""

from __future__ import annotations

import os

import pytest

from paceline.errors import ConfigError
from paceline.local.patience import patient


def test_a_deadline_is_five_times_as_long_at_a_load_of_four_a_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PACELINE_PATIENCE", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (8.0, 0.0, 0.0))
    assert patient(60.0) == 300.0
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 8.0, 8.0))
    assert patient(60.0) == 60.0


def test_a_given_factor_wins_over_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_PATIENCE", "2.5")
    assert patient(10.0) == 25.0


@pytest.mark.parametrize("given", ["much", "0", "-1", "nan", "inf"])
def test_a_factor_that_is_no_positive_number_is_refused_with_its_value(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_PATIENCE", given)
    with pytest.raises(ConfigError) as refused:
        patient(10.0)
    assert refused.value.seen == given


@pytest.mark.timeout(7)
def test_the_timeout_of_a_test_is_stretched_too(request: pytest.FixtureRequest) -> None:
    stretched, own = [mark.args[0] for mark in request.node.iter_markers("timeout")]
    assert own == 7
    assert stretched >= 7 * float(os.environ.get("PACELINE_PATIENCE", "1"))
