"""Streams of batches with consumer groups in Redis; the ledger of finished branches;
and the open sessions.

Names within a run: "trajectories" (group "policy"), "features" (group "drafter"), "journal".
"""

from paceline.streams.base import Depth, Entry
from paceline.streams.connection import connect, run_key
from paceline.streams.entries import (
    FeatureBatch,
    decode_features,
    decode_trajectory,
    encode_features,
    encode_trajectory,
    trajectory_key,
)
from paceline.streams.ledger import NOTED, Ledger, LedgerCount
from paceline.streams.open_sessions import OpenSessions, api_key_hash
from paceline.streams.redis_stream import RedisStream

__all__ = [
    "NOTED",
    "Depth",
    "Entry",
    "FeatureBatch",
    "Ledger",
    "LedgerCount",
    "OpenSessions",
    "RedisStream",
    "api_key_hash",
    "connect",
    "decode_features",
    "decode_trajectory",
    "encode_features",
    "encode_trajectory",
    "run_key",
    "trajectory_key",
]
