"""`python -m paceline.services.policy_trainer.rank_host --host N`: holds the policy's ranks on a
host that is not the trainer's. Imports no torch.
"""

from __future__ import annotations

import asyncio

from paceline.local.held import check_number, hold_until, run_held
from paceline.local.services import RANK_HOST
from paceline.local.tokens import use_run_tokens
from paceline.ranks.hosting import RankHost
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.hosts import check_hosts, group_on, same_on_hosts


async def serve(config: PolicyTrainerConfig, stop: asyncio.Event, *, host: int) -> None:
    """Holds the ranks of this host for the policy trainer, whenever that is there, until `stop` is
    set. Raises ConfigError and InvalidInput for a host that the trainer does not take.
    """
    check_hosts(config)
    check_number(host, config.hosts, "policy_trainer.hosts", "trainer", "ranks")
    use_run_tokens(config)
    held = RankHost(group_on(config, host), host, same_on_hosts(config))
    address = config.addresses.policy_trainer
    try:
        await hold_until(stop, lambda s: held.hold(address, config.security, s), "policy_trainer")
    finally:
        await held.close()


if __name__ == "__main__":
    run_held(__spec__.name, RANK_HOST, PolicyTrainerConfig, "policy_trainer", serve)
