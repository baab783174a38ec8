"""The engine drafts from the answers to a request's own prompt, and verifies more nodes of rows
that will last.

Tokens stay equal to decoding without drafts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError
from random_models import save_random

from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import PauseMode, Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.speculators.base import DraftBatch, Drafts, DraftShape
from paceline.speculators.ngram import NgramSpeculator
from paceline.trajectory import NEAR_TIE_GAP, Target, VersionSet

ARM, MOST = "ngram:4_1_5", 5
Said = dict[int, tuple[int, ...]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    for number, name in enumerate(("old", "new")):
        save_random(folder / name, "llama", seed=number, sharpness=6.0, num_hidden_layers=2)
    return folder


def build(directory: Path, **options: object) -> EmbeddedEngine:
    settings = {
        "model_dir": str(directory),
        "drafter": "ngram",
        "arms": ("off", ARM),
        "max_batch": 4,
        "max_sequence_tokens": 96,
        "verify_budget": False,
    }
    engine = EmbeddedEngine(EmbeddedSpec.model_validate(settings | options))
    assert isinstance(engine, EmbeddedEngine)
    return engine


def requests(temperature: float, count: int = 6, siblings: int = 1) -> list[Request]:
    rng = random.Random(7)
    prompts = [
        tuple(rng.randrange(3, 97) for _ in range(rng.randrange(4, 20))) for _ in range(count)
    ]
    return [
        Request(
            number,
            prompts[number // siblings],
            Sampling(seed=number, max_tokens=40, temperature=temperature, ignore_eos=True),
        )
        for number in range(count * siblings)
    ]


def say(engine: EmbeddedEngine, batch: Sequence[Request], arm: str = ARM) -> tuple[Said, float]:
    """Return tokens by request, and the acceptance length of the given requests alone."""
    engine.force_arm(arm)
    before, tokens, gap = engine.load.speculation, Said(), 1.0
    for one in batch:
        engine.enqueue(one)
    while engine.has_work:
        for chunk in engine.step():
            tokens[chunk.request_id], gap = chunk.token_ids, min(gap, chunk.smallest_gap)
    assert gap > NEAR_TIE_GAP, "choose other seeds: a near-tie may flip"
    after = engine.load.speculation
    rounds = after.target_steps - before.target_steps
    return tokens, sum(map(len, tokens.values())) / rounds


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_that_is_given_again_is_drafted_whole_and_none_changes(
    temperature: float, models: Path
) -> None:
    batch, engine = requests(temperature), build(models / "old")
    expected, alone = say(engine, batch, "off")
    engine.flush_cache()
    assert alone == 1.0
    first, _ = say(engine, batch)
    again, length = say(engine, batch)
    assert first == again == expected
    assert length == MOST, "40 tokens in 8 rounds"


def test_siblings_of_one_batch_save_rounds(models: Path) -> None:
    """At temperature 0 the outputs are equal; the last slot's request begins after the other
    requests.
    """
    batch, engine = requests(0.0, count=1, siblings=5), build(models / "old", max_batch=4)
    expected, _ = say(engine, batch, "off")
    engine.flush_cache()
    tokens, _ = say(engine, batch[:4])
    late, length = say(engine, [batch[4]])
    assert tokens | late == expected
    assert length == MOST


def test_the_speculator_hears_where_prompts_end_and_which_policy_draws(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[Sequence[int], int]] = []
    propose = NgramSpeculator.propose

    def listening(self: NgramSpeculator, batch: DraftBatch, shape: DraftShape) -> Drafts:
        heard.append((tuple(batch.prompts), batch.policy_version))
        return propose(self, batch, shape)

    monkeypatch.setattr(NgramSpeculator, "propose", listening)
    engine = build(models / "old")
    engine.force_arm(ARM)
    sampling = Sampling(seed=0, max_tokens=6, ignore_eos=True)
    engine.enqueue(Request(0, (5, 6, 7, 8), sampling))
    engine.enqueue(Request(1, (5, 6), sampling, response=(9, 10)))
    engine.step()
    engine.prepare_weights(Target.POLICY, 3, models / "new")
    engine.commit_weights(VersionSet(1, 3, 0), PauseMode.RETRACT)
    engine.step()
    assert heard[0] == ((4, 2), 0)
    assert heard[-1] == ((4, 2), 3)


@pytest.mark.parametrize("mode", list(PauseMode))
def test_answers_grow_old_with_the_policy_however_it_was_changed(
    mode: PauseMode, models: Path
) -> None:
    """Without answers of older versions, the second policy's output equals a fresh engine's."""
    engine = build(models / "old", answer_versions=0)
    batch = requests(0.0, count=2, siblings=3)
    engine.force_arm(ARM)
    for one in batch:
        engine.enqueue(one)
    for _ in range(4):
        engine.step()
    engine.prepare_weights(Target.POLICY, 1, models / "new")
    engine.commit_weights(VersionSet(1, 1, 0), mode)
    while engine.has_work:
        engine.step()
    fresh, _ = say(build(models / "new"), batch, "off")
    tokens, _ = say(engine, batch)
    again, length = say(engine, batch)
    assert tokens == again == fresh
    assert length == MOST


def test_a_negative_number_of_versions_is_refused() -> None:
    with pytest.raises(ValidationError, match="answer_versions"):
        EmbeddedSpec.model_validate({"model_dir": "here", "answer_versions": -1})
