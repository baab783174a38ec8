"""What an untrained drafter would have given in a round of another arm is what its own round
gives."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path

import pytest
from random_models import save_random

from paceline.services.rollout_gateway.bandits.base import (
    ArmChoice,
    Bandit,
    BanditSettings,
    RoundOutcome,
    Situation,
    UnusedDrafts,
)
from paceline.services.rollout_gateway.bandits.window import WindowedBandit
from paceline.services.rollout_gateway.engines.embedded import aside
from paceline.services.rollout_gateway.engines.embedded.budget import Budget, ForwardCost
from paceline.services.rollout_gateway.engines.embedded.build import build_embedded
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.sampling import Sampling

OFF, CHAIN, TREE = "off", "ngram:4_1_5", "ngram:3_2_7"
LAST = 23
"""Of the rounds of 24 tokens, from 0: nothing can be accepted any more."""
PROMPTS = ((5, 6, 7, 8), (9, 10, 11), (5, 6, 7, 8), (12, 13))


class Played(WindowedBandit):
    """Plays one arm in one round and `off` in all others, and writes down what it is told."""

    def __init__(self, arm: str = OFF, at: int = -1) -> None:
        super().__init__(BanditSettings(), (OFF, CHAIN, TREE), seed=0)
        self._arm, self._at, self._round = arm, at, 0
        self.given: dict[int, int] = {}  # tokens by request, of the round with the arm
        self.unused: dict[int, int] = {}
        self.more: dict[int, bool] = {}

    def _choose(self, situation: Situation, names: Sequence[str]) -> ArmChoice:
        arm = self._arm if self._round == self._at else OFF
        self._round += 1
        return ArmChoice(arm, explored=False)

    def observe(self, outcome: RoundOutcome) -> None:
        if outcome.arm != OFF:
            ids = [row.request_id for row in outcome.situation.rows]
            self.given = dict(zip(ids, outcome.taken, strict=True))

    def observe_unused(self, drafts: UnusedDrafts) -> None:
        for row, taken, more in zip(drafts.rows, drafts.taken, drafts.more, strict=True):
            request = drafts.situation.rows[row].request_id
            self.unused.setdefault(request, taken)  # of the first look
            self.more.setdefault(request, more)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("aside") / "model"
    save_random(folder, "llama", seed=0, sharpness=6.0, num_hidden_layers=2)
    return folder


@pytest.fixture
def fixed_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets count forwards the same in every run: a token is a fifth of a forward."""
    monkeypatch.setattr(ForwardCost, "known", True)
    monkeypatch.setattr(ForwardCost, "learn", lambda self, tokens, seconds: None)
    monkeypatch.setattr(
        ForwardCost,
        "seconds",
        lambda self, rows, drafts: [1.0 + 0.2 * (rows + count) for count in range(drafts + 1)],
    )
    monkeypatch.setattr(Budget, "spend", lambda self, arm, seconds: None)


def build(model: Path, arms: Sequence[str], *, budget: bool) -> EmbeddedEngine:
    engine = build_embedded(
        EmbeddedSpec(
            model_dir=str(model),
            drafter="ngram",
            arms=tuple(arms),
            max_batch=4,
            max_sequence_tokens=96,
            verify_budget=budget,
        )
    )
    assert isinstance(engine, EmbeddedEngine)
    return engine


def say(engine: EmbeddedEngine, first: int, temperature: float, tokens: int = 24) -> None:
    for number, prompt in enumerate(PROMPTS, first):
        sampling = Sampling(
            seed=number - first, max_tokens=tokens, temperature=temperature, ignore_eos=True
        )
        engine.enqueue(Request(number, prompt, sampling))
    while engine.has_work:
        engine.step()


def play(engine: EmbeddedEngine, bandit: Bandit, temperature: float, tokens: int = 24) -> None:
    """The prompts' second time, after a first one without drafts that n-grams have read."""
    engine.force_arm(OFF)
    say(engine, 0, temperature, tokens)
    engine.force_arm("")
    engine._speculation.bandit = bandit
    say(engine, 10, temperature, tokens)


@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize("budget", [False, True])
@pytest.mark.parametrize("arm", [CHAIN, TREE])
@pytest.mark.parametrize(("temperature", "at"), [(0.0, 3), (1.0, 3), (1.0, 9), (1.0, LAST)])
def test_unused_drafts_would_have_given_what_a_round_of_the_arm_gives(
    arm: str,
    temperature: float,
    at: int,
    budget: bool,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, looked = Played(arm, at), Played()
    monkeypatch.setattr(aside, "LOOK_EVERY", 1 << 30)
    play(build(model, (OFF, arm), budget=budget), real, temperature)
    assert len(real.given) == len(PROMPTS)
    assert max(real.given.values()) > 1 or at == LAST, "drafts were accepted"
    monkeypatch.setattr(aside, "LOOK_EVERY", at + 1)
    play(build(model, (OFF, arm), budget=budget), looked, temperature)
    assert looked.unused == real.given


def test_a_request_that_ends_at_its_limit_has_refused_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aside, "LOOK_EVERY", 1)
    bandit = Played()
    play(build(model, (OFF, CHAIN), budget=False), bandit, 0.0, tokens=3)
    assert set(bandit.more.values()) == {False}
    assert set(bandit.unused.values()) == {3}


@pytest.mark.parametrize("forced", [OFF, CHAIN])
def test_nobody_looks_aside_where_the_bandit_does_not_choose(
    forced: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aside, "LOOK_EVERY", 1)
    engine = build(model, (OFF, CHAIN), budget=False)
    bandit = Played()
    engine._speculation.bandit = bandit
    engine.force_arm(forced)
    say(engine, 0, 0.0)
    assert not bandit.unused


def test_nobody_looks_aside_at_what_drafts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "LOOK_EVERY", 1)
    engine = build(model, (OFF, CHAIN), budget=False)

    class Always(Played):
        def choose(self, situation: Situation, names: Sequence[str] = ()) -> ArmChoice:
            return ArmChoice(CHAIN, explored=False)

    engine._speculation.bandit = bandit = Always()
    say(engine, 0, 0.0)
    assert bandit.given
    assert not bandit.unused


def test_a_barred_arm_is_not_looked_at(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "LOOK_EVERY", 1)
    engine = build(model, (OFF, CHAIN), budget=False)
    engine._speculation.bandit = bandit = Played()
    barred: Set[str] = {CHAIN}
    engine._speculation.bar(barred)
    say(engine, 0, 0.0)
    assert not bandit.unused
