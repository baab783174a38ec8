"""An agent of pydantic-ai; each run is a session."""

from __future__ import annotations

from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from warehouse import INSTRUCTIONS, QUESTION, connect, price, settle, stock, traced

with traced(), connect() as client, client.session(task="bolts") as session:
    provider = OpenAIProvider(openai_client=AsyncOpenAI(**session.openai_options()))
    model = OpenAIChatModel("", provider=provider)
    agent = Agent(model, instructions=INSTRUCTIONS, tools=[stock, price])
    settle(session, agent.run_sync(QUESTION, model_settings={"max_tokens": 256}).output)
