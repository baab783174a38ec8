"""A run's tokens: their creation, their readers and their place."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.config import RunConfig, SecurityConfig, ServiceConfig
from paceline.errors import ConfigError
from paceline.local.patience import patient
from paceline.local.tokens import announced, token_at, token_file, use_run_tokens
from paceline.local.user_directory import user_directory

VARIABLES = ("PACELINE_TOKEN", "PACELINE_AGENT_TOKEN")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServiceConfig:
    for name in VARIABLES:
        # set first, so that monkeypatch restores the variables after the test
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return ServiceConfig(run=RunConfig(dir=str(tmp_path / "run")))


def test_a_run_keeps_two_tokens_that_only_its_user_can_read(config: ServiceConfig) -> None:
    use_run_tokens(config)
    operator, agent = config.security.token, config.security.agent_token
    assert operator != agent
    assert min(len(operator), len(agent)) >= 43, "256 bits"
    for name, token in (("operator", operator), ("agent", agent)):
        file = token_file(config, name)
        assert (file.read_text(), file.stat().st_mode & 0o777) == (token, 0o600)
        assert file.parent.stat().st_mode & 0o077 == 0
    assert len(list(file.parent.iterdir())) == 2

    for name in VARIABLES:
        os.environ[name] = ""
    use_run_tokens(config)
    assert (config.security.token, config.security.agent_token) == (operator, agent)


@pytest.mark.slow
def test_services_that_start_together_get_the_same_tokens(
    config: ServiceConfig, tmp_path: Path
) -> None:
    program = (
        "import os\n"
        "from paceline.config import ServiceConfig\n"
        "from paceline.config import RunConfig\n"
        "from paceline.local.tokens import use_run_tokens\n"
        f"use_run_tokens(ServiceConfig(run=RunConfig(dir={str(tmp_path / 'run')!r})))\n"
        "print(os.environ['PACELINE_TOKEN'], os.environ['PACELINE_AGENT_TOKEN'])\n"
    )

    def started(_: int) -> str:
        return subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            timeout=patient(60),
        ).stdout

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(started, range(4)))) == 1


def test_a_token_of_the_environment_stands_and_false_makes_none(
    config: ServiceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = config.model_copy(update={"security": SecurityConfig(run_tokens=False)})
    use_run_tokens(off)
    assert (off.security.token, off.security.agent_token) == ("", "")
    assert not token_file(off, "operator").exists()

    monkeypatch.setenv("PACELINE_TOKEN", "mine")
    use_run_tokens(config)
    assert config.security.token == "mine"
    assert not token_file(config, "operator").exists()


def test_a_directory_that_cannot_hold_tokens_says_what_to_do(
    config: ServiceConfig, tmp_path: Path
) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError, match="run_tokens=false"):
        use_run_tokens(config)


def test_a_client_finds_the_token_by_the_address_while_somebody_listens(
    config: ServiceConfig,
) -> None:
    with announced({"127.0.0.1:7401": "a", "[::1]:7402": "b", "10.0.0.1:7403": "c"}):
        assert [token_at(f"localhost:{port}") for port in (7401, 7402, 7403)] == ["a", "b", ""]
        assert token_at("10.0.0.1:7401") == "", "another machine's port"
        with announced({"127.0.0.1:7401": "newer"}):
            assert token_at("127.0.0.1:7401") == "newer"
    assert token_at("127.0.0.1:7402") == ""


def test_the_token_of_a_killed_process_is_given_to_nobody(config: ServiceConfig) -> None:
    killed = subprocess.Popen(["true"])
    killed.wait(patient(10))
    with announced({"127.0.0.1:7401": "a"}):
        path = user_directory() / "tokens" / "7401"
        path.write_text(path.read_text().replace(str(os.getpid()), str(killed.pid), 1))
        assert token_at("127.0.0.1:7401") == ""


def test_odd_addresses_have_no_token(config: ServiceConfig) -> None:
    assert [token_at(odd) for odd in ("", "localhost", "localhost:../x", "127.0.0.1:")] == [""] * 4
