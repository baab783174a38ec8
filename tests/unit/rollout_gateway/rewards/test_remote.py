"""A reward at a URL, over a real HTTP server that follows a script."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from paceline.config import TelemetryConfig
from paceline.errors import ConfigError, InvalidInput, Unavailable
from paceline.local.patience import patient
from paceline.services.rollout_gateway.chat.messages import Message, ToolCall
from paceline.services.rollout_gateway.config import RemoteRewardConfig, RewardsConfig
from paceline.services.rollout_gateway.environments import Episode, EpisodeTask
from paceline.services.rollout_gateway.rewards.remote import (
    MAX_ANSWER_BYTES,
    pause_s,
    reward_of,
)
from paceline.services.rollout_gateway.rewards.rules import RewardRules
from paceline.telemetry import setup, shutdown, span


@dataclass
class Answer:
    """One scripted answer; `gate` delays it until it is set, and the body None closes the
    connection.
    """

    body: bytes | None
    status: int = 200
    headers: str = ""
    gate: asyncio.Event | None = None


def ok(reward: float | None = 0.5, gate: asyncio.Event | None = None) -> Answer:
    return Answer(json.dumps({"reward": reward}).encode(), gate=gate)


@dataclass
class Server:
    """Answers the script's lines in order, then its last one for ever."""

    script: list[Answer] = field(default_factory=lambda: [ok()])
    seen: list[tuple[dict[str, str], Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    url: str = ""
    asked: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._one(head.decode("ascii"), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _one(
        self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        headers = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:] if line)
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.seen.append((headers, body))
        self.times.append(asyncio.get_running_loop().time())
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.asked.release()
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if answer.gate is not None:
            await answer.gate.wait()
        self.at_once -= 1
        if answer.body is None:
            writer.close()
            return
        length = f"content-length: {len(answer.body)}\r\n"
        writer.write(
            f"HTTP/1.1 {answer.status} x\r\n{length}{answer.headers}\r\n".encode() + answer.body
        )
        await writer.drain()


Rules = Callable[..., RewardRules]


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/score?x=1"
    yield server
    listening.close()


@pytest_asyncio.fixture
async def rules(server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rules]:
    made: list[RewardRules] = []

    def make(**settings: Any) -> RewardRules:
        for name in {"attempts", "parallel"} & set(settings):
            monkeypatch.setattr(RemoteRewardConfig, name, settings.pop(name))
        remote = RemoteRewardConfig(**{"url": server.url, **settings})
        made.append(RewardRules(RewardsConfig(remote=remote)))
        return made[-1]

    yield make
    for one in made:
        await one.stop()


def episode(text: str = "#6", *messages: Message) -> Episode:
    return Episode(EpisodeTask("t-1", "2+4=", "6", {"level": "1"}), text, "stop", messages)


def ask(rules: RewardRules, text: str = "#6") -> Awaitable[float | None]:
    return rules.rule("remote").score(episode(text))


async def test_the_server_gets_the_whole_episode_and_its_reward_comes_back(
    server: Server, rules: Rules
) -> None:
    call = ToolCall("c1", "f", '{"a":  1}')
    rule = rules(token="secret").rule("remote")
    assert (
        await rule.score(
            episode("#6", Message("user", "2+4="), Message("assistant", "\ud800", "hm", (call,)))
        )
        == 0.5
    )
    headers, body = server.seen[0]
    assert headers["authorization"] == "bearer secret"
    assert headers["content-type"] == "application/json"
    assert body == {
        "task_id": "t-1",
        "prompt": "2+4=",
        "answer": "6",
        "metadata": {"level": "1"},
        "text": "#6",
        "finish": "stop",
        "messages": [
            {"role": "user", "content": "2+4="},
            {
                "role": "assistant",
                "content": "\ud800",
                "reasoning_content": "hm",
                "tool_calls": [call.shown()],
            },
        ],
    }


@pytest.mark.parametrize(("reward", "value"), [(None, None), (1, 1.0), (-2.5, -2.5), (0, 0.0)])
async def test_a_number_or_null_is_a_reward(
    server: Server, rules: Rules, reward: float | None, value: float | None
) -> None:
    server.script = [ok(reward)]
    assert await ask(rules()) == value


async def test_the_request_carries_the_trace_of_the_caller(server: Server, rules: Rules) -> None:
    setup("test", TelemetryConfig())
    try:
        with span("outer") as outer:
            await ask(rules())
    finally:
        shutdown()
    assert (
        server.seen[0][0]["traceparent"].split("-")[1]
        == f"{outer.get_span_context().trace_id:032x}"
    )


async def test_two_failures_of_the_server_cost_two_attempts_of_the_same_key(
    server: Server, rules: Rules
) -> None:
    server.script = [Answer(b"down", 500), Answer(None), ok(), ok()]
    asking = rules()
    assert await ask(asking) == 0.5
    keys = [headers["idempotency-key"] for headers, _ in server.seen]
    assert len(keys) == 3
    assert len(set(keys)) == 1
    first, second = server.times[1] - server.times[0], server.times[2] - server.times[1]
    assert first >= 0.05
    assert second >= 0.1
    await ask(asking, "other")
    assert server.seen[-1][0]["idempotency-key"] != keys[0]


async def test_attempts_end_in_unavailable_with_what_was_seen_last(
    server: Server, rules: Rules
) -> None:
    server.script = [Answer(b"down", 503)]
    with pytest.raises(Unavailable, match=re.escape("status 503: 'down'")):
        await ask(rules(attempts=2))
    assert len(server.seen) == 2


async def test_no_server_is_unavailable_and_never_zero(server: Server, rules: Rules) -> None:
    with pytest.raises(Unavailable, match="ConnectError"):
        await ask(rules(url="http://127.0.0.1:9/", attempts=2))


async def test_a_refusal_is_not_repeated(server: Server, rules: Rules) -> None:
    server.script = [Answer(b"no such task", 400), ok()]
    with pytest.raises(Unavailable, match=re.escape("status 400: 'no such task'")):
        await ask(rules())
    assert len(server.seen) == 1


async def test_a_redirect_is_not_followed(server: Server, rules: Rules) -> None:
    server.script = [Answer(b"", 307, f"location: {server.url}\r\n"), ok()]
    with pytest.raises(Unavailable, match="status 307"):
        await ask(rules())


@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_is_waited_for(server: Server, rules: Rules, status: int) -> None:
    server.script = [Answer(b"", status, "retry-after: 0.4\r\n"), ok()]
    assert await ask(rules()) == 0.5
    assert server.times[1] - server.times[0] >= 0.4


async def test_a_retry_after_beyond_the_deadline_ends_the_score_at_once(
    server: Server, rules: Rules
) -> None:
    server.script = [Answer(b"", 503, "retry-after: 3600\r\n"), ok()]
    async with asyncio.timeout(patient(5)):
        with pytest.raises(Unavailable, match="status 503"):
            await ask(rules())
    assert len(server.seen) == 1


async def test_a_server_that_hangs_gets_its_share_of_the_deadline_each_time(
    server: Server, rules: Rules, skip: Callable[[float], None]
) -> None:
    never = asyncio.Event()
    server.script = [ok(gate=never), ok()]
    asking = asyncio.ensure_future(ask(rules(deadline_s=1200, attempts=4)))
    await server.asked.acquire()
    skip(200.0)
    done, _ = await asyncio.wait({asking}, timeout=0.05)
    assert (done, len(server.seen)) == (set(), 1), "less than its share"
    skip(100.0)
    assert await asking == 0.5, "more than its share"
    server.script = [ok(gate=never)]
    started = asyncio.get_running_loop().time()
    with pytest.raises(Unavailable, match="nothing in"):
        await ask(rules(deadline_s=0.5, attempts=3))
    assert asyncio.get_running_loop().time() - started < patient(10)
    never.set()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"0.5",
        b"[]",
        b"{}",
        b"garbage",
        b'{"reward": "0.5"}',
        b'{"reward": true}',
        b'{"reward": [1]}',
        b"\xff\xfe",
        b"[" * 50_000,
        b'{"reward": 1}' + b" " * MAX_ANSWER_BYTES,
    ],
)
async def test_anything_else_is_an_error_that_shows_it(
    server: Server, rules: Rules, body: bytes
) -> None:
    server.script = [Answer(body), ok()]
    with pytest.raises(Unavailable, match="an invalid answer; seen: "):
        await ask(rules())
    assert len(server.seen) == 1


