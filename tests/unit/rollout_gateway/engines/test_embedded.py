"""The embedded engine against an oracle that shares no code with it, and its own rules."""

from __future__ import annotations

import random
from pathlib import Path

import gumbel_oracle
import numpy as np
import pytest
import torch
from random_models import load_model, save_random
from transformers import PreTrainedModel

from paceline.errors import ConfigError, InvalidInput, MissingCapability, WeightsError
from paceline.models.config import read_config
from paceline.services.rollout_gateway.bandits.base import ArmChoice
from paceline.services.rollout_gateway.bandits.kinds import EpsilonGreedy
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
from paceline.trajectory import NEAR_TIE_GAP, Target, VersionSet

FAMILIES = ("llama", "qwen2", "qwen3")
ARMS = ("eagle:3_1_4", "eagle:5_1_6", "eagle:4_3_10", "eagle:6_4_16", "ngram:4_1_5", "ngram:4_3_9")
ARMS += ("self:2_1_3", "self:4_1_5")
DEMO = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 12}


def requests(
    count: int, vocab: int = 97, longest: int = 40, capture: bool = False
) -> list[Request]:
    rng = random.Random(7)
    made = []
    for number in range(count):
        prompt = tuple(rng.randrange(3, vocab) for _ in range(rng.randrange(1, 30)))
        sampling = Sampling(
            seed=rng.getrandbits(63),
            max_tokens=rng.randrange(1, longest),
            temperature=rng.choice([0.0, 0.7, 1.0, 1.0]),
        )
        made.append(Request(number, prompt, sampling, capture=capture))
    return made


def generate(engine: Engine, batch: list[Request]) -> tuple[dict[int, tuple[int, ...]], float]:
    """Tokens by request, and the smallest gap of any draw."""
    for one in batch:
        engine.enqueue(one)
    tokens, gap = {}, float("inf")
    while engine.has_work:
        for chunk in engine.step():
            tokens[chunk.request_id] = chunk.token_ids
            gap = min(gap, chunk.smallest_gap)
    return tokens, gap


def build(directory: Path, **options: object) -> Engine:
    settings = {
        "model_dir": str(directory),
        "drafter": "eagle",
        "max_batch": 8,
        "max_sequence_tokens": 96,
        **options,
    }
    return EmbeddedEngine(EmbeddedSpec.model_validate(settings))


