"""Says which ranks of the policy are on which host, and what its hosts need of each other. Imports
no torch.
"""

from __future__ import annotations

import ipaddress
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

from paceline.addresses import is_loopback
from paceline.errors import ConfigError, FailedPrecondition
from paceline.local.ports import way_to
from paceline.local.processes import LOOPBACK, usable_cores
from paceline.local.services import service
from paceline.ranks.group import HostShare, RankGroup
from paceline.report import machine
from paceline.services.policy_trainer.config import PolicyTrainerConfig

_OF_A_HOST = frozenset({"interface", "redis", "security", "telemetry"})
"""Settings that hosts may have each for itself."""


def ranks_of(config: PolicyTrainerConfig) -> int:
    """How many ranks the settings ask for, on all hosts together."""
    return sum(config.hosts) or config.ranks or min(2, usable_cores())


def shares(config: PolicyTrainerConfig, ranks: int, device: str = "") -> list[HostShare]:
    """Which of so many ranks each host holds, the trainer's own first; they compute on that kind of
    device. Raises FailedPrecondition for more than the hosts have places.
    """
    most = sum(config.hosts) or ranks
    if not 1 <= ranks <= most:
        raise FailedPrecondition(
            "policy_trainer.hosts has a place for each rank",
            seen=f"{ranks} ranks, hosts={list(config.hosts)}",
            allowed=f"1 to {most}",
        )
    held = dealt(config.hosts or (ranks,), ranks)
    return [HostShare(sum(held[:host]), here, ranks, device) for host, here in enumerate(held)]


def dealt(places: Sequence[int], ranks: int) -> list[int]:
    """How many ranks each host gets where they are dealt one by one, from the first host to the
    last and again, to those that have a place left.
    """
    turns = sorted((turn, host) for host, most in enumerate(places) for turn in range(most))
    held = Counter(host for _, host in turns[:ranks])
    return [held[host] for host in range(len(places))]


def check_hosts(config: PolicyTrainerConfig) -> None:
    """Raises ConfigError for hosts that do not fit the ranks, or whose ranks anybody could join."""
    if config.hosts and config.ranks not in (0, sum(config.hosts)):
        raise ConfigError(
            "policy_trainer.hosts and policy_trainer.ranks do not fit together",
            seen=f"{sum(config.hosts)} ranks on hosts, ranks={config.ranks}",
            allowed=f"ranks={sum(config.hosts)}, or 0",
        )
    security, address = config.security, config.addresses.policy_trainer
    waived = security.plain_ranks or security.allow_insecure
    if len(config.hosts) > 1 and not (is_loopback(address) or waived):
        raise ConfigError(
            "ranks on several hosts exchange weights and gradients without TLS, which gloo, as "
            "torch is built, and NCCL do not have",
            reason="PLAIN_RANKS",
            seen=f"policy_trainer.hosts={list(config.hosts)} at {address}",
            allowed="security.plain_ranks=true on a network that these hosts alone reach",
        )


def group_on(config: PolicyTrainerConfig, host: int) -> RankGroup:
    """What the ranks of one host are started with there, once it is resized to its share. Raises
    ConfigError.
    """
    return RankGroup(
        "paceline.services.policy_trainer.rank",
        world_size=0,  # until it has its share
        threads_per_rank=config.threads_per_rank,
        log_dir=Path(config.run.dir) / "logs",
        config=config,
        heartbeat_s=config.run.heartbeat_s,
        preload=service("policy_trainer").forked,
        interface=_interface(config, host) if len(config.hosts) > 1 else LOOPBACK,
    )


def same_on_hosts(config: PolicyTrainerConfig) -> dict[str, str]:
    """What all hosts have to have alike, by name."""
    return machine.same_on_hosts(config, _OF_A_HOST)


def _interface(config: PolicyTrainerConfig, host: int) -> str:
    """That the ranks of a host listen on."""
    if config.interface:
        return _known(config.interface)
    own, trainer = way_to(config.addresses.policy_trainer)
    # the service's own address is where the others look for its ranks too
    return _interface_of(own if host else trainer)


def _known(interface: str) -> str:
    there = sorted(name for _, name in socket.if_nameindex())
    if interface not in there:
        raise ConfigError(
            "this host has no such network interface; set policy_trainer.interface",
            seen=interface,
            allowed=", ".join(there),
        )
    return interface


def _interface_of(address: str) -> str:
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return LOOPBACK
    for name, found in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in found):
            return name
    raise ConfigError(
        "no network interface of this host has the policy trainer's address; set "
        "policy_trainer.interface",
        seen=address,
        allowed=", ".join(sorted(psutil.net_if_addrs())),
    )
