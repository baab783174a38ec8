"""Whole runs on hosts with proxies, a long temporary directory, a dead collector, no IPv4."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from demo_runs import SMALL, demo, left_over, wait_for
from net_hosts import WITH_NAMESPACES
from otlp_receiver import receiving

from benchmarks.namespaces import Namespace
from paceline.local.patience import patient
from paceline.local.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
FETCH = """
import http.client, sys
from urllib.parse import urlsplit
url = urlsplit(sys.argv[1])
to = http.client.HTTPConnection(url.hostname, url.port, timeout=20)
to.request("GET", f"/?{url.query}")
print(to.getresponse().status)
"""  # the page answers with a cookie and a redirect
COLLECT = """
import sys
from otlp_receiver import receiving
with receiving("[::1]") as receiver:
    print(receiver.endpoint, flush=True)
    sys.stdin.read()
    print(*sorted({span.service for span in receiver.spans} & {*receiver.metrics}))
"""


def finished(out: Path, within: tuple[str, ...] = ()) -> Path:
    """Asserts that a run of one step lost nothing and left no process; returns its directory."""
    process = demo(out, "--steps", "1", *SMALL, within=within)
    output, _ = process.communicate(timeout=patient(300))
    assert process.returncode == 0, output
    run = out / "demo-0-1"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["phase"]) == (1, "finished")
    assert summary["trajectories_lost"] == 0
    assert left_over(out) == []
    return run


def set_dead_proxies(patch: pytest.MonkeyPatch, spell: Callable[[str], str]) -> None:
    for name in PROXIES:
        patch.setenv(spell(name), "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        patch.delenv(name, raising=False)


def test_a_run_goes_on_as_ever_where_dead_proxies_are_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_dead_proxies(monkeypatch, str.lower)
    finished(tmp_path)


@pytest.fixture
def deep() -> Iterator[Path]:
    """A directory with a path of 120 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as short:  # its length counts
        path = Path(short) / ("x" * (120 - len(short) - 1))
        path.mkdir()
        yield path


def test_a_run_in_a_deep_folder_goes_on_with_dead_proxies_in_capital_letters(
    deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is TMPDIR too, a path of 120 characters."""
    set_dead_proxies(monkeypatch, str.upper)
    monkeypatch.setenv("TMPDIR", str(deep))
    finished(deep / "runs")


def test_a_run_ends_as_fast_without_its_collector_as_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(out: Path, endpoint: str) -> float:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        process = demo(out, "--steps", "1", *SMALL)
        wait_for(process, "stopping the services")
        began = time.monotonic()
        output, _ = process.communicate(timeout=patient(300))
        assert process.returncode == 0, output
        return time.monotonic() - began

    with receiving() as receiver:
        with_it = seconds(tmp_path / "with", receiver.endpoint)
        assert receiver.spans
    without = seconds(tmp_path / "without", f"http://127.0.0.1:{free_port()}")
    assert without < with_it + patient(3.0)
    for service in ("coordinator", "gateway", "policy_trainer", "drafter_trainer"):
        log = (tmp_path / "without/demo-0-1/logs" / f"{service}.log").read_text()
        assert log.count("opentelemetry") == 1, log
        assert "Traceback" not in log


@pytest.fixture
def only_ipv6() -> Iterator[Namespace]:
    """A host with ::1 as its only address."""
    host = Namespace()
    try:
        host.run("ip", "address", "del", "127.0.0.1/8", "dev", "lo")
        yield host
    finally:
        host.close()


@WITH_NAMESPACES
@pytest.mark.network
def test_a_host_that_has_only_the_ipv6_loopback_runs_everything(
    only_ipv6: Namespace, tmp_path: Path
) -> None:
    run = finished(tmp_path, only_ipv6.within)
    config = (run / "config.toml").read_text()
    assert "[::1]:" in config
    assert "127.0.0.1" not in config
    words = [*only_ipv6.within, sys.executable]
    with subprocess.Popen(
        [*words, "-m", "paceline.cli.main", "page", str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as page:
        try:
            (line,) = [one for one in wait_for(page, "live page of") if "http" in one]
            url = next(word for word in line.split() if word.startswith("http")).rstrip(";")
            fetched = subprocess.run(
                [*words, "-c", FETCH, url],
                capture_output=True,
                text=True,
                timeout=patient(60),
                check=True,
            )
            assert int(fetched.stdout) < 400
            assert url.startswith("http://[::1]:")
        finally:
            page.kill()


@WITH_NAMESPACES
@pytest.mark.network
def test_a_collector_on_the_ipv6_loopback_gets_spans_and_metrics(
    only_ipv6: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = Path(__file__).parents[1]
    with subprocess.Popen(
        [*only_ipv6.within, sys.executable, "-c", COLLECT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *sys.path])},
    ) as collector:
        try:
            assert collector.stdout is not None
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.stdout.readline().strip())
            finished(tmp_path, only_ipv6.within)
            services, _ = collector.communicate("", timeout=patient(60))
        finally:
            collector.kill()
    assert {"coordinator", "gateway", "drafter_trainer"} <= {*services.split()}


@WITH_NAMESPACES
@pytest.mark.network
def test_a_run_at_localhost_goes_on_where_that_is_the_ipv6_loopback(
    only_ipv6: Namespace, tmp_path: Path
) -> None:
    names = ("coordinator", "gateway", "policy_trainer", "drafter_trainer", "http")
    settings = [f"addresses.{name}=localhost:{free_port()}" for name in names]
    settings.append(f"addresses.events=tcp://localhost:{free_port()}")
    settings.append(f"redis.durable_url=redis://[::1]:{free_port()}/0")
    process = demo(tmp_path, "--steps", "1", *SMALL, *settings, within=only_ipv6.within)
    output, _ = process.communicate(timeout=patient(300))
    assert process.returncode == 0, output
