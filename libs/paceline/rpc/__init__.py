"""gRPC servers and channels for all services.

The package covers transport, security, errors and fencing, and no service.
"""

from paceline.rpc.channel import channel, responses, wait_healthy, wait_ready
from paceline.rpc.epochs import EPOCHS, EpochGuard, Track, check_run, leased
from paceline.rpc.security import check_events, names_loopback, scope_of
from paceline.rpc.server import MESSAGE_CAP, MOST_TASK_BYTES, Server, set_malloc_thresholds
from paceline.rpc.status import error_from_rpc, rpc_errors

__all__ = [
    "EPOCHS",
    "MESSAGE_CAP",
    "MOST_TASK_BYTES",
    "EpochGuard",
    "Server",
    "Track",
    "channel",
    "check_events",
    "check_run",
    "error_from_rpc",
    "leased",
    "names_loopback",
    "responses",
    "rpc_errors",
    "scope_of",
    "set_malloc_thresholds",
    "wait_healthy",
    "wait_ready",
]
