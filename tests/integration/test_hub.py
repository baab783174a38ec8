"""Every command that takes a model accepts its id on the Hub."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import SHA, Hub, hub_of
from huggingface_hub import constants
from rich.filesize import decimal

from benchmarks.demo_runs import demo_folder
from paceline.config.load import read_tables
from paceline.errors import ConfigError
from paceline.local.hub import is_hub_id, model_directory
from paceline.local.ports import free_port

POLICY = demo_folder() / "policy_start"
FILES = {path.name: path.read_bytes() for path in POLICY.iterdir()}
PICKLED = {name: body for name, body in FILES.items() if not name.endswith(".safetensors")}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    models = {
        "acme/tiny": {**FILES, "pytorch_model.bin": b"pickle", "README.md": b"# Tiny"},
        "acme/pickled": {**PICKLED, "pytorch_model.bin": b"pickle"},
        "acme/gated": FILES,
    }
    with hub_of(models, gated="acme/gated") as one:
        yield one


def paceline(*words: str, url: str, home: Path) -> subprocess.CompletedProcess[str]:
    """A command that uses the Hub at `url` and the cache in `home`."""
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "NO_COLOR": "1"}
    environment |= {"COLUMNS": "400", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-m", "paceline.cli.main", *words]
    return subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, check=False
    )


def nobody() -> str:
    """An address without a Hub."""
    return f"http://127.0.0.1:{free_port()}"


@pytest.mark.slow
def test_init_says_what_it_downloads_and_a_second_time_nothing(hub: Hub, tmp_path: Path) -> None:
    done = paceline("init", "acme/tiny", "--out", "mine.toml", url=hub.url, home=tmp_path)
    assert done.returncode == 0, done.stderr
    size = decimal(sum(map(len, FILES.values())))
    assert f"acme/tiny at {SHA[:12]}: downloading {size} in {len(FILES)} files" in done.stderr
    assert f"model.safetensors ({decimal(len(FILES['model.safetensors']))})" in done.stderr
    assert read_tables(tmp_path / "mine.toml")["policy_trainer"]["model"] == "acme/tiny"
    found = tmp_path / f"hub/models--acme--tiny/snapshots/{SHA}"
    assert {path.name: path.read_bytes() for path in found.iterdir()} == FILES
    again = paceline("init", "acme/tiny@main", "--out", "b.toml", url=hub.url, home=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "downloading" not in again.stderr
    hub.asked.clear()
    words = ("serve", "gateway", "--config", "mine.toml", "--print-config")
    served = paceline(*words, url=hub.url, home=tmp_path)
    assert str(found) in served.stdout, served.stderr
    assert not any("model.safetensors" in path for path in hub.asked)


@pytest.mark.slow
def test_a_mirror_on_this_machine_is_asked_without_a_proxy(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.setenv(name, "" if name == "no_proxy" else nobody())
    done = paceline("init", "acme/tiny", "--out", "mine.toml", url=hub.url, home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"acme/tiny at {SHA[:12]}: downloading" in done.stderr


@pytest.mark.slow
def test_without_the_hub_what_was_downloaded_before_serves(hub: Hub, tmp_path: Path) -> None:
    done = paceline("init", "acme/tiny", "--out", "a.toml", url=hub.url, home=tmp_path)
    assert done.returncode == 0, done.stderr
    done = paceline("init", "acme/tiny", "--out", "b.toml", url=nobody(), home=tmp_path)
    assert done.returncode == 0, done.stderr
    found = tmp_path / f"hub/models--acme--tiny/snapshots/{SHA}"
    assert "the Hub cannot be reached" in done.stderr
    assert f"acme/tiny was downloaded before, to {found}" in done.stderr
    (found / "model.safetensors").unlink()
    done = paceline("init", "acme/tiny", "--out", "c.toml", url=nobody(), home=tmp_path)
    assert done.returncode == 2
    assert "was not downloaded before, or only in part; seen: acme/tiny" in done.stderr
    assert not (tmp_path / "c.toml").exists()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("acme/absent", "no such directory, and no such model on the Hub; seen: acme/absent"),
        ("acme/gated", "only to those who have asked for it; seen: acme/gated"),
        ("acme/tiny@v9", "no such revision on the Hub; seen: acme/tiny@v9"),
        ("acme/pickled", "no checkpoint that can be served; seen: acme/pickled without model.saf"),
    ],
)
def test_what_the_hub_does_not_give_is_refused_by_name(
    hub: Hub, model: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    with pytest.raises(ConfigError, match=says):
        model_directory(model, print)


def test_a_hub_that_accepts_a_request_and_does_not_answer_is_left_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.local.hub._ASK_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"the Hub cannot be reached.*Timeout"):
            model_directory("acme/silent", print)


@pytest.mark.slow
def test_a_hub_that_is_away_and_a_model_never_seen_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    done = paceline("eval", "acme/tiny", "tasks.jsonl", url=nobody(), home=tmp_path)
    assert done.returncode == 2
    assert "the Hub cannot be reached, and this model was not downloaded before" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        ("Qwen/Qwen2.5-0.5B", True),
        ("acme/tiny@refs/pr/1", True),
        ("runs/demo/policy", False),
        ("./acme/tiny", False),
        ("/acme/tiny", False),
        ("tiny", False),
        ("acme/..", False),
        ("", False),
    ],
)
def test_an_id_is_told_from_a_path(name: str, is_id: bool) -> None:
    assert is_hub_id(name) is is_id


def test_a_directory_of_the_same_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme/tiny").mkdir(parents=True)
    assert not is_hub_id("acme/tiny")
