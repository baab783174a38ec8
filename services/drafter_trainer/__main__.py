"""`python -m drafter_trainer`."""

from drafter_trainer.config import DrafterTrainerConfig
from drafter_trainer.server import serve
from paceline.local.entry import run_service

if __name__ == "__main__":
    run_service("drafter_trainer", DrafterTrainerConfig, serve, extra="train")
