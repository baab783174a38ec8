"""Streams of batches with consumer groups in Redis; the ledger of finished branches;
and the open sessions.

Names within a run: "trajectories" (group "policy"), "features" (group "drafter"), "journal".
"""

from paceline.streams.connection import connect as connect
from paceline.streams.connection import run_key as run_key
from paceline.streams.entries import FeatureBatch as FeatureBatch
from paceline.streams.entries import decode_features as decode_features
from paceline.streams.entries import decode_trajectory as decode_trajectory
from paceline.streams.entries import encode_features as encode_features
from paceline.streams.entries import encode_trajectory as encode_trajectory
from paceline.streams.entries import trajectory_key as trajectory_key
from paceline.streams.ledger import NOTED as NOTED
from paceline.streams.ledger import Ledger as Ledger
from paceline.streams.ledger import LedgerCount as LedgerCount
from paceline.streams.open_sessions import OpenSessions as OpenSessions
from paceline.streams.open_sessions import api_key_hash as api_key_hash
from paceline.streams.redis_stream import Entry as Entry
from paceline.streams.redis_stream import RedisStream as RedisStream
