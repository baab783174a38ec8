"""`python -m paceline.services.policy_trainer [--policy_trainer N]`: its process on a node."""

from paceline.local.importing import uncollected

with uncollected():
    from paceline.local.entry import run_service
    from paceline.services.policy_trainer.config import PolicyTrainerConfig
    from paceline.services.policy_trainer.server import serve

if __name__ == "__main__":
    of_node = PolicyTrainerConfig.of_node
    run_service("policy_trainer", PolicyTrainerConfig, serve, extra="train", numbered=of_node)
