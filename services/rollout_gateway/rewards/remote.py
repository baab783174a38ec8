"""Client of a reward at a URL: POSTs the episode as JSON and reads {"reward": number or null}.

Messages have the form of OpenAI's chat completions; arguments of tool calls stay the model's text.

A server failure never becomes reward 0: a permanent failure raises Unavailable.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from paceline.addresses import direct
from paceline.errors import ConfigError, Unavailable
from paceline.services.rollout_gateway.config import RemoteRewardConfig
from paceline.services.rollout_gateway.environments import Episode
from paceline.telemetry import inject, names, span


def episode_to(episode: Episode) -> dict[str, Any]:
    """task_id, prompt, answer, metadata, text, finish, messages."""
    return {
        "task_id": episode.task.task_id,
        "prompt": episode.task.prompt,
        "answer": episode.task.answer,
        "metadata": dict(episode.task.metadata),
        "text": episode.text,
        "finish": episode.finish,
        "messages": [message.shown() for message in episode.messages],
    }


class CircuitBreaker:
    """Closed: all requests pass.

    Open: no request passes for `open_s` seconds, then a single probe; a successful probe closes the
    circuit.
    """

    def __init__(self, failures: int, open_s: float) -> None:
        self._limit = failures
        self._open_s = open_s
        self._failures = 0  # in a row
        self._openings = 0
        self._open_until = 0.0
        self._probing = False
        self._changed = asyncio.Event()

    @property
    def open(self) -> bool:
        """Whether callers wait."""
        return self._failures >= self._limit

    @asynccontextmanager
    async def request(self, until: float) -> AsyncIterator[None]:
        """Surround one request. An exception in the block counts as a failure; a cancelled block
        counts as neither.

        Waits while the circuit is open. Raises Unavailable at once when it stays open until
        `until`, in the event loop's time.
        """
        probe = await self._enter(until)
        openings = self._openings
        failed: bool | None = None
        try:
            yield
            failed = False
        except Exception:
            failed = True
            raise
        finally:
            self._leave(probe, failed, late=openings != self._openings)

    async def _enter(self, until: float) -> bool:
        """Whether the caller is the single probe of an open circuit."""
        clock = asyncio.get_running_loop().time
        while self.open:
            if not self._probing and clock() >= self._open_until:
                self._probing = True
                return True
            wake = until if self._probing else self._open_until
            if clock() >= until or (wake >= until and not self._probing):
                seen = f"{self._failures} failures in a row"
                raise Unavailable(
                    "nobody asks the reward at a URL for a while", reason="CIRCUIT_OPEN", seen=seen
                )
            try:
                async with asyncio.timeout_at(wake):
                    await self._changed.wait()
            except TimeoutError:
                continue

        return False

    def _leave(self, probe: bool, failed: bool | None, late: bool) -> None:
        if failed is False:
            self._failures = 0
        # A request that began before the circuit opened does not count as a new failure.
        elif failed and not late:
            self._failures += 1
            if self.open:
                self._openings += 1
                self._open_until = asyncio.get_running_loop().time() + self._open_s
        if probe:
            self._probing = False
        self._changed.set()
        self._changed = asyncio.Event()


FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
MAX_ANSWER_BYTES = 64 << 10
SHOWN = 200
"""Maximum characters of an answer in an error."""
_TOO_MANY_REQUESTS = 429


class _TryLater(Exception):
    """A failed attempt that may succeed when repeated."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class RemoteReward:
    """Requests scores from the server, for at most `parallel` episodes at once. Waiting for a
    connection does not count against the deadline.
    """

    def __init__(self, config: RemoteRewardConfig) -> None:
        """Raises ConfigError without a usable URL."""
        check_url(config.url)
        self._config = config
        self._parallel = asyncio.Semaphore(config.parallel)
        self._breaker = CircuitBreaker(config.breaker_failures, config.breaker_open_s)
        authorization = {"authorization": f"Bearer {config.token}"} if config.token else {}
        limits = httpx.Limits(
            max_connections=config.parallel, max_keepalive_connections=config.parallel
        )
        self._client = httpx.AsyncClient(
            timeout=config.deadline_s,
            limits=limits,
            headers={"content-type": "application/json", **authorization},
            **direct(config.url),
        )

    async def score(self, episode: Episode) -> float | None:
        """The server's score. Raises Unavailable."""
        body = json.dumps(episode_to(episode)).encode("ascii")
        about = {names.TASK: episode.task.task_id}
        async with self._parallel:
            with span(names.REWARD_REMOTE, about, kind="client"):
                key = hashlib.sha256(body).hexdigest()[:32]
                return await self._ask(body, {"idempotency-key": key, **inject()})

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _ask(self, body: bytes, headers: dict[str, str]) -> float | None:
        clock = asyncio.get_running_loop().time
        until = clock() + self._config.deadline_s
        attempts = self._config.attempts
        for number in range(1, attempts + 1):
            try:
                return await self._attempt(body, headers, until, attempts + 1 - number)
            except _TryLater as error:
                failure = error
            wait_s = pause_s(number, failure.retry_after_s)
            if number == attempts or clock() + wait_s >= until:
                break
            await asyncio.sleep(wait_s)
        raise Unavailable("the reward at a URL gave no answer", seen=failure) from failure

    async def _attempt(
        self, body: bytes, headers: dict[str, str], until: float, left: int
    ) -> float | None:
        """Make one request with its share of the remaining time."""
        async with self._breaker.request(until):
            share_s = max(0.0, until - asyncio.get_running_loop().time()) / left
            try:
                async with asyncio.timeout(share_s):
                    status, later_s, answer = await self._post(body, headers)
            except TimeoutError as error:
                raise _TryLater(f"nothing in {share_s:.3g} s") from error
            except httpx.RequestError as error:
                raise _TryLater(f"{type(error).__name__}: {error}") from error
            if status >= 500:
                raise _TryLater(f"status {status}: {shown(answer)}", later_s)

        if status == _TOO_MANY_REQUESTS:
            raise _TryLater(f"status {status}: {shown(answer)}", later_s)
        if not 200 <= status < 300:
            raise Unavailable(
                "the reward at a URL refused",
                seen=f"status {status}: {shown(answer)}",
                allowed="200",
            )

        return reward_of(answer)

    async def _post(self, body: bytes, headers: dict[str, str]) -> tuple[int, float | None, bytes]:
        """(status, seconds of Retry-After, about the first MAX_ANSWER_BYTES + 1 bytes of the
        answer).
        """
        answer = b""
        async with self._client.stream(
            "POST", self._config.url, content=body, headers=headers
        ) as response:
            async for chunk in response.aiter_bytes():
                answer += chunk
                if len(answer) > MAX_ANSWER_BYTES:
                    break
            return response.status_code, retry_after_s(response.headers), answer


