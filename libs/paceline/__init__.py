"""Paceline: reinforcement-learning post-training with speculative rollouts."""

import os

# gRPC reads this variable at import. Its fork handlers run whenever uvloop forks to start a program
# while other threads call gRPC. One in thirty such children died by SIGSEGV. No child of Paceline
# uses gRPC after a fork, so the handlers are off.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
