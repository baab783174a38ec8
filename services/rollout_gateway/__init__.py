"""Paceline service: rollout gateway."""

import os

# Workers are forked and replaced by exec at once, so gRPC's own fork hooks would only log
# complaints.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
