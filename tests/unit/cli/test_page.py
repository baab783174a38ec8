"""The live page: who may open it, and what its listeners hear."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from pathlib import Path

import pytest
from rich.console import Console
from starlette.testclient import TestClient

from paceline.cli.page import COOKIE, LivePage, page_app, serve_page
from paceline.cli.queues import read_queues
from paceline.cli.run_files import RunFiles
from paceline.config import ServiceConfig
from paceline.errors import Unavailable
from paceline.local.patience import patient
from paceline.report.html import tips_script
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
    assert "EventSource" in script
    assert tips_script() in script
    assert ".card" in client.get("/style.css").text


@pytest.mark.parametrize("path", ["/", "/content", "/events", "/page.js", "/style.css"])
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


async def test_a_listener_hears_the_state_at_once_and_whenever_it_changes(page: LivePage) -> None:
    events = page.events()
    heard = [await anext(events), await anext(events)]
    assert [one.split("\n")[0] for one in heard] == ["event: content", "event: state"]
    watching = asyncio.create_task(page._tell("state"))
    page.state.take_fact(
        pb.Fact(
            context=CommandContext(step=1),
            slots=[pb.SlotRange(first=0, count=2, holder=pb.HOLDER_POLICY)],
        )
    )
    kind, data = (await anext(events)).strip().split("\n")
    await watching
    state = json.loads(data.removeprefix("data: "))
    assert kind == "event: state"
    assert state["slots"] == {"0": "policy", "1": "policy"}
    assert state["phase"] == "policy step"
    await events.aclose()


async def test_a_slow_listener_hears_the_newest_alone(page: LivePage) -> None:
    events = page.events()
    await anext(events)
    await anext(events)
    for _ in range(5):
        await page._tell("content")
    assert await anext(events) == "event: content\ndata: 5\n\n"
    pending = asyncio.ensure_future(anext(events))
    done, _ = await asyncio.wait({pending}, timeout=0.2)
    assert not done
    pending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pending


async def test_queues_are_looked_at_while_somebody_listens_and_told_when_they_change(
    page: LivePage, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([{"requests waiting": "3"}, {"requests waiting": "3"}, {"requests waiting": "0"}])
    looked = 0

    async def look(config: ServiceConfig) -> dict[str, str]:
        nonlocal looked
        looked += 1
        return next(looks)

    monkeypatch.setattr("paceline.cli.page.read_queues", look)
    monkeypatch.setattr("paceline.cli.page._QUEUES_REST_S", 0.0)
    measuring = asyncio.create_task(page.measure())
    await asyncio.sleep(0)
    assert looked == 0
    events = page.events()
    heard = [await anext(events) for _ in range(4)]
    assert [one for one in heard if "queues" in one] == [
        'event: queues\ndata: {"requests waiting": "3"}\n\n',
        'event: queues\ndata: {"requests waiting": "0"}\n\n',
    ]
    measuring.cancel()
    await events.aclose()


@pytest.mark.slow
async def test_queues_of_services_that_do_not_answer_are_left_out() -> None:
    assert await read_queues(ServiceConfig()) == {}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run's directory; who serves a page about it has its tokens in the environment."""
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
