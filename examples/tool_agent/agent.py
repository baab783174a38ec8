"""A tool-calling agent in pydantic-ai whose runs are sessions: two samples of one task, each scored
and exported.

The scripted engine answers with the texts of script.json: the first sample multiplies right, the
second sample does not. Exits with an error when the outcome differs. README.md shows how to
start the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic_ai import Agent, RunContext
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from paceline.client import find_token, trace_headers

QUESTION = "What are our bolts worth?"
WORTH = "84.00"


@dataclass
class Warehouse:
    """The tools' data, and the question."""

    stock: dict[str, int] = field(default_factory=lambda: {"bolts": 240})
    prices: dict[str, float] = field(default_factory=lambda: {"bolts": 0.35})
    asked: list[str] = field(default_factory=list)


agent = Agent(deps_type=Warehouse, instructions="You keep the warehouse's books.")
Agent.instrument_all()


@agent.tool
def stock(context: RunContext[Warehouse], item: str) -> int:
    """Returns the number of items in stock."""
    context.deps.asked.append(f"stock of {item}")
    return context.deps.stock[item]


@agent.tool
def price(context: RunContext[Warehouse], item: str) -> float:
    """Returns the price of one item."""
    context.deps.asked.append(f"price of {item}")
    return context.deps.prices[item]


@dataclass(frozen=True)
class Outcome:
    """One sample."""

    answer: str
    asked: list[str]
    output_tokens: int  # as the model's API counted them
    session: dict[str, Any]
    sample: dict[str, Any]  # the tokens to train on


async def carry_trace(request: httpx.Request) -> None:
    """The gateway's spans hang below pydantic-ai's, where this process exports any."""
    request.headers.update(trace_headers())


async def attempt(http: httpx.AsyncClient, url: str, sample_index: int) -> Outcome:
    """One run of the agent under a session of its own."""
    about = {
        "task_id": "bolts",
        "group_id": "bolts-0",
        "group_size": 2,
        "sample_index": sample_index,
    }
    opened = (await http.post("/v1/sessions", json=about)).raise_for_status().json()
    served = (await http.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
    warehouse = Warehouse()
    async with httpx.AsyncClient(event_hooks={"request": [carry_trace]}, timeout=60) as to_model:
        provider = OpenAIProvider(
            base_url=f"{url}/v1", api_key=opened["api_key"], http_client=to_model
        )
        run = await agent.run(
            QUESTION,
            model=OpenAIChatModel(served, provider=provider),
            deps=warehouse,
            model_settings={"seed": sample_index},
        )
    headers = {"authorization": f"Bearer {opened['api_key']}"}
    value = 1.0 if WORTH in run.output else 0.0
    (
        await http.post("/v1/sessions/current/reward", json={"value": value}, headers=headers)
    ).raise_for_status()
    export = await http.get(
        "/v1/sessions/current/export", params={"form": "samples"}, headers=headers
    )
    (sample,) = export.raise_for_status().json()["samples"]
    ended = await http.post("/v1/sessions/current/complete", headers=headers)
    tokens = run.usage.output_tokens
    return Outcome(run.output, warehouse.asked, tokens, ended.raise_for_status().json(), sample)


def check(outcomes: list[Outcome]) -> None:
    """Raises AssertionError when anything is not as the script makes it."""
    right, wrong = outcomes
    assert (right.answer, right.session["reward"]) == (
        "240 bolts at 0.35 each are worth 84.00.",
        1.0,
    ), right
    assert (wrong.answer, wrong.session["reward"]) == (
        "240 bolts at 0.35 each are worth 8.40.",
        0.0,
    ), wrong
    for one in outcomes:
        assert one.asked == ["stock of bolts", "price of bolts"], one.asked
        assert one.session["state"] == "final", one.session
        assert one.session["turns"] == 3, one.session
        mask = one.sample["loss_mask"]
        assert len(mask) == len(one.sample["token_ids"]) == len(one.sample["behavior_logprobs"])
        # Training uses exactly the model's three turns, and nothing of prompts and tools.
        assert sum(mask) == one.session["completion_tokens"] == one.output_tokens, one.session
        assert one.sample["reward"] == one.session["reward"]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:7408", help="address of the gateway")
    options = parser.parse_args()
    headers = {"authorization": f"Bearer {find_token(options.url) or 'none'}"}
    hooks = {"request": [carry_trace]}
    async with httpx.AsyncClient(
        base_url=options.url, headers=headers, timeout=60, event_hooks=hooks
    ) as http:
        outcomes = list(
            await asyncio.gather(*(attempt(http, options.url, index) for index in range(2)))
        )
    for one in outcomes:
        trained, tokens = sum(one.sample["loss_mask"]), len(one.sample["token_ids"])
        print(
            f"{one.session['reward']:.0f}  {one.answer}  (asked for {', '.join(one.asked)};",
            end=" ",
        )
        print(f"{trained} of {tokens} tokens are trained)")
    check(outcomes)


if __name__ == "__main__":
    asyncio.run(main())
