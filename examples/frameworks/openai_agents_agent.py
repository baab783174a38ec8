"""An agent of the OpenAI Agents SDK; each run is a session."""

from __future__ import annotations

import agents
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool
from openai import AsyncOpenAI
from warehouse import INSTRUCTIONS, QUESTION, connect, price, settle, stock, traced

agents.set_tracing_disabled(True)  # its traces would go to OpenAI

with traced(), connect() as client, client.session(task="bolts") as session:
    model = OpenAIChatCompletionsModel("", AsyncOpenAI(**session.openai_options()))
    tools = [function_tool(stock), function_tool(price)]
    agent = Agent(name="books", instructions=INSTRUCTIONS, tools=tools, model=model)
    agent.model_settings.max_tokens = 256
    settle(session, Runner.run_sync(agent, QUESTION).final_output)
