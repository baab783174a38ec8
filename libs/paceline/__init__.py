"""Paceline: reinforcement-learning post-training with speculative rollouts."""

import os

# Before gRPC is imported, whose handlers of forks run in every process that uvloop starts, before
# it is another program, while threads of the parent are calling gRPC: one in thirty of them ended
# there by SIGSEGV. No fork of ours goes on with gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
