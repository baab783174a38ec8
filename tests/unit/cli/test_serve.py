"""`paceline serve` becomes the service, its options being settings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines that the process would have become."""
    lines: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda path, argv: lines.append(argv))
    return lines


def test_options_outrank_overrides_and_name_their_setting(
    started: list[list[str]], tmp_path: Path
) -> None:
    words = ["gateway", "engine.threads=2", "--model", str(tmp_path), "--engine", "sglang"]
    words += ["--drafter", "ngram", "--http-port", "0", "--grpc-port", "7000", "--print-config"]
    words += ["--gateway", "1"]
    assert CliRunner().invoke(app, ["serve", *words]).exit_code == 0
    assert started == [
        [
            sys.executable,
            "-m",
            "paceline.services.rollout_gateway",
            "--print-config",
            "--gateway",
            "1",
            "engine.threads=2",
            f'model="{tmp_path}"',
            'engine.kind="sglang"',
            'drafter="ngram"',
            'addresses.http="127.0.0.1:0"',
            'addresses.gateway="127.0.0.1:7000"',
        ]
    ]


def test_a_service_has_no_settings_of_its_own_accord(started: list[list[str]]) -> None:
    assert CliRunner().invoke(app, ["serve", "policy-trainer"]).exit_code == 0
    assert started == [[sys.executable, "-m", "paceline.services.policy_trainer"]]


def test_an_unknown_service_is_refused_with_those_there_are(started: list[list[str]]) -> None:
    done = CliRunner().invoke(app, ["serve", "trainer"])
    assert done.exit_code == 2
    assert "drafter-trainer" in done.output
    assert started == []
