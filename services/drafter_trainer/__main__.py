"""`python -m paceline.services.drafter_trainer`: the drafter trainer's process."""

from paceline.local.importing import uncollected

with uncollected():
    from paceline.local.entry import run_service
    from paceline.services.drafter_trainer.config import DrafterTrainerConfig
    from paceline.services.drafter_trainer.server import serve

if __name__ == "__main__":
    run_service("drafter_trainer", DrafterTrainerConfig, serve, extra="train")
