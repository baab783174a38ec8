"""Opens a channel to a service of a run on this machine as its operator."""

from __future__ import annotations

import os

import grpc

from paceline.config import SecurityConfig
from paceline.local.tokens import token_at
from paceline.rpc import channel


def operator_channel(address: str) -> grpc.aio.Channel:
    """A channel that carries $PACELINE_TOKEN, else the token of the run that serves there."""
    security = SecurityConfig()
    if not security.token and (token := token_at(address)):
        os.environ[security.token_env] = token
    return channel(address, security)
