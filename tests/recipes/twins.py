"""One small variant of every plug-in family: its source and its table entry."""

from __future__ import annotations

SPECULATOR = """
from paceline.speculators.eagle import EagleDrafter
from paceline.speculators.eagle import EagleNet
{kind}

class TwinNet(EagleNet):
    kind = KIND


class TwinDrafter(EagleDrafter):
    net = TwinNet
"""
TABLE_KIND = """
from paceline.speculators.kinds import SPECULATORS

KIND = SPECULATORS["twin"]
"""
OWN_KIND = """
from paceline.speculators.kinds import SpeculatorKind

KIND = SpeculatorKind("twin", f"{__name__}:TwinDrafter", f"{__name__}:TwinNet", ("Twin",))
"""

BANDIT = """
from paceline.services.rollout_gateway.bandits.base import ArmChoice
from paceline.services.rollout_gateway.bandits.kinds import EpsilonGreedy


class LastArm(EpsilonGreedy):
    def choose(self, situation, names=()):
        return ArmChoice((names or self._names)[-1], explored=False)
"""

ENVIRONMENT = """
from dataclasses import replace

from paceline.services.rollout_gateway.environments.kinds import SingleTurn


class Signed(SingleTurn):
    def __init__(self, equipment=None):
        pass

    async def run(self, task, model):
        episode = await super().run(task, model)
        return replace(episode, text="signed")
"""

REWARD = """
class Signature:
    def score(self, episode):
        return 0.25 if episode.text == "signed" else -1.0
"""
TABLE_REWARD = """
from paceline.services.rollout_gateway.rewards import RewardRule


class Signature(RewardRule):
    async def score(self, episode):
        return 0.25 if episode.text == "signed" else -1.0
"""

ENGINE = """
from paceline.services.rollout_gateway.engines import EngineKind
from examples.scripted_engine.engine import build_scripted
from examples.scripted_engine.script import ScriptedSpec


class TwinSpec(ScriptedSpec):
    words: int = 5


def build(spec, sink=None):
    return build_scripted(spec.model_copy(update={"response_tokens": (spec.words,) * 2}), sink)


KIND = EngineKind(f"{__name__}:TwinSpec", f"{__name__}:build")
"""

ALGORITHM = """
from dataclasses import replace

from paceline.services.policy_trainer.algorithms.grpo import Grpo


class Reversed(Grpo):
    def advantages(self, batch):
        return -super().advantages(batch)
"""
