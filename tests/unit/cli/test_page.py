"""The live page: its token, and the state and figures that a browser requests."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path

import pytest
from rich.console import Console
from starlette.testclient import TestClient

from paceline.cli.active import read_figures
from paceline.cli.page import COOKIE, LivePage, page_app, serve_page
from paceline.cli.run_files import RunFiles
from paceline.config import ServiceConfig
from paceline.errors import Unavailable
from paceline.local.patience import patient
from paceline.report.html import read_asset
from paceline.v1 import coordinator_pb2 as pb
from paceline.v1.trajectory_pb2 import CommandContext

TOKEN = "right"
HOST = "http://127.0.0.1:8000"


@pytest.fixture
def page(tmp_path: Path) -> LivePage:
    return LivePage(ServiceConfig(), RunFiles("demo-0-1", tmp_path), tmp_path)


def browser(page: LivePage, *, host: str = HOST) -> TestClient:
    return TestClient(page_app(page, "demo-0-1", TOKEN), base_url=host, follow_redirects=False)


def test_the_printed_address_opens_the_page_and_leaves_the_token_in_a_cookie(
    page: LivePage,
) -> None:
    page.drawn = "<h1>Run demo-0-1</h1>"
    client = browser(page)
    first = client.get(f"/?token={TOKEN}")
    assert (first.status_code, first.headers["location"]) == (303, "/")
    assert "HttpOnly" in first.headers["set-cookie"]
    assert "SameSite=strict" in first.headers["set-cookie"]
    frame = client.get("/")
    assert frame.status_code == 200
    assert TOKEN not in frame.text
    assert "default-src 'none'" in frame.headers["content-security-policy"]
    assert client.get("/content").text == page.drawn
    script = client.get("/page.js").text
    assert 'poll("state"' in script
    assert read_asset("tips.js") in script
    assert ".card" in client.get("/style.css").text


@pytest.mark.parametrize("path", ["/", "/content", "/state", "/figures", "/page.js", "/style.css"])
@pytest.mark.parametrize("cookie", ["", "wrong"])
def test_nobody_else_gets_anything(page: LivePage, path: str, cookie: str) -> None:
    client = browser(page)
    if cookie:
        client.cookies.set(COOKIE, cookie)
    assert client.get(path).status_code == 401


def test_a_wrong_token_sets_no_cookie(page: LivePage) -> None:
    refused = browser(page).get("/?token=wrong")
    assert refused.status_code == 401
    assert "set-cookie" not in refused.headers


@pytest.mark.parametrize("host", ["rebound.example:8000", "rebound.example", "unix:80"])
def test_a_foreign_name_for_this_machine_opens_nothing(page: LivePage, host: str) -> None:
    client = browser(page)
    client.cookies.set(COOKIE, TOKEN)
    assert client.get("/content", headers={"host": host}).status_code == 401
    assert client.get("/content").status_code == 200


def test_a_browser_gets_the_state_and_the_number_of_the_drawing(page: LivePage) -> None:
    client = browser(page)
    client.cookies.set(COOKIE, TOKEN)
    before = client.get("/state").json()
    assert (before["drawings"], before["slots"], before["away"]) == (0, {}, [])
    page.drawings += 1
    page.state.apply_fact(
        pb.Fact(
            context=CommandContext(step=1),
            slots=[pb.SlotRange(first=0, count=2, holder=pb.HOLDER_POLICY)],
        )
    )
    state = client.get("/state").json()
    assert state["drawings"] == 1
    assert state["slots"] == {"0": "policy", "1": "policy"}
    assert state["phase"] == "policy step"


async def test_figures_are_read_at_most_every_two_seconds_for_all_browsers(
    page: LivePage, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0

    async def read(config: ServiceConfig) -> dict[str, str]:
        nonlocal reads
        reads += 1
        return {"requests waiting": str(reads)}

    monkeypatch.setattr("paceline.cli.page.read_figures", read)
    found = await asyncio.gather(*(page.figures() for _ in range(3)))
    assert found == [{"requests waiting": "1"}] * 3
    monkeypatch.setattr("paceline.cli.page._FIGURES_REST_S", 0.0)
    assert await page.figures() == {"requests waiting": "2"}


async def test_a_page_without_a_coordinator_names_the_time_of_its_last_answer(
    page: LivePage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read(config: ServiceConfig) -> dict[str, str]:
        return {}

    monkeypatch.setattr("paceline.cli.page.read_figures", read)
    client = browser(page)
    client.cookies.set(COOKIE, TOKEN)
    waits, _ = client.get("/figures").json()["waits"]
    address = re.escape(ServiceConfig().addresses.coordinator)
    found = rf"no answer of the coordinator since \d\d:\d\d:\d\d, at {address}"
    assert re.fullmatch(found, waits), waits


async def test_a_browser_gets_the_meaning_of_each_figure(
    page: LivePage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read(config: ServiceConfig) -> dict[str, str]:
        return {"serving": "p3.d1", "worker 7": "running 2"}

    monkeypatch.setattr("paceline.cli.page.read_figures", read)
    client = browser(page)
    client.cookies.set(COOKIE, TOKEN)
    found = client.get("/figures").json()
    assert {name: value for name, (value, _) in found.items()} == await read(ServiceConfig())
    assert all(meaning for _, meaning in found.values())


@pytest.mark.slow
async def test_queues_of_services_that_do_not_answer_are_left_out() -> None:
    assert await read_figures(ServiceConfig()) == {}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run's directory, with the run's tokens in the environment as for the page's server."""
    monkeypatch.setenv("PACELINE_TOKEN", "operators")
    monkeypatch.setenv("PACELINE_AGENT_TOKEN", "agents")
    (tmp_path / "config.toml").write_text('[run]\nid = "demo-0-1"\n')
    return str(tmp_path)


async def test_who_connects_as_soon_as_the_address_is_printed_is_served(run: str) -> None:
    printed = asyncio.Queue[socket.socket]()

    class Reader(Console):
        def print(self, *words: object, **_: object) -> None:
            door = re.search(r"(127.0.0.1):(\d+)", str(words[0]))
            assert door is not None
            printed.put_nowait(socket.create_connection(door.groups(), patient(10)))

    served = asyncio.create_task(serve_page(run, [], 0, Reader()))
    try:
        with await asyncio.wait_for(printed.get(), patient(30)) as door:
            door.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert (await asyncio.to_thread(door.recv, 100)).startswith(b"HTTP/1.1 401 ")
    finally:
        served.cancel()
        await asyncio.gather(served, return_exceptions=True)


async def test_a_port_that_is_taken_is_refused_by_its_option(run: str) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(Unavailable, match="--port"),
    ):
        await serve_page(run, [], other.getsockname()[1], Console())
