"""Paceline service: rollout gateway."""

import os

# Workers are forked and at once replaced by exec; gRPC's own fork hooks only complain about it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
