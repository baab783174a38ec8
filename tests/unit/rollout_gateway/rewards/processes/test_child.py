"""Children beside the gateway: they end with it, and it imports nothing of theirs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from paceline.local.patience import patient

RULES = """
import os, time

class Pid:
    def score(self, episode):
        return float(os.getpid())

class Hangs:
    def score(self, episode):
        time.sleep(1000)
"""


def test_children_end_when_the_gateway_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "own_rules.py"
    path.write_text(RULES)
    program = f"""
import asyncio, time
from paceline.services.rollout_gateway.config import RewardsConfig
from paceline.services.rollout_gateway.environments import Episode, EpisodeTask
from paceline.services.rollout_gateway.rewards.rules import RewardRules
async def main():
    own = {{name: f"{path}:{{name}}" for name in ("Pid", "Hangs")}}
    rules = RewardRules(RewardsConfig(own=own))
    print(int(await rules.rule("Pid").score(Episode(EpisodeTask("t", "p", "6"), "x", "stop"))), flush=True)
    await rules.rule("Hangs").score(Episode(EpisodeTask("t", "p", "6"), "/dev/null", "stop"))
asyncio.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as gateway:
        assert gateway.stdout is not None
        child = psutil.Process(int(gateway.stdout.readline()))
        gateway.kill()
        child.wait(timeout=patient(10))


def test_the_gateways_side_imports_neither_torch_nor_mathematics() -> None:
    names = "{'torch', 'transformers', 'sympy'}"
    program = f"import sys, paceline.services.rollout_gateway.rewards; print({names} & sys.modules.keys() or [])"
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "[]"
