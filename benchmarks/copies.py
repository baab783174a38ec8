"""Measures how long a version of weights takes to reach hosts of engine workers that copy it, from
the gateway or from each other, over a network of this machine's own whose hosts send at a limited
rate. Needs root: hosts are network namespaces.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gateway.backends import ScriptPace, engine_settings, write_model
from benchmarks.namespaces import NETWORK, Host, hosts, why_none
from benchmarks.result import Goal, Row, at_most, paired_ratio, say
from paceline.errors import FailedPrecondition
from paceline.local.patience import patient
from paceline.local.push_tree import Network, tree_s

SECTION = "a version to hosts that copy it"
ADDRESS = f"{NETWORK}.1:7401"
GATEWAY = "paceline.services.rollout_gateway"
FAN_OUTS = (0, 2, 1)
"""All from the gateway, a tree, a chain."""
_ROOT = Path(__file__).parents[1]
_TOKEN = secrets.token_hex(16)
_HOP_S, _PART_BYTES = 0.005, 1 << 20  # assumed, and as copies are sent


@dataclass(frozen=True, slots=True)
class CopiesPlan:
    """Hosts beside the gateway's, megabytes of a version, millions of bits that a host sends a
    second.
    """

    hosts: int
    megabytes: int
    mbit: int

    def computed_s(self, fan_out: int) -> float:
        """Seconds until the last host has all, by the network alone."""
        network = Network(self.mbit * 125_000, _HOP_S, _PART_BYTES)
        return tree_s(self.megabytes * 1_000_000, self.hosts, fan_out or self.hosts, network)


@dataclass(frozen=True, slots=True)
class Copied:
    """One push."""

    seconds: float  # from the spool to all workers
    sent: tuple[float, ...]  # by each host, the gateway's first, over the version's bytes


def copies(plan: CopiesPlan, repeats: int) -> tuple[list[Row], list[Goal]]:
    """Every fan-out in turn. Raises FailedPrecondition where no network can be made."""
    if reason := why_none():
        raise FailedPrecondition("hosts that copy need a network of their own", seen=reason)
    found: dict[int, list[Copied]] = {fan_out: [] for fan_out in FAN_OUTS}
    for repeat in range(repeats):
        for fan_out in FAN_OUTS:
            found[fan_out].append(one_push(plan, fan_out))
            say(f"repeat {repeat}, fan-out {fan_out}: {found[fan_out][-1].seconds:.2f} s")
    return rows_of(plan, found), goals_of(plan, found)


def rows_of(plan: CopiesPlan, found: dict[int, list[Copied]]) -> list[Row]:
    """A row for each fan-out."""
    direct = [one.seconds for one in found[0]]
    return [
        {
            "section": SECTION,
            "copy_fan_out": fan_out,
            "hosts": plan.hosts,
            "MB": plan.megabytes,
            "Mbit/s": plan.mbit,
            "s": statistics.median(one.seconds for one in pushes),
            "computed s": plan.computed_s(fan_out),
            "of all from the gateway": str(paired_ratio([one.seconds for one in pushes], direct)),
            "gateway sends": statistics.median(one.sent[0] for one in pushes),
            "most of a host": statistics.median(max(one.sent[1:]) for one in pushes),
        }
        for fan_out, pushes in found.items()
    ]


def goals_of(plan: CopiesPlan, found: dict[int, list[Copied]]) -> list[Goal]:
    """The gateway sends no more than it is told to."""
    return [
        at_most(
            f"versions that the gateway sends, fan-out {fan_out}",
            1.1 * min(fan_out, plan.hosts),
            statistics.median(one.sent[0] for one in found[fan_out]),
        )
        for fan_out in found
        if fan_out
    ]


def one_push(plan: CopiesPlan, fan_out: int) -> Copied:
    """Of a gateway and hosts that live as long."""
    environment = {**os.environ, "PACELINE_TOKEN": _TOKEN}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name, ExitStack() as stack:
        made = stack.enter_context(hosts(plan.hosts + 1))
        for host in made:
            host.limit(plan.mbit)
        given = _settings(Path(name), plan.hosts, fan_out)
        for number, host in enumerate(made):
            module = (f"{GATEWAY}.worker_host", "--host", str(number)) if number else (GATEWAY,)
            stack.enter_context(_running(host, (*module, *given), environment))
        before, size = [host.sent_bytes for host in made], plan.megabytes * 1_000_000
        push = ("benchmarks.push_version", ADDRESS, str(plan.hosts + 1), str(size))
        told = subprocess.run(
            [*made[0].within, sys.executable, "-m", *push],
            check=True,
            capture_output=True,
            cwd=_ROOT,
            env=environment,
            timeout=patient(300),
        )
        sent = [(host.sent_bytes - start) / size for host, start in zip(made, before, strict=True)]
    return Copied(json.loads(told.stdout)["fan_out_s"], tuple(sent))


def _settings(folder: Path, others: int, fan_out: int) -> Sequence[str]:
    model, script = write_model(folder, engine_settings(ScriptPace(64, 4, 0.0)))
    return [
        f"model={model}",
        f"addresses.gateway={ADDRESS}",
        "addresses.http=127.0.0.1:0",
        f"spool_dir={folder / 'spool'}",
        "security.allow_insecure=true",
        "engine.kind=scripted",
        f"engine.script={script}",
        f"engine.hosts={[1] * (others + 1)}",
        "engine.shared_spool=false",
        f"engine.copies_fan_out={fan_out}",
    ]


@contextmanager
def _running(host: Host, command: Sequence[str], environment: dict[str, str]) -> Iterator[None]:
    process = subprocess.Popen(
        [*host.within, sys.executable, "-m", *command],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(patient(60))
