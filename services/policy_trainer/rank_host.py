"""`python -m paceline.services.policy_trainer.rank_host --host N`: holds the policy's ranks on a
host that is not the trainer's. Imports no torch.
"""

from __future__ import annotations

import argparse
import asyncio
from functools import partial
from pathlib import Path

from paceline.config import load_config
from paceline.errors import ConfigError, InvalidInput, PacelineError
from paceline.local.entry import run_part
from paceline.local.patience import patient
from paceline.local.tokens import use_run_tokens
from paceline.ranks.hosting import RankHost
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.hosts import check_hosts, group_on, same_on_hosts
from paceline.telemetry import get_logger

_CONNECT_S = 10.0
_AGAIN_S = 1.0
_log = get_logger(__name__)


async def serve(config: PolicyTrainerConfig, stop: asyncio.Event, *, host: int) -> None:
    """Holds the ranks of this host for the policy trainer, whenever that is there, until `stop` is
    set. Raises ConfigError and InvalidInput for a host that the trainer does not take.
    """
    _check_host(config, host)
    use_run_tokens(config)
    held = RankHost(group_on(config, host), host, same_on_hosts(config))
    stopping = asyncio.create_task(stop.wait())
    said = ""
    try:
        while not stop.is_set():
            address = config.addresses.policy_trainer
            holding = asyncio.create_task(held.hold(address, config.security, patient(_CONNECT_S)))
            await asyncio.wait({holding, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not holding.done():
                holding.cancel()
                await asyncio.gather(holding, return_exceptions=True)
                return
            said = _heard(holding, said)
            await asyncio.wait({stopping}, timeout=_AGAIN_S)
    finally:
        stopping.cancel()
        await held.close()


def _heard(holding: asyncio.Task[None], before: str) -> str:
    """Why the trainer is gone, told once; raises what another try cannot mend."""
    try:
        holding.result()
    except (ConfigError, InvalidInput):
        raise
    except PacelineError as error:
        if str(error) != before:
            _log.warning("policy_trainer_away", error=str(error))
        return str(error)
    return ""


def _check_host(config: PolicyTrainerConfig, host: int) -> None:
    check_hosts(config)
    if not 1 <= host < len(config.hosts):
        raise ConfigError(
            "policy_trainer.hosts gives no ranks to this host; host 0 is the trainer's own",
            seen=f"--host {host}, policy_trainer.hosts={list(config.hosts)}",
            allowed=f"1 to {len(config.hosts) - 1}" if len(config.hosts) > 1 else "",
        )


def main() -> None:
    """Leaves the process."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", allow_abbrev=False)
    parser.add_argument("--host", type=int, required=True, help="its place in policy_trainer.hosts")
    parser.add_argument("--config", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_intermixed_args()
    try:
        config = load_config(PolicyTrainerConfig, "policy_trainer", given.config, given.overrides)
    except PacelineError as error:
        parser.error(str(error))
    run_part(f"rank_host_{given.host}", config, partial(serve, host=given.host))


if __name__ == "__main__":
    main()
