"""What a client may be told, what it shows of it, and what importing it brings along."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from certificates import openssl
from unit.client.conftest import Connect
from unit.client.scripted_gateway import ScriptedGateway, listening, reply, serving

from paceline.client import AsyncClient, Backoff, Client
from paceline.client.answers import OpenedSession
from paceline.client.calls import claim, complete, generate, reward
from paceline.client.flows import Flow, HttpAnswer, Lost, Pause, Send, ask, next_task, retry_after_s
from paceline.client.settings import ClientSettings, find_token
from paceline.errors import InvalidInput, ResourceExhausted, Unavailable
from paceline.local.patience import patient
from paceline.local.tokens import announced

NOT_WANTED = (
    "torch",
    "grpc",
    "transformers",
    "redis",
    "opentelemetry.sdk",
    "pydantic",
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
    assert ClientSettings.of(given, "").base_url == root


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


def test_wrong_deadlines_tokens_and_authorities_are_refused(tmp_path: Path) -> None:
    for value in (0, -1, float("inf"), float("nan")):
        with pytest.raises(InvalidInput, match="deadline_s"):
            Client("http://h", deadline_s=value)
    with pytest.raises(InvalidInput) as caught:
        Client("http://h", "secret\nx: y")
    assert "secret" not in str(caught.value)
    not_pem = tmp_path / "ca.pem"
    not_pem.write_text("no certificate")
    for ca in (not_pem, tmp_path / "absent.pem"):
        with pytest.raises(InvalidInput, match="PEM"):
            Client("https://h", ca=ca)
    with pytest.raises(InvalidInput, match="verify"):
        Client("https://h", verify=False, ca=not_pem)


async def test_no_repr_shows_a_token_or_a_key(
    gateway: ScriptedGateway, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await client.session()
    opened = OpenedSession("s1", "key-of-s1", "", None)
    settings = ClientSettings.of("http://h", "gateway-token")
    call = complete("s1", key="key-of-s1")
    send = next(ask(call, settings))
    shown = repr(
        [client, session, opened, settings, call, send, Client("http://h", "gateway-token")]
    )
    assert "key-of-s1" not in shown
    assert "gateway-token" not in shown
    assert repr(AsyncClient("http://h", "x")) == "AsyncClient('http://h')"
    monkeypatch.setenv("PACELINE_TOKEN", "from-the-environment")
    assert ClientSettings.of("http://h", None).token == "from-the-environment"
    assert ClientSettings.of("http://h", "").token == ""


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
    gateway = ScriptedGateway(otherwise=reply(200, {"status": "ok"}))
    with serving(gateway, listening(), **files):
        assert await connect(gateway.base_url, ca=certificate / "cert.pem").health() == {
            "status": "ok"
        }
        assert await connect(gateway.base_url, verify=False).health() == {"status": "ok"}
        with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED") as caught:
            await connect(gateway.base_url, deadline_s=60).health()
        assert "attempt 1" in caught.value.__notes__[0]
        stalled = connect(gateway.base_url, ca=certificate / "cert.pem", deadline_s=0.4)
        gateway.then(gateway.hang(b"{"))
        with pytest.raises(Exception, match="in time"):
            await stalled.health()
    assert threading.active_count() < 50


class Clock:
    """A clock that only flows move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def settings(self, deadline_s: float) -> ClientSettings:
        return ClientSettings.of(
            "http://h", "", deadline_s, deadline_s, Backoff(draw=lambda: 1.0, clock=self)
        )

    def play(
        self, flow: Flow[Any], *outcomes: HttpAnswer | Lost, each_s: float = 0.0
    ) -> tuple[list[float], Any]:
        """The pauses of a flow whose attempts end so, and its result or error."""
        left, pauses, outcome = list(outcomes), [], None
        try:
            while True:
                step = flow.send(outcome)
                if isinstance(step, Pause):
                    pauses.append(step.seconds)
                    self.now, outcome = self.now + step.seconds, None
                else:
                    assert isinstance(step, Send)
                    self.now, outcome = self.now + each_s, left.pop(0) if len(left) > 1 else left[0]
        except StopIteration as ended:
            return pauses, ended.value
        except Exception as error:  # noqa: BLE001  what the flow raised is its result
            return pauses, error


def refused(status: int, **headers: str) -> HttpAnswer:
    return HttpAnswer(
        status, {name.replace("_", "-"): value for name, value in headers.items()}, b""
    )


def test_waits_double_up_to_their_limit_and_stop_before_the_deadline() -> None:
    clock = Clock()
    pauses, error = clock.play(ask(generate("1", {}, ""), clock.settings(30)), refused(503))
    assert pauses == [0.25, 0.5, 1, 2, 4, 8, 8]
    assert isinstance(error, Unavailable)
    half = Backoff(draw=lambda: 0.0)
    assert [half.wait_s(attempt, None) for attempt in (1, 2, 3, 10_000)] == [0.125, 0.25, 0.5, 4.0]


def test_retry_after_is_honoured_as_seconds_and_as_a_date() -> None:
    clock = Clock()
    pauses, error = clock.play(
        ask(reward("s", 1.0), clock.settings(10)), refused(429, retry_after="3")
    )
    assert pauses == [3.25, 3.25, 3.25]
    assert isinstance(error, ResourceExhausted)
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=20), usegmt=True)
    assert retry_after_s({"retry-after": soon}) == pytest.approx(20, abs=3)
    past = format_datetime(datetime.now(UTC) - timedelta(days=1), usegmt=True)
    assert retry_after_s({"retry-after": past}) == 0
    assert retry_after_s({"retry-after": "1.5"}) == 1.5
    for text in ("", "soon", "-1", "1.5s", "\u0663"):
        assert retry_after_s({"retry-after": text}) is None
    assert retry_after_s({}) is None


def test_claims_add_their_wait_to_the_deadline_and_are_not_asked_in_a_row() -> None:
    clock = Clock()
    send = next(ask(claim(30, None), clock.settings(5)))
    assert isinstance(send, Send)
    assert send.left_s == 35
    pauses, found = clock.play(next_task(4, None, clock.settings(5)), refused(204))
    assert found is None
    assert sum(pauses) == pytest.approx(4)
    assert max(pauses) == 1
    pauses, found = clock.play(next_task(100, None, clock.settings(5)), refused(204), each_s=30)
    assert (pauses, found) == ([], None)


def test_without_a_token_of_the_environment_that_of_the_listening_run_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("PACELINE_TOKEN", "PACELINE_AGENT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    url = "http://127.0.0.1:7408"
    with announced({"127.0.0.1:7408": "of the run"}):
        assert ClientSettings.of(f"{url}/v1", None).token == find_token(url) == "of the run"
        assert ClientSettings.of(url, "").token == ""
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
    url = "http://127.0.0.1:7408"
    early, without = ClientSettings.of(url, None), ClientSettings.of(url, "")
    assert early.current_token == ""
    with announced({"127.0.0.1:7408": "of the run"}):
        assert (early.current_token, without.current_token) == ("of the run", "")
        send = next(ask(claim(30, None), early))
        assert isinstance(send, Send)
        assert send.headers["authorization"] == "Bearer of the run"
