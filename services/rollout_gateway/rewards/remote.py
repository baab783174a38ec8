"""Client of a reward at a URL: POSTs the episode as JSON and reads {"reward": number or null}.

Messages have the form of OpenAI's chat completions; arguments of tool calls stay the model's text.

A server failure never becomes reward 0: a permanent failure raises Unavailable.
"""

import asyncio
import contextlib
import hashlib
import json
import random
import re
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from paceline.addresses import direct
from paceline.errors import ConfigError, Unavailable
from paceline.services.rollout_gateway.config import RemoteRewardConfig
from paceline.services.rollout_gateway.environments import Episode
from paceline.services.rollout_gateway.rewards import RewardRule
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


FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
MAX_ANSWER_BYTES = 64 << 10
SHOWN = 200
"""Maximum characters of an answer in an error."""
_TOO_MANY_REQUESTS = 429


class RemoteReward(RewardRule):
    """Requests scores from the server, for at most `parallel` episodes at once. Waiting for a
    connection does not count against the deadline.
    """

    def __init__(self, config: RemoteRewardConfig) -> None:
        """Raises ConfigError without a usable URL."""
        check_url(config.url)
        self._config = config
        self._parallel = asyncio.Semaphore(config.parallel)
        authorization = {"authorization": f"Bearer {config.token}"} if config.token else {}
        headers = {"content-type": "application/json", **authorization}
        most, link = config.parallel, direct(config.url)
        link |= {"limits": httpx.Limits(max_connections=most, max_keepalive_connections=most)}
        self._client = httpx.AsyncClient(timeout=config.deadline_s, headers=headers, **link)

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
        """Make up to `attempts` requests, each with its share of the remaining time."""
        clock = asyncio.get_running_loop().time
        until = clock() + self._config.deadline_s
        for attempt in range(1, self._config.attempts + 1):
            share_s = max(0.0, until - clock()) / (self._config.attempts + 1 - attempt)
            later_s = None
            try:
                async with asyncio.timeout(share_s):
                    status, later_s, answer = await self._post(body, headers)
            except TimeoutError:
                failure = f"nothing in {share_s:.3g} s"
            except httpx.RequestError as error:
                failure = f"{type(error).__name__}: {error}"
            else:
                if 200 <= status < 300:
                    return reward_of(answer)
                failure = f"status {status}: {shown(answer)}"
                if status < 500 and status != _TOO_MANY_REQUESTS:
                    raise Unavailable("the reward at a URL refused", seen=failure, allowed="200")
            wait_s = pause_s(attempt, later_s)
            if attempt == self._config.attempts or clock() + wait_s >= until:
                break
            await asyncio.sleep(wait_s)
        raise Unavailable("the reward at a URL gave no answer", seen=failure)

    async def _post(self, body: bytes, headers: dict[str, str]) -> tuple[int, float | None, bytes]:
        """(status, seconds of Retry-After, about the first MAX_ANSWER_BYTES + 1 bytes of the
        answer).
        """
        answer = b""
        post = self._client.stream("POST", self._config.url, content=body, headers=headers)
        async with post as response:
            async for chunk in response.aiter_bytes():
                answer += chunk
                if len(answer) > MAX_ANSWER_BYTES:
                    break
            later = response.headers.get("retry-after", "")
            later_s = float(later) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", later) else None
            return response.status_code, later_s, answer


def pause_s(attempt: int, asked_s: float | None) -> float:
    """Seconds before the attempt after `attempt` (from 1), at least the server's request.

    Waits double up to their limit; up to half of a wait is random.
    """
    drawn = min(FIRST_PAUSE_S * 2.0 ** min(attempt - 1, 32), LONGEST_PAUSE_S)
    drawn *= random.uniform(0.5, 1)
    return drawn if asked_s is None else asked_s + min(drawn, FIRST_PAUSE_S)


def check_url(url: str) -> None:
    """Raises ConfigError for an unusable URL."""
    with contextlib.suppress(httpx.InvalidURL):  # raised below
        if httpx.URL(url).scheme in ("http", "https") and httpx.URL(url).host:
            return
    message, allowed = "gateway.rewards.remote.url is no URL", "http://host:port/path or https"
    raise ConfigError(message, seen=url or "nothing", allowed=allowed)


class _Answer(BaseModel):
    """The answer of a server."""

    model_config = ConfigDict(strict=True)
    reward: float | None


def reward_of(answer: bytes) -> float | None:
    """The reward of an answer; infinite or NaN when the server returns such a number.

    Raises Unavailable for anything else.
    """
    if len(answer) <= MAX_ANSWER_BYTES:
        with contextlib.suppress(ValidationError):  # raised below
            return _Answer.model_validate_json(answer).reward
    message, allowed = "the reward at a URL sent an invalid answer", '{"reward": 0.5 | null}'
    raise Unavailable(message, seen=shown(answer), allowed=allowed)


def shown(answer: bytes) -> str:
    """The beginning of an answer, for an error."""
    return repr(answer[:SHOWN].decode("utf-8", "replace"))
