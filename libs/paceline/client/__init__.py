"""Opens sessions, generates and rewards over the gateway's HTTP API, for agents (docs/agents.md).

    from paceline.client import Client

    with Client("http://127.0.0.1:7408") as client:
        with client.session(task="gsm8k-17", group="g1", group_size=8) as session:
            answer = session.chat([{"role": "user", "content": "6 * 7 = ?"}], max_tokens=64)
            session.reward(1.0 if "42" in answer.text else 0.0)

Of the control plane it imports paceline.errors alone, and httpx: an agent's process starts no gRPC
and no torch.
"""

from paceline.client.aio.client import AsyncClient
from paceline.client.aio.session import AsyncChatStream, AsyncSession
from paceline.client.answers import ChatAnswer, Sample, SessionInfo, Task, Tokens, ToolCall, Usage
from paceline.client.deltas import Delta, ToolCallDelta
from paceline.client.options import ChatOptions, GenerationOptions
from paceline.client.settings import Backoff, find_token
from paceline.client.sync.client import Client
from paceline.client.sync.session import ChatStream, Session
from paceline.client.traces import trace_headers

__all__ = [
    "AsyncChatStream",
    "AsyncClient",
    "AsyncSession",
    "Backoff",
    "ChatAnswer",
    "ChatOptions",
    "ChatStream",
    "Client",
    "Delta",
    "GenerationOptions",
    "Sample",
    "Session",
    "SessionInfo",
    "Task",
    "Tokens",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "find_token",
    "trace_headers",
]
