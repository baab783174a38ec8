"""Several trained kinds in one engine: one serves, a commit brings another, and no token ever
depends on it.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_models import save_random
from transformers import PreTrainedModel
from twin_kind import DeepDrafter, DeepNet, SilentNet, TwinNet

from paceline.errors import ConfigError, InvalidInput, MissingCapability, WeightsError
from paceline.messages import stats_from_proto
from paceline.models.config import read_config
from paceline.services.rollout_gateway.bandits import BANDITS
from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import (
    Capability,
    PauseMode,
    Request,
    RowLayout,
)
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.speculators.eagle import EagleNet
from paceline.speculators.kinds import SPECULATORS
from paceline.speculators.net import net_of
from paceline.speculators.shift import FILE, AcceptanceShift
from paceline.trajectory import NEAR_TIE_GAP, SpeculationStats, Target, VersionSet

TWIN, DEEP, SILENT = "twin_kind:KIND", "twin_kind:DEEP", "twin_kind:SILENT"
EAGLE_ARMS, TWIN_ARMS = {"eagle:3_1_4", "eagle:5_1_6", "eagle:7_1_8"}, {"twin:3_1_4", "twin:5_1_6"}
ALWAYS = {"off", "ngram:4_1_5"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A policy, a later one, and drafters of equal weights under three kinds' names."""
    folder = tmp_path_factory.mktemp("kinds")
    model = save_random(folder / "policy", "llama", sharpness=6.0)
    save_random(folder / "later", "llama", seed=1, sharpness=6.0)
    for net in (EagleNet, TwinNet, DeepNet):
        net(read_config(folder / "policy"), seed=3).save(folder / net.kind.name)
    return folder, model


def build(folder: Path, **options: object) -> EmbeddedEngine:
    settings = {
        "model_dir": str(folder / "policy"),
        "drafter": "eagle",
        "more_drafters": (TWIN,),
        "max_batch": 4,
    }
    engine = EmbeddedEngine(
        EmbeddedSpec.model_validate(settings | {"max_sequence_tokens": 96} | options)
    )
    assert isinstance(engine, EmbeddedEngine)
    return engine


def requests(count: int = 6, **options: object) -> list[Request]:
    return [
        Request(
            i,
            (5, 6, 7 + i),
            Sampling(seed=i, max_tokens=50, ignore_eos=True, temperature=i % 2),
            **options,
        )  # type: ignore[arg-type]
        for i in range(count)
    ]


def drain(engine: Engine) -> dict[int, tuple[int, ...]]:
    tokens = {}
    while engine.has_work:
        tokens |= {chunk.request_id: chunk.token_ids for chunk in engine.step() if chunk.finish}
    return tokens


def generate(engine: Engine, batch: list[Request]) -> dict[int, tuple[int, ...]]:
    for one in batch:
        engine.enqueue(one)
    return drain(engine)


def commit(engine: Engine, path: Path, version: int, *, policy: int = 0) -> None:
    engine.prepare_weights(Target.DRAFTER, version, path)
    engine.commit_weights(VersionSet(engine.versions.seq + 1, policy, version), PauseMode.IN_PLACE)


@pytest.fixture(scope="module")
def expected(target: tuple[Path, PreTrainedModel]) -> dict[int, tuple[int, ...]]:
    engine = build(target[0], drafter="off", more_drafters=())
    batch, gap = requests(), float("inf")
    for one in batch:
        engine.enqueue(one)
    tokens = {}
    while engine.has_work:
        for chunk in engine.step():
            tokens[chunk.request_id], gap = chunk.token_ids, min(gap, chunk.smallest_gap)
    assert gap > NEAR_TIE_GAP, "choose other seeds: a near-tie may flip"
    return tokens


def in_all_arms(engine: EmbeddedEngine) -> SpeculationStats:
    """Its statistics with the counts of arms added up."""
    stats = stats_from_proto(engine.load.speculation)
    rounds, tokens = (
        {"": sum(by_arm.values())} for by_arm in (stats.arm_drafted_rounds, stats.arm_round_tokens)
    )
    return replace(stats, arm_drafted_rounds=rounds, arm_round_tokens=tokens)


