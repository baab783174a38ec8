"""A tool-calling agent of smolagents; each run is a session."""

from __future__ import annotations

from smolagents import OpenAIModel, ToolCallingAgent, tool
from warehouse import INSTRUCTIONS, QUESTION, connect, price, settle, stock, traced

with traced(), connect() as client, client.session(task="bolts") as session:
    options = session.openai_options()
    url, key = options["base_url"], options["api_key"]
    model = OpenAIModel("", max_tokens=256, api_base=url, api_key=key, client_kwargs=options)
    tools = [tool(stock), tool(price)]
    agent = ToolCallingAgent(tools, model, instructions=INSTRUCTIONS, verbosity_level=0)
    agent.max_steps = 4
    settle(session, str(agent.run(QUESTION)))
