"""A LangGraph graph with a model and tools; each run is a session."""

from __future__ import annotations

from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from warehouse import INSTRUCTIONS, QUESTION, connect, price, settle, stock, traced

with traced(), connect() as client, client.session(task="bolts") as session:
    chat = ChatOpenAI(model="", max_tokens=256, **session.openai_options())
    told = chat.bind_tools([stock, price])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [told.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([stock, price]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    asked = {"messages": [("system", INSTRUCTIONS), ("user", QUESTION)]}
    settle(session, graph.compile().invoke(asked)["messages"][-1].content)
