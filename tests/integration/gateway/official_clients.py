"""The vendors' own clients with the key of one session, for tests of their APIs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
from integration.gateway.conversations import WEATHER

from paceline.local.patience import patient

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER},
    }
]
FLAT_TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "description": "The weather.",
        "parameters": WEATHER,
        "strict": False,
    }
]
CLAUDE_TOOLS: list[Any] = [
    {"name": "weather", "description": "The weather.", "input_schema": WEATHER}
]
OSLO = {"city": "Oslo", "days": 1.0}
ASK = "What is the weather in Oslo?"


@dataclass
class Clients:
    """Both clients with one session's key."""

    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    served: Any

    async def tree(self) -> list[dict[str, Any]]:
        """Returns the turns of the session."""
        answer = await self.served.http.get(
            "/v1/sessions/current/export?form=tree",
            headers={"authorization": f"Bearer {self.openai.api_key}"},
        )
        assert answer.status_code == 200, answer.text
        return list(answer.json()["tree"])

    async def line(self, *finishes: str) -> None:
        """Asserts that the session is one line of turns with these finish reasons. Each turn
        continues from the tokens of the turn before it.
        """
        turns = await self.tree()
        assert [turn["finish_reason"] for turn in turns] == list(finishes)
        assert [turn["parent"] for turn in turns] == [
            None,
            *(turn["completion_id"] for turn in turns[:-1]),
        ]


@asynccontextmanager
async def clients(served: Any, key: str = "") -> AsyncIterator[Clients]:
    """Clients of a new session, or of the session of `key`."""
    if not key:
        opened = await served.http.post("/v1/sessions", json={})
        key = opened.json()["api_key"]
    root = str(served.http.base_url).rstrip("/")
    async with (
        openai.AsyncOpenAI(
            base_url=f"{root}/v1", api_key=key, max_retries=0, timeout=patient(20)
        ) as one,
        anthropic.AsyncAnthropic(
            base_url=root, api_key=key, max_retries=0, timeout=patient(20)
        ) as other,
    ):
        yield Clients(one, other, served)


async def responded(who: Clients, stream: bool, **asked: Any) -> Any:
    """A response; with streaming, the client builds it from events."""
    if not stream:
        return await who.openai.responses.create(model="tiny-model", **asked)
    async with who.openai.responses.stream(model="tiny-model", **asked) as events:
        numbers = [event.sequence_number async for event in events]
        assert numbers == list(range(len(numbers)))
        return await events.get_final_response()


async def messaged(who: Clients, stream: bool, **asked: Any) -> Any:
    """A message of Anthropic's API; with streaming, the client builds it from events."""
    asked = {"model": "tiny-model", "max_tokens": 200, **asked}
    if not stream:
        return await who.anthropic.messages.create(**asked)
    async with who.anthropic.messages.stream(**asked) as events:
        return await events.get_final_message()
