"""The models that a run looks up on the Hub, and the values that their directories get."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli import run_files
from paceline.cli.run_files import found_models


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids that were looked for; each has a directory of its own."""
    ids: list[str] = []

    def directory(model: str, say: object) -> Path:
        ids.append(model)
        return Path("/cache") / model

    monkeypatch.setattr(run_files, "model_directory", directory)
    return ids


def test_every_section_gets_the_directory_of_its_model_which_is_looked_for_once(
    asked: list[str], tmp_path: Path
) -> None:
    (file := tmp_path / "run.toml").write_text(
        '[gateway]\nmodel = "acme/small"\n[policy_trainer]\nmodel = "acme/small"\n'
        f'[drafter_trainer]\nmodel = "{tmp_path}"\n'
    )
    assert found_models([file], [], print) == [
        "gateway.model=/cache/acme/small",
        "policy_trainer.model=/cache/acme/small",
    ]
    assert asked == ["acme/small"]


def test_trainers_without_a_model_train_the_gateways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (file := tmp_path / "run.toml").write_text('[gateway]\nmodel = "~/small"\n')
    own = "drafter_trainer.model=/other"
    assert found_models([file], [own], print) == [
        f"gateway.model={tmp_path}/small",
        f"policy_trainer.model={tmp_path}/small",
    ]
    assert found_models([file], [f"gateway.model={tmp_path}", own], print) == [
        f"policy_trainer.model={tmp_path}"
    ]


def test_what_is_given_on_the_command_line_wins(asked: list[str], tmp_path: Path) -> None:
    (file := tmp_path / "run.toml").write_text('[gateway]\nmodel = "acme/small"\n')
    assert found_models([file], ["gateway.model=acme/large@v2"], print) == [
        "gateway.model=/cache/acme/large@v2",
        "policy_trainer.model=/cache/acme/large@v2",
        "drafter_trainer.model=/cache/acme/large@v2",
    ]
    assert asked == ["acme/large@v2"]
