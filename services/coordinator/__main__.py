"""`python -m paceline.services.coordinator`: the coordinator's process."""

from paceline.local.importing import uncollected

with uncollected():
    from paceline.local.entry import run_service
    from paceline.services.coordinator.config import CoordinatorConfig
    from paceline.services.coordinator.server import serve

if __name__ == "__main__":
    run_service("coordinator", CoordinatorConfig, serve)
