"""Commands that are a module of a service: the CLI hands the whole line over and imports none of
it.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app


@pytest.mark.parametrize(("name", "module"), [("train", "offline"), ("export", "export")])
def test_a_tools_options_and_help_go_to_its_module(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda path, argv: started.append(argv))
    module = f"paceline.services.drafter_trainer.{module}"
    for line in (["--help"], ["--data", "x.jsonl", "--ranks", "2", "--no-resume"]):
        assert CliRunner().invoke(app, ["drafter", name, *line]).exit_code == 0
        assert started.pop() == [sys.executable, "-m", module, *line]
    assert find_spec(module) is not None