def test_another_kind_takes_over_within_requests_and_drafts_as_well_as_if_it_had_always_served(
    target: tuple[Path, PreTrainedModel], expected: dict[int, tuple[int, ...]]
) -> None:
    """Both kinds hold the same weights, so that catching up from kept states must give the same
    drafts.
    """
    folder, _ = target
    steady = build(folder, drafter=str(folder / "eagle"), verify_budget=False)
    switching = build(folder, drafter=str(folder / "eagle"), verify_budget=False)
    for engine in (steady, switching):
        engine.force_arm("eagle:3_1_4")
        for one in requests():
            engine.enqueue(one)
    tokens = {}
    while steady.has_work:
        if (
            steady.load.tokens_emitted == switching.load.tokens_emitted
            and steady._decoder.split.rounds == 8
        ):
            commit(switching, folder / "twin", 1)
            assert all(sequence.lacking <= 0 for sequence in switching._scheduler.running), (
                "nothing is cached again"
            )
            switching.force_arm("twin:3_1_4")
        steady.step()
        tokens |= {chunk.request_id: chunk.token_ids for chunk in switching.step() if chunk.finish}
        assert in_all_arms(steady) == in_all_arms(switching)
    assert tokens == expected
    assert switching.load.speculation.accepted_tokens > 0
    assert switching._speculation.drafters.serving == "twin"


