"""Speculators by name, by import path and by file."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.arm_names import read_arm
from paceline.errors import ConfigError
from paceline.plugins import import_object
from paceline.speculators.kinds import SPECULATORS, SpeculatorKind, find_kind
from paceline.speculators.net import net_of, trained_net

TWIN = Path(__file__).parents[2] / "twin_kind.py"


def test_a_kind_is_found_by_name_by_import_path_and_by_file(tmp_path: Path) -> None:
    assert find_kind("eagle") is SPECULATORS["eagle"]
    assert find_kind("twin_kind:KIND").trained
    copy = tmp_path / "mine.py"
    shutil.copy(TWIN, copy)
    mine = find_kind(f"{copy}:KIND")
    assert mine.trained
    assert mine.name == "twin"
    assert find_kind(f"{copy}:KIND") is mine, (
        "a file is one module, so that its classes are equal wherever it is named"
    )


@pytest.mark.parametrize(
    "name", ["eagel", "no.such.module:KIND", "twin_kind:NONE", "twin_kind:TwinNet", "/no.py:KIND"]
)
def test_what_is_no_kind_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        find_kind(name)


def test_a_file_that_fails_says_why_each_time(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_package\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match="no_such_package"):
            find_kind(f"{broken}:KIND")


@pytest.mark.parametrize("name", [name for name, kind in SPECULATORS.items() if kind.trained])
def test_a_wrong_option_is_refused_with_those_there_are(name: str) -> None:
    net = trained_net(name)
    with pytest.raises(ConfigError, match=f"option steps_ of {name}") as refused:
        net.read_options({"steps_": 3})
    assert all(option in str(refused.value) for option in net.Options.model_fields)


def test_a_speculator_without_weights_is_not_trained() -> None:
    with pytest.raises(ConfigError, match="without weights"):
        trained_net("ngram")


@pytest.mark.parametrize("kind", SPECULATORS.values(), ids=SPECULATORS)
def test_every_entry_names_classes_that_exist_and_a_network_that_points_back(
    kind: SpeculatorKind,
) -> None:
    assert callable(import_object(str(kind.drafter)))
    if kind.trained:
        assert net_of(kind).kind is kind
    assert all(read_arm(arm) is not None for arm in kind.arms)


def test_a_network_that_names_another_kind_is_refused() -> None:
    misled = replace(find_kind("twin_kind:KIND"), name="misled")
    with pytest.raises(ConfigError, match="names another kind; seen: twin; allowed: misled"):
        net_of(misled)


def test_the_list_of_kinds_imports_no_torch() -> None:
    code = "import sys, paceline.speculators.kinds; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