def pause_s(attempt: int, asked_s: float | None, draw: float | None = None) -> float:
    """Seconds before the attempt after `attempt` (from 1), at least the server's request.

    Waits double up to their limit. `draw` in [0, 1] is random if absent; 0 halves the wait.
    """
    share = 0.5 + 0.5 * (random.random() if draw is None else draw)
    drawn = share * min(FIRST_PAUSE_S * 2.0 ** min(attempt - 1, 32), LONGEST_PAUSE_S)
    return drawn if asked_s is None else asked_s + min(drawn, FIRST_PAUSE_S)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds in Retry-After, as a number or a date; None if it is absent or unreadable."""
    text = headers.get("retry-after", "").strip()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return float(text)
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max((when - datetime.now(UTC)).total_seconds(), 0.0)


def check_url(url: str) -> None:
    """Raises ConfigError for an unusable URL."""
    try:
        if httpx.URL(url).scheme in ("http", "https") and httpx.URL(url).host:
            return
    except httpx.InvalidURL:
        pass  # raised below
    allowed = "http://host:port/path or https://..."
    raise ConfigError(
        "gateway.rewards.remote.url is no URL", seen=url or "nothing", allowed=allowed
    )


def reward_of(answer: bytes) -> float | None:
    """The reward of an answer; infinite or NaN when the server returns such a number.

    Raises Unavailable for anything else.
    """
    try:
        value = json.loads(answer)
        reward = (
            value["reward"] if isinstance(value, dict) and len(answer) <= MAX_ANSWER_BYTES else ""
        )
        if reward is None or (isinstance(reward, int | float) and not isinstance(reward, bool)):
            return None if reward is None else float(reward)
    except (ValueError, KeyError, RecursionError, OverflowError):
        pass  # raised below, with the same message as for JSON of another form

    raise Unavailable(
        "the reward at a URL answered something else",
        seen=shown(answer),
        allowed='{"reward": 0.5 | null}',
    )


def shown(answer: bytes) -> str:
    """The beginning of an answer, for an error."""
    return repr(answer[:SHOWN].decode("utf-8", "replace"))