def test_forced_arms_of_a_resting_kind_are_refused_and_earlier_ones_draft_nothing(
    target: tuple[Path, PreTrainedModel], expected: dict[int, tuple[int, ...]]
) -> None:
    folder, _ = target
    engine = build(folder)
    assert set(engine.info.arms) == ALWAYS | EAGLE_ARMS | TWIN_ARMS
    with pytest.raises(
        InvalidInput, match=r"it rests; seen: twin:3_1_4; allowed: off, eagle:3_1_4"
    ):
        engine.force_arm("twin:3_1_4")
    with pytest.raises(InvalidInput, match="it rests"):
        engine.enqueue(requests(forced_arm="twin:5_1_6")[0])
    with pytest.raises(InvalidInput, match="unknown arm"):
        engine.force_arm("medusa:3_1_4")
    batch = [
        Request(one.request_id, one.prompt, one.sampling, forced_arm="eagle:3_1_4")
        for one in requests()
    ]
    for one in batch:
        engine.enqueue(one)
    tokens = {
        chunk.request_id: chunk.token_ids
        for _ in range(5)
        for chunk in engine.step()
        if chunk.finish
    }
    drafted = engine.load.speculation.drafted_rounds
    assert drafted > 0
    commit(engine, folder / "twin", 1)
    assert tokens | drain(engine) == expected
    assert engine.load.speculation.drafted_rounds == drafted
    with pytest.raises(InvalidInput, match="it rests"):
        engine.force_arm("eagle:3_1_4")
    engine.force_arm("twin:3_1_4")
    commit(engine, folder / "eagle", 2)
    assert generate(engine, requests()) == expected
    assert engine.load.speculation.drafted_rounds == drafted, (
        "the engine's forced arm rests with its kind"
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("watchdog", [0, 20])
@pytest.mark.parametrize("kind", sorted(BANDITS))
def test_no_bandit_chooses_an_arm_of_a_resting_kind(
    kind: str,
    watchdog: int,
    target: tuple[Path, PreTrainedModel],
    expected: dict[int, tuple[int, ...]],
) -> None:
    folder, _ = target
    engine = build(folder, bandit={"kind": kind, "epsilon": 1.0, "watchdog_rounds": watchdog})
    assert generate(engine, requests()) == expected
    first = {report.arm: report.pulls for report in engine.load.arms if report.pulls}
    assert set(first) <= ALWAYS | EAGLE_ARMS
    assert set(first) & EAGLE_ARMS
    eagle_pulls = sum(report.pulls for report in engine.load.arms if report.arm in EAGLE_ARMS)
    commit(engine, folder / "twin", 1)
    assert generate(engine, requests()) == expected
    used = {report.arm for report in engine.load.arms if report.pulls}
    assert used & TWIN_ARMS
    assert (
        sum(report.pulls for report in engine.load.arms if report.arm in EAGLE_ARMS) == eagle_pulls
    )


def test_a_kind_can_be_rolled_back_to_a_version_prepared_before(
    target: tuple[Path, PreTrainedModel], expected: dict[int, tuple[int, ...]]
) -> None:
    folder, _ = target
    engine = build(folder, verify_budget=False)
    engine.prepare_weights(Target.DRAFTER, 1, folder / "eagle")
    engine.prepare_weights(Target.DRAFTER, 2, folder / "twin")
    accepted = []
    for seq, version, arm in ((1, 2, "twin:3_1_4"), (2, 1, "eagle:3_1_4")):
        engine.commit_weights(VersionSet(seq, 0, version), PauseMode.IN_PLACE)
        engine.force_arm(arm)
        before = engine.load.speculation.accepted_tokens
        assert generate(engine, requests()) == expected
        accepted.append(engine.load.speculation.accepted_tokens - before)
    assert accepted[0] == accepted[1] > 0
    assert engine.versions == VersionSet(2, 0, 1)


def test_a_new_policy_and_another_kind_are_served_by_one_commit(
    target: tuple[Path, PreTrainedModel],
) -> None:
    folder, _ = target
    engine = build(folder, verify_budget=False)
    engine.prepare_weights(
        Target.DRAFTER, 1, folder / "twin"
    )  # before the policy it will draft for
    engine.prepare_weights(Target.POLICY, 1, folder / "later")
    engine.commit_weights(VersionSet(1, 1, 1), PauseMode.IN_PLACE)
    fresh = build(
        folder, model_dir=str(folder / "later"), drafter=str(folder / "twin"), verify_budget=False
    )
    for one in (engine, fresh):
        one.force_arm("twin:3_1_4")
    assert generate(engine, requests()) == generate(fresh, requests())
    assert engine.load.speculation == fresh.load.speculation


def test_an_engine_without_a_drafter_of_its_own_serves_the_kind_that_is_committed(
    target: tuple[Path, PreTrainedModel], expected: dict[int, tuple[int, ...]]
) -> None:
    folder, _ = target
    engine = build(folder, drafter="ngram", verify_budget=False)
    assert set(engine.info.arms) == ALWAYS | TWIN_ARMS
    assert Capability.DRAFTER_UPDATE in engine.info.capabilities
    assert generate(engine, requests()) == expected
    assert {report.arm for report in engine.load.arms if report.pulls} <= ALWAYS
    commit(engine, folder / "twin", 1)
    engine.force_arm("twin:3_1_4")
    before = engine.load.speculation.accepted_tokens
    assert generate(engine, requests()) == expected
    assert engine.load.speculation.accepted_tokens > before


def test_a_version_without_config_is_of_the_configured_kind(
    target: tuple[Path, PreTrainedModel], expected: dict[int, tuple[int, ...]], tmp_path: Path
) -> None:
    folder, _ = target
    shutil.copy(folder / "eagle" / "model.safetensors", tmp_path)
    engine = build(folder)
    commit(engine, folder / "twin", 1)
    commit(engine, tmp_path, 2)
    engine.force_arm("eagle:3_1_4")
    assert generate(engine, requests()) == expected
    with pytest.raises(InvalidInput, match=r"config\.json"):
        build(folder, drafter="ngram").prepare_weights(Target.DRAFTER, 1, tmp_path)


def test_versions_that_cannot_serve_are_refused_at_prepare(
    target: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    folder, _ = target
    engine = build(folder, more_drafters=())
    with pytest.raises(InvalidInput, match=r"seen: TwinDrafter; allowed: .*LlamaForCausalLMEagle"):
        engine.prepare_weights(Target.DRAFTER, 1, folder / "twin")
    with pytest.raises(InvalidInput, match=r"twin.*TwinDrafter"):
        build(folder, drafter=str(folder / "twin"), more_drafters=())
    with pytest.raises(WeightsError, match="no arm drafts with this kind"):
        build(folder, arms=("twin:3_1_4",)).prepare_weights(Target.DRAFTER, 1, tmp_path)
    with pytest.raises(MissingCapability):
        build(folder, drafter="ngram", more_drafters=()).prepare_weights(
            Target.DRAFTER, 1, folder / "twin"
        )
    narrow = save_random(tmp_path / "narrow", "llama", hidden_size=32)
    assert narrow.config.hidden_size == 32
    TwinNet(read_config(tmp_path / "narrow")).save(tmp_path / "twin")
    with pytest.raises(InvalidInput, match="hidden_size"):
        build(folder).prepare_weights(Target.DRAFTER, 1, tmp_path / "twin")
    save_random(tmp_path / "heads", "llama", num_key_value_heads=4)
    EagleNet(read_config(tmp_path / "heads")).save(tmp_path / "eagle")
    with pytest.raises(WeightsError, match="attention"):
        build(folder).prepare_weights(Target.DRAFTER, 1, tmp_path / "eagle")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"more_drafters": ("medusa",)}, "medusa"),
        ({"more_drafters": ("nowhere:KIND",)}, "nowhere"),
        ({"more_drafters": ("twin_kind:TwinNet",)}, "a SpeculatorKind"),
        ({"more_drafters": ("ngram",)}, "without weights"),
        ({"drafter": "medusa"}, "medusa"),
        ({"arms": ("deep:3_1_4",)}, "deep:3_1_4"),
        (
            {"more_drafters": (DEEP,), "drafter": TWIN, "capture_inner": (3,)},
            "ascending layers of 1 to 2",
        ),
        (
            {"drafter": SILENT, "more_drafters": ()},
            r"silent reads .* gateway\.features\.layers.*seen: 1; allowed: last",
        ),
    ],
)
def test_kinds_that_cannot_work_are_refused_by_name(
    options: dict[str, object], named: str, target: tuple[Path, PreTrainedModel]
) -> None:
    with pytest.raises(ConfigError, match=named):
        build(target[0], **options)


