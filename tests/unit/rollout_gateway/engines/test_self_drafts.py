"""The policy drafts for itself with rounded weights: the same tokens, many drafts accepted, and no
weights of an earlier policy.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from live_memory import live_bytes
from random_models import save_random

from paceline.errors import ConfigError
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import PauseMode, Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.services.rollout_gateway.engines.sglang.plugin.arms import parse_arms
from paceline.trajectory import NEAR_TIE_GAP, Target, VersionSet

ARM = "self:4_1_5"
ACCEPTED = 0.3
"""Least share of accepted drafts. Random weights bear four bits badly: 0.47, and 0.8 if pretrained."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("self")
    save_random(made / "policy", "llama", sharpness=6.0)
    save_random(made / "later", "llama", seed=1, sharpness=6.0)
    return made


def build(folder: Path, policy: str = "policy", **options: object) -> EmbeddedEngine:
    settings = {
        "model_dir": str(folder / policy),
        "drafter": "self",
        "max_batch": 3,
        "threads": 1,
        "max_sequence_tokens": 96,
        "arms": ("off", ARM),
        **options,
    }
    engine = EmbeddedEngine(EmbeddedSpec.model_validate(settings))
    engine.force_arm(ARM if ARM in engine.info.arms else "off")
    return engine


def generate(engine: EmbeddedEngine) -> dict[int, tuple[int, ...]]:
    """Tokens of greedy, drawn and masked requests, more than run at once."""
    for seed in range(9):
        sampling = Sampling(
            seed,
            max_tokens=40,
            ignore_eos=True,
            temperature=(0.0, 0.8, 1.0)[seed % 3],
            top_p=0.9 if seed > 5 else 1.0,
        )
        engine.enqueue(Request(seed, (5, 6, 7 + seed), sampling))
    tokens: dict[int, tuple[int, ...]] = {}
    while engine.has_work:
        for chunk in engine.step():
            assert chunk.smallest_gap > NEAR_TIE_GAP, "choose other seeds: a near-tie may flip"
            tokens[chunk.request_id] = chunk.token_ids
    return tokens


def accepted_share(engine: EmbeddedEngine) -> float:
    stats = engine.load.speculation
    return stats.accepted_tokens / stats.drafted_tokens


@pytest.mark.parametrize("options", [{}, {"profile": "int8_w8a8"}])
def test_many_drafts_are_accepted_and_no_token_depends_on_them(
    folder: Path, options: dict[str, object]
) -> None:
    engine = build(folder, verify_budget=False, **options)
    assert generate(engine) == generate(build(folder, drafter="off", arms=(), **options))
    assert accepted_share(engine) > ACCEPTED


def test_drafts_are_those_of_the_committed_policy_from_its_commit_on(folder: Path) -> None:
    engine = build(folder, verify_budget=False)
    engine.prepare_weights(Target.POLICY, 1, folder / "later")
    engine.commit_weights(VersionSet(1, 1, 0), PauseMode.RETRACT)
    assert generate(engine) == generate(build(folder, "later", drafter="off", arms=()))
    assert accepted_share(engine) > ACCEPTED


def test_weights_are_rounded_again_only_for_a_version_with_other_numbers(folder: Path) -> None:
    engine = build(folder, "later", verify_budget=False)
    generate(engine)
    drafter = engine._speculation.drafters.live["self"]
    rounded = drafter._weights
    for version, same in ((1, True), (2, False)):
        engine.prepare_weights(Target.POLICY, version, folder / ("later" if same else "policy"))
        engine.commit_weights(VersionSet(version, version, 0), PauseMode.RETRACT)
        generate(engine)
        assert (drafter._weights is rounded) == same
        assert accepted_share(engine) > ACCEPTED


def test_rounded_weights_are_freed_with_the_policys_and_come_back(folder: Path) -> None:
    engine = build(folder, memory_saver=True)
    expected = generate(engine)
    drafter = engine._speculation.drafters.live["self"]
    engine.release_memory()
    gc.collect()
    assert set(vars(drafter).values()) == {None}
    held = live_bytes()
    engine.resume_memory()
    assert live_bytes() > held
    assert generate(engine) == expected
    assert accepted_share(engine) > ACCEPTED


def test_it_drafts_beside_another_kind_only_where_an_arm_names_it(folder: Path) -> None:
    both = build(folder, drafter="ngram", arms=("off", "ngram:4_1_5", ARM))
    assert both.info.arms == ("off", "ngram:4_1_5", ARM)
    alone = build(folder, drafter="ngram", arms=())
    assert alone.info.arms == ("off", "ngram:4_1_5")


def test_sglang_refuses_it_by_name() -> None:
    with pytest.raises(ConfigError, match="self:4_1_5"):
        parse_arms(("off", ARM))
