"""gRPC servers and channels for all services, and checks of their HTTP requests.

The package covers transport, security, errors and fencing, and no service.
"""

from paceline.rpc.channel import channel as channel
from paceline.rpc.channel import responses as responses
from paceline.rpc.channel import wait_healthy as wait_healthy
from paceline.rpc.channel import wait_ready as wait_ready
from paceline.rpc.epochs import EPOCHS as EPOCHS
from paceline.rpc.epochs import EpochGuard as EpochGuard
from paceline.rpc.epochs import Track as Track
from paceline.rpc.epochs import check_run as check_run
from paceline.rpc.epochs import leased as leased
from paceline.rpc.security import check_events as check_events
from paceline.rpc.security import names_loopback as names_loopback
from paceline.rpc.security import scope_of as scope_of
from paceline.rpc.server import MOST_TASK_BYTES as MOST_TASK_BYTES
from paceline.rpc.server import Server as Server
from paceline.rpc.status import error_from_rpc as error_from_rpc
from paceline.rpc.status import rpc_errors as rpc_errors