def test_a_kind_that_reads_inner_states_catches_up_from_those_that_were_kept(
    target: tuple[Path, PreTrainedModel], expected: dict[int, tuple[int, ...]]
) -> None:
    """Computed at prefill and in rounds of another kind, moved between slots, reused from ended
    requests.
    """
    folder, model = target
    engine = build(
        folder, more_drafters=(DEEP,), capture_inner=(1, 2), prefix_tokens=16, max_batch=3
    )
    assert engine.info.rows == RowLayout(3 * 48, "1,2,last", "post_norm")
    engine.force_arm("eagle:3_1_4")
    for one in requests():
        engine.enqueue(one)
    tokens = {
        chunk.request_id: chunk.token_ids
        for _ in range(40)
        for chunk in engine.step()
        if chunk.finish
    }
    commit(engine, folder / "deep", 1)
    assert DeepDrafter.layers == "1,2,last"
    DeepDrafter.noted.clear()
    engine.force_arm("deep:3_1_4")
    assert tokens | drain(engine) == expected
    ended = (*requests()[0].prompt, *expected[0])
    generate(engine, [Request(9, (*ended, 8, 9), Sampling(seed=1, max_tokens=5))])
    assert engine.load.prefixes.reused_tokens >= len(ended) - 1
    assert len(DeepDrafter.noted) > 20
    for states, ids in DeepDrafter.noted:
        with torch.inference_mode():
            hidden = model(ids[None, :-1], output_hidden_states=True).hidden_states
        wanted = torch.cat([hidden[1][0], hidden[2][0], hidden[-1][0]], dim=-1)
        torch.testing.assert_close(states, wanted, atol=1e-5, rtol=0)


def test_a_version_that_reads_states_not_kept_is_refused_at_prepare(
    target: tuple[Path, PreTrainedModel],
) -> None:
    folder, _ = target
    SilentNet(read_config(folder / "policy")).save(folder / "silent")
    engine = build(folder, more_drafters=(SILENT,))
    with pytest.raises(ConfigError, match=r"gateway\.features\.layers"):
        engine.prepare_weights(Target.DRAFTER, 1, folder / "silent")


