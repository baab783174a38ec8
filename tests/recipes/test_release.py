"""The recipe of a release in CONTRIBUTING.md, executed on copies of the files it edits."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest
from packaging.version import Version

from paceline.local.patience import patient

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def release(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / ".ci/release", *words],
        capture_output=True,
        text=True,
        timeout=patient(30),
        check=False,
    )


def version_of(tree: Path) -> Version:
    return Version(tomllib.loads((tree / "pyproject.toml").read_text())["project"]["version"])


def next_of(version: Version) -> str:
    return version.base_version if version.is_prerelease else f"{version.major + 1}.0.0"


def test_what_was_unreleased_becomes_a_section_with_todays_date(tree: Path) -> None:
    before, old = version_of(tree), (tree / "CHANGELOG.md").read_text()
    new = next_of(before)
    done = release(new, tree)
    assert done.returncode == 0, done.stderr
    assert f"git tag -a v{new}" in done.stdout
    assert version_of(tree) == Version(new)
    today = datetime.now(UTC).date()
    text = (tree / "CHANGELOG.md").read_text()
    assert text.replace(f"## {new} ({today})\n\n", "", 1).replace("\n\n\n", "\n\n") == old
    assert text.index("## Unreleased\n") < text.index(f"## {new} ({today})\n") < text.index("\n- ")


def test_a_dev_version_leaves_the_changelog_as_it_is(tree: Path) -> None:
    old = (tree / "CHANGELOG.md").read_bytes()
    assert release(next_of(version_of(tree)), tree).returncode == 0
    released = (tree / "CHANGELOG.md").read_bytes()
    assert released != old
    assert release("99.1.0.dev0", tree).returncode == 0
    assert version_of(tree) == Version("99.1.0.dev0")
    assert (tree / "CHANGELOG.md").read_bytes() == released


def test_a_second_release_needs_changes_and_a_later_version(tree: Path) -> None:
    assert release("98.0.0", tree).returncode == 0
    after = [(tree / name).read_bytes() for name in ("pyproject.toml", "CHANGELOG.md")]
    for version, why in (
        ("98.0.1", "nothing is unreleased"),
        ("97.0.0", "the version is 98.0.0; seen: 97.0.0; allowed: a later one"),
        ("ninety", "not a version; seen: ninety"),
    ):
        done = release(version, tree)
        assert done.returncode == 1
        assert why in done.stderr
    assert [(tree / name).read_bytes() for name in ("pyproject.toml", "CHANGELOG.md")] == after


def test_the_changelog_goes_by_release_newest_first_and_the_version_is_not_behind() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    first, *others = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert first == "Unreleased"
    released = [re.fullmatch(r"(\S+) \(\d{4}-\d{2}-\d{2}\)", one) for one in others]
    assert all(released), others
    versions = [Version(one[1]) for one in released if one]
    assert versions == sorted(versions, reverse=True)
    assert not versions or version_of(ROOT) >= versions[0]
