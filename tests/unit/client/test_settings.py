"""The client's settings: accepted values, displayed values, and the modules that it imports."""

from __future__ import annotations

import ssl
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from certificates import openssl
from unit.client.conftest import Connect
from unit.client.scripted_gateway import ScriptedGateway, listening, serving

from paceline.client import AsyncClient, Client, find_token
from paceline.errors import InvalidInput, Unavailable
from paceline.local.patience import patient
from paceline.local.tokens import announced

NOT_WANTED = (
    "torch",
    "grpc",
    "transformers",
    "redis",
    "opentelemetry.sdk",
    "numpy",
    "zmq",
)


def test_importing_the_client_imports_nothing_heavy() -> None:
    code = (
        f"import sys, paceline.client; print([name for name in {NOT_WANTED} if name in "
        f"sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=patient(60),
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == "[]"


def test_importing_the_client_is_timed_and_told(record_property: Any) -> None:
    code = (
        "import time; begin = time.perf_counter(); import paceline.client; "
        "print(time.perf_counter() - begin)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=patient(60),
        capture_output=True,
        text=True,
    )
    record_property("import_s", float(found.stdout))


@pytest.mark.parametrize(
    ("given", "root"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("https://host/v1", "https://host"),
        ("https://host/v1/", "https://host"),
        ("https://host/gateway/v1", "https://host/gateway"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_a_base_url_is_taken_with_and_without_v1(given: str, root: str) -> None:
    assert Client(given, "").attach("key").base_url == f"{root}/v1"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:8000",
        "ftp://host",
        "http://",
        "http://user:secret@host",
        "http://h?x=1",
        "http://h:x",
        "http://[::1",
    ],
)
def test_what_is_no_base_url_is_refused_without_showing_a_password(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Client(url)
    assert "secret" not in str(caught.value)


def test_a_wrong_base_url_is_shown() -> None:
    with pytest.raises(InvalidInput, match="host:8000"):
        Client("host:8000")


def test_a_token_that_fits_no_header_is_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        Client("http://h", "secret\nx: y")
    assert "secret" not in str(caught.value)


async def test_no_repr_shows_a_token_or_a_key(client: Any) -> None:
    shown = repr([client, await client.session(), AsyncClient("http://h", "gateway-token")])
    assert "key-of-s1" not in shown
    assert "gateway-token" not in shown
    assert repr(AsyncClient("http://h", "x")) == "AsyncClient('http://h')"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with cert.pem, its own authority, and key.pem."""
    directory = tmp_path_factory.mktemp("tls")
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-x509", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    openssl(directory, "req", *kind, *names, "-keyout", "key.pem", "-out", "cert.pem")
    return directory


async def test_tls_trusts_the_authority_given_and_no_other(
    connect: Connect, certificate: Path
) -> None:
    files = {
        "ssl_certfile": str(certificate / "cert.pem"),
        "ssl_keyfile": str(certificate / "key.pem"),
    }
    gateway = ScriptedGateway()
    with serving(gateway, listening(), **files):
        trusting = connect(
            gateway.base_url, verify=ssl.create_default_context(cafile=certificate / "cert.pem")
        )
        assert (await trusting.session_info("s1")).state == "open"
        unchecked = connect(gateway.base_url, verify=False)
        assert (await unchecked.session_info("s1")).state == "open"
        with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await connect(gateway.base_url, max_retries=0).session_info("s1")


def test_without_a_token_of_the_environment_that_of_the_listening_run_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("PACELINE_TOKEN", "PACELINE_AGENT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    url = "http://127.0.0.1:7408"
    with announced({"127.0.0.1:7408": "of the run"}):
        assert find_token(url) == find_token(f"{url}/v1") == "of the run"
        assert Client(url, "").openai.api_key == "none"
        assert find_token("http://localhost") == ""
        monkeypatch.setenv("PACELINE_TOKEN", "operators")
        assert find_token(url) == "operators"
        monkeypatch.setenv("PACELINE_AGENT_TOKEN", "agents")
        assert find_token(url) == "agents"
    assert find_token("http://gateway.example:7408") == "agents"


def test_a_client_made_before_its_run_finds_the_runs_token_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("PACELINE_TOKEN", "PACELINE_AGENT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    early = Client("http://127.0.0.1:7408")
    assert early.openai.api_key == "none"
    with announced({"127.0.0.1:7408": "of the run"}):
        assert early.openai.api_key == "of the run"