def test_the_states_a_kind_says_it_reads_are_kept(target: tuple[Path, PreTrainedModel]) -> None:
    folder, _ = target
    engine = build(folder, more_drafters=(DEEP,))
    assert engine.info.rows == RowLayout(2 * 48, "1,last", "post_norm")
    engine.prepare_weights(Target.DRAFTER, 1, folder / "deep")


@pytest.mark.slow
def test_every_kind_of_the_table_serves_by_commit_and_changes_no_token(tmp_path: Path) -> None:
    save_random(tmp_path / "policy", "llama", sharpness=6.0, num_hidden_layers=5)
    config = read_config(tmp_path / "policy")
    nets = {name: net_of(kind) for name, kind in SPECULATORS.items() if kind.trained}
    wanted = generate(build(tmp_path, drafter="off", more_drafters=()), requests())
    engine = build(tmp_path, drafter="ngram", more_drafters=tuple(nets), verify_budget=False)
    for version, (name, net) in enumerate(nets.items(), 1):
        net.fresh(config, net.Options(), seed=1).save(tmp_path / name)
        commit(engine, tmp_path / name, version)
        assert engine._speculation.drafters.serving == name
        for arm in engine._speculation.served:
            engine.force_arm(arm)
            drafted = engine.load.speculation.drafted_tokens
            assert generate(engine, requests()) == wanted, arm
            assert engine.load.speculation.drafted_tokens > drafted or not arm.startswith(name), arm
        engine.force_arm("")


def test_trees_of_a_block_and_what_the_budget_leaves_of_it_change_no_token(tmp_path: Path) -> None:
    save_random(tmp_path / "policy", "qwen3", sharpness=6.0, num_hidden_layers=5)
    wanted = generate(build(tmp_path, drafter="off", more_drafters=()), requests())
    arms = ("dflash:2_1_3", "dflash:5_3_12", "dflash:7_1_8")
    engine = build(tmp_path, drafter="dflash", more_drafters=(), arms=arms)
    for arm in arms:
        engine.force_arm(arm)
        assert generate(engine, requests()) == wanted, arm
    assert engine.load.speculation.drafted_tokens > 0  # by nothing trained: accepted by chance
    with pytest.raises(ConfigError, match=r"block was trained for; seen: 8; allowed: 1 to 7"):
        build(tmp_path, drafter="dflash", more_drafters=(), arms=("dflash:8_1_9",))


def lengths_by_arm(engine: Engine) -> dict[str, float]:
    """Return mean acceptance lengths by arm, in the group of full batches."""
    arms = engine.load.arms
    group = max(one.batch_group for one in arms)
    return {one.arm: one.mean_accept_length for one in arms if one.batch_group == group}


@pytest.mark.parametrize(("over", "inherits"), [(1, True), (0, False), (None, False)])
def test_arms_of_a_new_version_inherit_where_its_trainer_speaks_of_the_one_before(
    target: tuple[Path, PreTrainedModel], tmp_path: Path, over: int | None, inherits: bool
) -> None:
    engine = build(target[0], more_drafters=(), arms=("off", "eagle:3_1_4"))
    for version in (1, 2):
        path = tmp_path / str(version)
        shutil.copytree(target[0] / "eagle", path)
        if version == 2 and over is not None:
            said = AcceptanceShift(over, (0.5, 0.2, 0.1), (0.8, 0.6, 0.3))
            (path / FILE).write_text(said.to_json())
    commit(engine, tmp_path / "1", 1)
    generate(engine, requests())
    before = lengths_by_arm(engine)
    commit(engine, tmp_path / "2", 2)
    after = lengths_by_arm(engine)
    assert after["off"] == before["off"] > 0
    if inherits:
        assert after["eagle:3_1_4"] > before["eagle:3_1_4"] > 0
    else:
        assert after["eagle:3_1_4"] == 0
