"""The one directory of a user."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.local import user_directory as module
from paceline.local.user_directory import short_directory, user_directory


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_made_for_this_user_alone_and_found_again(temporary: Path) -> None:
    directory = user_directory()
    assert directory.parent == temporary
    assert directory.stat().st_mode & 0o777 == 0o700
    assert user_directory() == directory


@pytest.mark.parametrize("trap", ["link", "open", "file"])
def test_a_directory_that_somebody_else_may_have_laid_out_is_refused(
    temporary: Path, trap: str
) -> None:
    directory = user_directory()
    directory.rmdir()
    if trap == "link":
        (temporary / "elsewhere").mkdir(mode=0o700)
        directory.symlink_to(temporary / "elsewhere")
    elif trap == "open":
        directory.mkdir()
        directory.chmod(0o777)
    else:
        directory.touch(mode=0o600)
    with pytest.raises(ConfigError) as caught:
        user_directory()
    assert str(directory) in str(caught.value)


def test_the_short_directory_does_not_follow_tmpdir(temporary: Path) -> None:
    found = short_directory()
    assert not found.is_relative_to(temporary)
    assert found.stat().st_mode & 0o777 == 0o700
    assert found.stat().st_uid == os.getuid()


def test_a_short_place_that_somebody_else_holds_gives_way_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, free = tmp_path / "taken", tmp_path / "free"
    free.mkdir()
    (laid_out := taken / f"paceline-{os.getuid()}").mkdir(parents=True)
    laid_out.chmod(0o777)
    places = (str(taken), str(tmp_path / "absent"), str(free))
    monkeypatch.setattr(module, "_SHORT_PLACES", places)
    assert short_directory().parent == free
    monkeypatch.setattr(module, "_SHORT_PLACES", places[:2])
    with pytest.raises(ConfigError, match="no directory with a short path"):
        short_directory()
