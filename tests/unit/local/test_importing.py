"""How a process imports its modules."""

from __future__ import annotations

import gc

import pytest

from paceline.local.importing import uncollected


def test_what_is_imported_is_never_looked_through() -> None:
    before = gc.get_freeze_count()
    try:
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    try:
        with pytest.raises(ImportError), uncollected():
            raise ImportError("no such module")
        assert gc.isenabled()
    finally:
        gc.unfreeze()
