"""`python -m paceline.services.tinker`: the front's process."""

from paceline.local.importing import uncollected

with uncollected():
    from paceline.local.entry import run_service
    from paceline.services.tinker.config import TinkerConfig
    from paceline.services.tinker.server import serve

if __name__ == "__main__":
    run_service("tinker", TinkerConfig, serve)