@pytest.mark.parametrize("text", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"1" + b"0" * 400])
async def test_a_reward_that_is_not_finite_is_refused_by_name(
    server: Server, rules: Rules, text: bytes
) -> None:
    server.script = [Answer(b'{"reward": ' + text + b"}")]
    with pytest.raises(InvalidInput, match="rule remote returned no reward"):
        await ask(rules())


async def test_so_many_requests_go_at_once_as_are_allowed(server: Server, rules: Rules) -> None:
    gate = asyncio.Event()
    server.script = [ok(gate=gate)]
    asking = rules(parallel=3)
    waiting = [asyncio.ensure_future(ask(asking, str(index))) for index in range(10)]
    for _ in range(3):
        await server.asked.acquire()
    gate.set()
    await asyncio.gather(*waiting)
    assert server.most_at_once == 3


@pytest.mark.parametrize(
    "url",
    [
        *("", "reward.example", "ftp://x", "file:///etc/passwd", "http://", "http://x:y/"),
        *("http://[::", "http:reward.example", "http:///score"),
    ],
)
async def test_a_missing_or_strange_url_is_a_fault_of_the_settings(rules: Rules, url: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.rewards\.remote\.url"):
        await rules(url=url).check("remote")


def test_a_reward_keeps_its_bits() -> None:
    assert reward_of(b'{"reward": 0.1, "why": "x"}') == 0.1


def test_waits_double_up_to_their_limit_and_last_at_least_as_long_as_the_server_asks() -> None:
    for attempt, longest in ((1, 0.1), (2, 0.2), (3, 0.4), (7, 5.0), (10_000, 5.0)):
        waits = [pause_s(attempt, None) for _ in range(50)]
        assert longest / 2 <= min(waits) < max(waits) <= longest
    assert pause_s(7, 3.0) == 3.1