def oracle_tokens(
    model: PreTrainedModel, prompt: tuple[int, ...], said: tuple[int, ...], sampling: Sampling
) -> list:
    """(token, log-prob) at every position of the response, from one full transformers forward."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *said]])).logits[0].numpy()
    start = len(prompt)
    return [
        gumbel_oracle.draw(logits[start + i - 1], sampling.temperature, sampling.seed, start + i)
        for i in range(len(said))
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logprobs_equal_transformers_with_the_documented_draw(
    family: str, tmp_path: Path
) -> None:
    model = save_random(tmp_path, family, sharpness=6.0)
    engine = build(tmp_path)
    batch = requests(16)
    for one in batch:
        engine.enqueue(one)
    while engine.has_work:
        for chunk in engine.step():
            one = batch[chunk.request_id]
            expected = oracle_tokens(model, one.prompt, chunk.token_ids, one.sampling)
            assert list(chunk.token_ids) == [token for token, _ in expected]
            np.testing.assert_allclose(
                chunk.behavior_logprobs, [logprob for _, logprob in expected], atol=2e-5
            )
    assert engine.load.speculation.drafted_rounds > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shape", "count"),
    [
        *((family, {}, 60) for family in FAMILIES),
        pytest.param("llama", DEMO, 48, marks=pytest.mark.slow),
    ],
)
def test_same_seed_same_tokens_with_any_arm_and_batch(
    family: str, shape: dict[str, int], count: int, tmp_path: Path
) -> None:
    save_random(tmp_path, family, sharpness=6.0, **shape)
    batch = requests(count, vocab=shape.get("vocab_size", 97))
    off = build(tmp_path, drafter="off", max_batch=16)
    expected, gap = generate(off, batch)
    assert gap > NEAR_TIE_GAP, "choose other seeds: a near-tie may flip"
    for arm, options in (
        ("eagle:3_1_4", {}),
        ("eagle:5_1_6", {"max_batch": 3, "verify_budget": False}),
        ("eagle:4_3_10", {"verify_budget": False}),
        ("eagle:6_4_16", {"max_batch": 5}),
        ("ngram:4_1_5", {"max_batch": 16}),
        ("ngram:4_3_9", {"verify_budget": False}),
        ("self:2_1_3", {"verify_budget": False}),
        ("self:4_1_5", {"max_batch": 5}),
        ("", {"prefill_tokens": 16, "bandit": {"kind": "epsilon_greedy", "epsilon": 1.0}}),
    ):
        engine = build(tmp_path, arms=ARMS, **options)
        engine.force_arm(arm)
        assert generate(engine, batch)[0] == expected, arm


def test_a_drafter_that_was_off_catches_up_from_kept_states(tmp_path: Path) -> None:
    """The last tokens, drafted after a pause, are accepted as often as with a drafter that was
    never off.
    """
    save_random(tmp_path, "llama", sharpness=6.0)
    batch = [
        Request(i, (5, 6, 7 + i), Sampling(seed=i, max_tokens=60, ignore_eos=True))
        for i in range(8)
    ]
    accepted = {}
    for early in ("off", "ngram:4_1_5", "eagle:3_1_4"):
        engine = build(tmp_path, verify_budget=False)
        for one in batch:
            engine.enqueue(one)
        for number in range(20):
            engine.force_arm("off" if early == "off" or number % 2 else early)
            engine.step()
        position = engine.load.tokens_emitted
        before = engine.load.speculation
        engine.force_arm("eagle:5_1_6")
        while engine.has_work:
            engine.step()
        after = engine.load.speculation
        accepted[early] = (after.accepted_tokens - before.accepted_tokens) / (480 - position)
    steady = build(tmp_path, verify_budget=False)
    steady.force_arm("eagle:5_1_6")
    generate(steady, batch)
    always = steady.load.speculation.accepted_tokens / 480
    assert always > 0.1
    for early, share in accepted.items():
        assert share == pytest.approx(always, abs=0.08), early


@pytest.mark.parametrize(("arm", "trained"), [("eagle:3_1_4", True), ("ngram:4_1_5", False)])
def test_rounds_of_a_drafter_with_weights_are_counted_apart(
    arm: str, trained: bool, tmp_path: Path
) -> None:
    save_random(tmp_path, "llama", sharpness=6.0)
    engine = build(tmp_path, arms=(arm,), verify_budget=False)
    engine.force_arm(arm)
    engine.enqueue(Request(1, (5, 6, 5, 6, 5, 6), Sampling(seed=1, max_tokens=40, ignore_eos=True)))
    (chunk,) = [chunk for _ in range(60) if engine.has_work for chunk in engine.step()]
    stats = chunk.speculation
    assert stats.drafted_rounds > 0
    counted = (stats.trained_rounds, stats.trained_round_tokens)
    assert counted == ((stats.drafted_rounds, stats.drafted_round_tokens) if trained else (0, 0))
    assert stats.arm_drafted_rounds == {arm: stats.drafted_rounds}
    assert stats.arm_round_tokens == {arm: stats.drafted_round_tokens}


def test_n_grams_draft_for_rows_that_repeat_text_while_the_bandit_plays_another_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random(tmp_path, "llama", sharpness=6.0)
    monkeypatch.setattr(
        EpsilonGreedy, "choose", lambda *_: ArmChoice("eagle:3_1_4", explored=False)
    )
    batch = requests(8)
    engine = build(tmp_path, arms=("eagle:3_1_4", "ngram:4_1_5"))
    first, _ = generate(engine, batch)
    before = engine.load.speculation
    assert generate(engine, batch)[0] == first
    after = engine.load.speculation
    drafted, rounds = (
        after.arm_drafted_rounds["ngram:4_1_5"] - before.arm_drafted_rounds.get("ngram:4_1_5", 0),
        after.drafted_rounds - before.drafted_rounds,
    )
    assert drafted > rounds / 2
    assert after.accepted_tokens > 2 * before.accepted_tokens
    engine.force_arm("eagle:3_1_4")
    assert generate(engine, batch)[0] == first
    forced = engine.load.speculation.arm_drafted_rounds["ngram:4_1_5"]
    assert forced == after.arm_drafted_rounds["ngram:4_1_5"]


@pytest.mark.parametrize("inner", [(), (1, 2)])
def test_hidden_rows_are_the_states_transformers_gives(
    inner: tuple[int, ...], tmp_path: Path
) -> None:
    model = save_random(tmp_path, "qwen3", sharpness=6.0)
    rows: dict[tuple[int, int], np.ndarray] = {}

    class Sink:
        def write(self, ids, positions, token_ids, policy_version, hidden, parents=None) -> int:  # type: ignore[no-untyped-def]
            for key, row in zip(
                zip(ids.tolist(), positions.tolist(), strict=True), hidden, strict=True
            ):
                assert key not in rows
                rows[key] = row.copy().view(np.float32)
            return len(ids)

    spec = EmbeddedSpec(
        model_dir=str(tmp_path), drafter="eagle", features_dtype="float32", max_batch=3
    )
    engine = EmbeddedEngine(spec.model_copy(update={"capture_inner": inner}), Sink())
    assert engine.info.rows == RowLayout(
        48 * (len(inner) + 1), "1,2,last" if inner else "last", "post_norm"
    )
    batch = requests(6, capture=True)
    tokens, _ = generate(engine, batch)
    for one in batch:
        sequence = [*one.prompt, *tokens[one.request_id]]
        with torch.inference_mode():
            hidden = model(torch.tensor([sequence]), output_hidden_states=True).hidden_states
        states = torch.cat([hidden[index][0] for index in (*inner, -1)], dim=-1).numpy()
        for position in range(len(sequence) - 1):
            np.testing.assert_allclose(
                rows.pop((one.request_id, position)), states[position], atol=1e-5
            )
    assert not rows


def test_after_retract_the_response_goes_on_as_the_new_weights_say(tmp_path: Path) -> None:
    save_random(tmp_path / "old", "llama", sharpness=6.0)
    new = save_random(tmp_path / "new", "llama", seed=1, sharpness=6.0)
    engine = build(tmp_path / "old")
    engine.prepare_weights(Target.POLICY, 1, tmp_path / "new")
    one = Request(0, (5, 6, 7), Sampling(seed=3, max_tokens=40, ignore_eos=True))
    engine.enqueue(one)
    engine.step()
    engine.commit_weights(VersionSet(1, 1, 0), PauseMode.RETRACT)
    [chunk] = [chunk for _ in range(100) if engine.has_work for chunk in engine.step()]
    cut = chunk.version_spans[1].start
    expected = oracle_tokens(new, one.prompt, chunk.token_ids, one.sampling)
    assert list(chunk.token_ids[cut:]) == [token for token, _ in expected[cut:]]


def test_a_drafter_swap_changes_drafts_only_and_can_be_rolled_back(tmp_path: Path) -> None:
    save_random(tmp_path, "llama", sharpness=6.0)
    config = read_config(tmp_path)
    weights = load_model(tmp_path, dtype=torch.float32)
    for version in (1, 2):
        net = EagleNet(config, seed=version)
        with torch.no_grad():
            net.fc.weight += 0.3 * torch.randn(
                net.fc.weight.shape, generator=torch.Generator().manual_seed(version)
            )
        net.save(tmp_path / f"d{version}")
    batch = requests(12)
    expected, _ = generate(build(tmp_path, drafter="off"), batch)
    accepted = {}
    engine = build(
        tmp_path, drafter=str(tmp_path / "d1"), arms=("eagle:3_1_4",), verify_budget=False
    )
    engine.force_arm("eagle:3_1_4")
    for seq, version in ((1, 2), (2, 1), (3, 2)):
        before = engine.load.speculation.accepted_tokens
        engine.prepare_weights(Target.DRAFTER, version, tmp_path / f"d{version}")
        engine.commit_weights(VersionSet(seq, 0, version), PauseMode.IN_PLACE)
        assert generate(engine, batch)[0] == expected
        accepted.setdefault(version, []).append(engine.load.speculation.accepted_tokens - before)
    assert accepted[2][0] == accepted[2][1] != accepted[1][0]
    assert engine.lm_head_hash == weights.head_hash


def test_an_older_set_may_not_follow_a_newer_one(tmp_path: Path) -> None:
    save_random(tmp_path, "llama")
    engine = build(tmp_path)
    engine.commit_weights(VersionSet(5, 0, 0), PauseMode.IN_PLACE)
    with pytest.raises(WeightsError, match="older"):
        engine.commit_weights(VersionSet(4, 0, 0), PauseMode.IN_PLACE)


def test_weights_of_another_shape_are_refused_at_prepare(tmp_path: Path) -> None:
    save_random(tmp_path / "a", "llama")
    save_random(tmp_path / "b", "llama", num_hidden_layers=2)
    engine = build(tmp_path / "a")
    with pytest.raises(WeightsError, match=r"layers\.2"):
        engine.prepare_weights(Target.POLICY, 1, tmp_path / "b")


def test_an_engine_without_weights_to_swap_says_so(tmp_path: Path) -> None:
    save_random(tmp_path, "llama")
    engine = build(tmp_path, drafter="ngram")
    assert Capability.DRAFTER_UPDATE not in engine.info.capabilities
    with pytest.raises(MissingCapability):
        engine.prepare_weights(Target.DRAFTER, 1, tmp_path)
    with pytest.raises(MissingCapability):
        engine.enqueue(Request(0, (5,), Sampling(1, 4), capture=True))


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"model_dir": "/nowhere"}, InvalidInput, "/nowhere"),
        ({"drafter": "/nowhere"}, InvalidInput, "/nowhere"),
        ({"arms": ("eagle:8_4_99",)}, ConfigError, "2-64 draft tokens"),
        ({"arms": ("eagle:3_1_5",)}, ConfigError, "4 draft tokens"),
        ({"arms": ("eagle:16_1_17",)}, ConfigError, "steps 1-15"),
        ({"arms": ("medusa:3_1_4",)}, ConfigError, "medusa"),
        ({"arms": ("self:3_2_7",)}, ConfigError, "self drafts chains"),
        ({"drafter": "ngram", "arms": ("eagle:3_1_4",)}, ConfigError, "eagle"),
        ({"arms": ("fast",)}, ConfigError, "fast"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    options: dict[str, object], error: type[Exception], named: str, tmp_path: Path
) -> None:
    save_random(tmp_path, "llama")
    with pytest.raises(error, match=named):
        build(tmp_path, **options)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1, 0),
        Sampling(1, 4, temperature=-1.0),
        Sampling(1, 4, top_p=0.0),
        Sampling(1, 4, min_p=2.0),
        Sampling(1, 4, stop=("x",)),
    ],
)
def test_sampling_that_cannot_work_is_refused(sampling: Sampling, tmp_path: Path) -> None:
    save_random(tmp_path, "llama")  # it has no tokenizer.json, which stop strings need
    with pytest.raises(InvalidInput):
        build(tmp_path).enqueue(Request(0, (5,), sampling))


def test_masked_sampling_draws_allowed_tokens_only_and_stays_lossless(tmp_path: Path) -> None:
    model = save_random(tmp_path, "llama", sharpness=2.0)
    batch = [
        Request(
            i, (5, 6, 7 + i), Sampling(seed=i, max_tokens=20, top_k=2 if i % 2 else 0, top_p=0.9)
        )
        for i in range(8)
    ]
    expected, _ = generate(build(tmp_path, drafter="off"), batch)
    engine = build(tmp_path)
    engine.force_arm("eagle:5_1_6")
    assert generate(engine, batch)[0] == expected
    for one in batch[1::2]:
        with torch.inference_mode():
            logits = model(torch.tensor([[*one.prompt, *expected[one.request_id]]])).logits[0]
        for i, token in enumerate(expected[one.request_id]):
            assert token in logits[len(one.prompt) + i - 1].topk(2).indices.tolist()


def test_a_sequence_ends_at_the_context(tmp_path: Path) -> None:
    save_random(tmp_path, "llama")
    engine = build(tmp_path, max_sequence_tokens=10_000)
    assert engine.info.max_sequence_tokens == 256
    prompt = tuple(3 + i % 90 for i in range(240))
    tokens, _ = generate(
        engine, [Request(0, prompt, Sampling(seed=1, max_tokens=100, ignore_eos=True))]
    )
    assert len(tokens[0]) == 16


def test_siblings_share_one_prefill_and_say_what_they_say_alone(tmp_path: Path) -> None:
    model = save_random(tmp_path, "llama", sharpness=6.0)
    prompts = [(5, 6, 7, 8), (9, 10), (5, 6, 7, 8), (5, 6, 7), (9, 10), (5, 6, 7, 8), (5,)]
    engine = build(tmp_path)
    for number, prompt in enumerate(prompts):
        engine.enqueue(
            Request(number, prompt, Sampling(seed=number, max_tokens=12, ignore_eos=True))
        )
    chunks = [chunk for _ in range(50) if engine.has_work for chunk in engine.step()]
    shared = {chunk.request_id: chunk.cached_prompt_tokens for chunk in chunks}
    assert shared == {0: 0, 1: 0, 2: 3, 3: 0, 4: 1, 5: 3, 6: 0}
    for chunk in chunks:
        sampling = Sampling(seed=chunk.request_id, max_tokens=12)
        expected = oracle_tokens(model, prompts[chunk.request_id], chunk.token_ids, sampling)
        assert list(chunk.token_ids) == [token for token, _ in expected]
