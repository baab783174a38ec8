"""`python -m coordinator`: the coordinator's process."""

from coordinator.config import CoordinatorConfig
from coordinator.server import serve
from paceline.local.entry import run_service

if __name__ == "__main__":
    run_service("coordinator", CoordinatorConfig, serve)
