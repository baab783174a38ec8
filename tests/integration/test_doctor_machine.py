"""`paceline doctor` before a run makes every check, and each failed check names its remedy."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from paceline.cli.doctor import finding_line, look_at_proxies
from paceline.config import ServiceConfig
from paceline.local.checks import Finding
from paceline.local.ports import free_ports

ADDRESSES = ("coordinator", "gateway", "policy_trainer", "drafter_trainer", "http", "events")
pytestmark = pytest.mark.timeout(180)


def doctor(
    tmp_path: Path, *settings: str, files: int = 65_536, **environment: str
) -> tuple[int, dict[str, dict[str, str]], str]:
    """Exit status, findings by check, and text on stderr."""
    free = [f"addresses.{n}=127.0.0.1:{p}" for n, p in zip(ADDRESSES, free_ports(6), strict=True)]
    words = [sys.executable, "-m", "paceline.cli.main", "doctor", "--json"]
    command = [*words, f"run.dir={tmp_path / 'run'}", *free, *settings]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    files = min(files, hard) if hard > 0 else files
    limit = f"import os, resource as r, sys; r.setrlimit(r.RLIMIT_NOFILE, ({files}, {files})); "
    inner = [sys.executable, "-c", f"{limit}os.execv(sys.argv[1], sys.argv[1:])", *command]
    kept = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    done = subprocess.run(
        inner, capture_output=True, text=True, timeout=150, env={**kept, **environment}, check=False
    )
    found = json.loads(done.stdout) if done.stdout else []
    return done.returncode, {one["check"]: one for one in found}, done.stderr


@pytest.mark.slow
def test_a_machine_that_can_run_it_fails_nothing(tmp_path: Path) -> None:
    code, found, err = doctor(tmp_path)
    assert [one for one in found.values() if one["verdict"] == "fail"] == [], err
    assert code == 0
    expected = {
        "machine",
        "user directory",
        "sockets",
        "proxies",
        "disk",
        "open files",
        "redis",
        "redis_features",
    }
    expected |= {f"addresses.{name}" for name in ADDRESSES} | {"torch", "gpu", "sglang", "sandbox"}
    expected |= {"engine workers", "memory"}
    assert set(found) == expected
    assert "cannot" not in found["torch"]["seen"]


@pytest.mark.slow
def test_one_fail_ends_no_other_check_and_each_says_what_to_do(tmp_path: Path) -> None:
    (open_to_all := tmp_path / f"paceline-{os.getuid()}").mkdir()
    open_to_all.chmod(0o755)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        # Short, because the socket of a Redis with a long path would be in the user's directory.
        tempfile.TemporaryDirectory() as runs,
    ):
        port = taken.getsockname()[1]
        code, found, err = doctor(
            Path(runs),
            f"addresses.gateway=127.0.0.1:{port}",
            "redis.features_url=redis://:secret@127.0.0.1:1/0",
            "gateway.rewards.sandbox.isolation=limits",
            files=256,
            TMPDIR=str(tmp_path),
        )
    assert code == 1, err
    verdicts = {name: one["verdict"] for name, one in found.items() if one["verdict"] != "ok"}
    assert verdicts == {
        "user directory": "fail",
        "sockets": "fail",
        "open files": "warn",
        "addresses.gateway": "fail",
        "redis_features": "fail",
        "sandbox": "warn",
    }
    assert f"port {port} is in use" in found["addresses.gateway"]["seen"]
    assert "raise the hard limit" in found["open files"]["advice"]
    assert "0700" in found["user directory"]["advice"]
    assert "does not answer" in found["redis_features"]["seen"]
    assert "secret" not in json.dumps(found)
    assert "auto" in found["sandbox"]["advice"]


def test_what_to_do_stands_below_what_was_seen() -> None:
    bad = finding_line(Finding("disk", "fail", "full [x]", "make room"))
    assert bad.splitlines()[1].endswith("make room")
    assert r"\[x]" in bad
    assert "\n" not in finding_line(Finding("disk", "ok", "room", "none needed"))


@pytest.mark.slow
def test_proxies_that_are_set_are_shown_with_the_addresses_that_they_apply_to(
    tmp_path: Path,
) -> None:
    proxy = "http://user:secret@127.0.0.1:9"
    code, found, err = doctor(tmp_path, https_proxy=proxy, ALL_PROXY=proxy)
    assert code == 0, err
    assert found["proxies"]["verdict"] == "ok"
    assert (
        "https_proxy=http://127.0.0.1:9, ALL_PROXY=http://127.0.0.1:9" in found["proxies"]["seen"]
    )
    assert "not for loopback and unix sockets" in found["proxies"]["seen"]


@pytest.mark.parametrize(("exempt", "verdict"), [("", "warn"), ("10.0.0.2,x", "ok")])
def test_an_address_of_another_host_that_goes_to_a_proxy_is_doubted(
    exempt: str, verdict: str
) -> None:
    of_gateways = {
        "gateway": "10.0.0.2:7401",
        "more_gateways": ["10.0.0.2:7411"],
        "more_gateways_http": ["127.0.0.1:7418"],
    }
    config = ServiceConfig.model_validate({"addresses": of_gateways})
    finding = look_at_proxies(config, {"grpc_proxy": "http://127.0.0.1:9", "no_proxy": exempt})
    assert finding.verdict == verdict
    for seen in ("addresses.gateway=10.0.0.2:7401", "addresses.more_gateways=10.0.0.2:7411"):
        assert (seen in finding.seen) == (verdict == "warn")


@pytest.mark.slow
def test_sockets_lie_in_a_short_directory_where_the_temporary_one_is_long(tmp_path: Path) -> None:
    long = tmp_path / ("x" * (120 - len(str(tmp_path))))
    long.mkdir()
    code, found, err = doctor(tmp_path, TMPDIR=str(long))
    assert code == 0, (found, err)
    assert "short" in found["sockets"]["seen"]
    assert str(long) not in found["sockets"]["seen"]
