"""An agent of the OpenAI Agents SDK; each run is a session."""

from __future__ import annotations

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from warehouse import INSTRUCTIONS, QUESTION, connect, price, settle, stock, traced

set_tracing_disabled(True)  # its traces would go to OpenAI

with traced(), connect() as client, client.session(task="bolts") as session:
    model = OpenAIChatCompletionsModel("model", AsyncOpenAI(**session.openai_options()))
    tools = [function_tool(stock), function_tool(price)]
    agent = Agent(name="books", instructions=INSTRUCTIONS, tools=tools, model=model)
    settle(session, Runner.run_sync(agent, QUESTION).final_output)
