"""The embedded engine under every profile: its output, its arithmetic, and its end after an
interrupted update.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from random_models import save_random
from torch import Tensor

from paceline.errors import InvalidInput, WeightsError
from paceline.messages import versions_to_proto
from paceline.models import in_place
from paceline.models.in_place import storages
from paceline.models.loading import ServedTensor, model_records
from paceline.models.profiles import ROUNDED
from paceline.services.rollout_gateway.engines.base import EngineBroken
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import Chunk, PauseMode, Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.services.rollout_gateway.engines.worker.process import answer
from paceline.trajectory import NEAR_TIE_GAP, Target, VersionSet
from paceline.v1 import engine_pb2 as pb

ARMS = ("off", "eagle:3_1_4", "ngram:4_1_5")
LONGEST = 16
ROUNDS = 2000
PROFILES = ("", *ROUNDED)


@pytest.fixture(autouse=True)
def _torchao(request: pytest.FixtureRequest) -> None:
    if "int8" in request.node.name:
        pytest.importorskip("torchao", reason="torchao rounds to INT8: the extra `int8`")


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    found = [tmp_path_factory.mktemp(f"p{seed}") for seed in range(3)]
    for seed, directory in enumerate(found):
        save_random(directory, "llama", seed=seed, sharpness=6.0, num_hidden_layers=2)
    return found


def build(directory: Path, profile: str, **options: object) -> EmbeddedEngine:
    settings = {
        "model_dir": str(directory),
        "drafter": "eagle",
        "max_batch": 8,
        "max_sequence_tokens": 64,
        "profile": profile,
        **options,
    }
    engine = EmbeddedEngine(EmbeddedSpec.model_validate(settings))
    assert isinstance(engine, EmbeddedEngine)
    return engine


def requests(count: int) -> list[Request]:
    rng = random.Random(5)
    return [
        Request(
            number,
            tuple(rng.randrange(3, 97) for _ in range(rng.randrange(2, 12))),
            Sampling(seed=1, max_tokens=LONGEST, temperature=0.0, ignore_eos=True),
        )
        for number in range(count)
    ]


def generate(engine: EmbeddedEngine, batch: list[Request], arm: str = "off") -> dict[int, Chunk]:
    engine.force_arm(arm)
    for one in batch:
        engine.enqueue(one)
    ended = [chunk for _ in range(ROUNDS) if engine.has_work for chunk in engine.step()]
    assert len(ended) == len(batch)
    return {chunk.request_id: chunk for chunk in ended}


def said(engine: EmbeddedEngine, arm: str = "off") -> dict[int, tuple[int, ...]]:
    return {number: one.token_ids for number, one in generate(engine, requests(6), arm).items()}


def prepare(engine: EmbeddedEngine, version: int, path: Path) -> None:
    engine.prepare_weights(Target.POLICY, version, path, engine.versions.profile)


def set_of(engine: EmbeddedEngine, version: int) -> VersionSet:
    """Return the version set of a policy under the serving profile."""
    return VersionSet(version, version, 0, engine.versions.profile)


def serve(engine: EmbeddedEngine, version: int, path: Path) -> None:
    prepare(engine, version, path)
    engine.commit_weights(set_of(engine, version), PauseMode.IN_PLACE)


@pytest.mark.few(2)
@pytest.mark.parametrize("profile", PROFILES)
def test_greedy_tokens_with_drafts_are_those_without_under_the_same_profile(
    profile: str, versions: list[Path]
) -> None:
    batch = requests(16)
    engine = build(versions[0], profile)
    expected = generate(engine, batch)
    assert min(one.smallest_gap for one in expected.values()) > NEAR_TIE_GAP, "other seeds"
    for arm in ARMS[1:]:
        found = generate(engine, batch, arm)
        for number, one in expected.items():
            assert found[number].token_ids == one.token_ids, (arm, number)
    assert engine.load.speculation.accepted_tokens > 0


@pytest.mark.few(2)
@pytest.mark.parametrize("profile", PROFILES)
def test_spans_of_tokens_name_the_profile_of_the_set_that_drew_them(
    profile: str, versions: list[Path]
) -> None:
    """Also behind a commit, and when the next set has another profile."""
    engine = build(versions[0], profile)

    def formats() -> set[str]:
        chunks = generate(engine, requests(3)).values()
        return {span.number_format for one in chunks for span in one.draw_spans}

    named = profile or "float32"
    assert formats() == {named}
    serve(engine, 1, versions[1])
    assert formats() == {named}
    assert engine.versions == VersionSet(1, 1, 0, profile)
    for version, other in enumerate(("", "fp8_tensor", profile), 2):
        engine.prepare_weights(Target.POLICY, version, versions[2], other)
        assert formats() == {named}
        engine.commit_weights(VersionSet(version, version, 0, other), PauseMode.IN_PLACE)
        named = other or "float32"
        assert formats() == {named}
        assert said(engine) == said(build(versions[2], other))


@pytest.mark.parametrize("profile", ["", "fp8_tensor"])
def test_twenty_commits_keep_every_address_and_say_what_a_fresh_engine_says(
    profile: str, versions: list[Path]
) -> None:
    engine = build(versions[0], profile)
    held = storages(engine._weights.policy)
    addresses = {name: one.data_ptr() for name, one in held.items()}
    for version in range(1, 21):
        serve(engine, version, versions[version % 3])
    now = storages(engine._weights.policy)
    assert {name: one.data_ptr() for name, one in now.items()} == addresses
    assert said(engine) == said(build(versions[20 % 3], profile))


class Interrupted(Exception):
    """Raised between two tensors of an update."""


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count of tensors that an update copies whole before it copies a half tensor; empty: all
    tensors.
    """
    left: list[int] = []
    whole = in_place.overwrite

    def some(storage: Tensor, numbers: Tensor) -> bool:
        if left and left[0] == 0:
            left.clear()
            half = max(1, len(storage) // 2)
            whole(storage[:half], numbers[:half])
            raise Interrupted
        if left:
            left[0] -= 1
        return whole(storage, numbers)

    monkeypatch.setattr(in_place, "overwrite", some)
    return left


@pytest.mark.few(2)
@pytest.mark.parametrize("profile", PROFILES)
def test_an_update_that_is_interrupted_at_any_tensor_ends_the_worker_and_serves_no_mixture(
    profile: str, versions: list[Path], fault: list[int]
) -> None:
    names = list(storages(build(versions[0], profile)._weights.policy))
    for count in range(0, len(names), 5):
        engine = build(versions[0], profile)
        prepare(engine, 1, versions[1])
        fault[:] = [count]
        commit = pb.WorkerCommand(
            command_id=1,
            commit_weights=pb.CommitWeights(
                versions=versions_to_proto(set_of(engine, 1)), mode="PAUSE_MODE_IN_PLACE"
            ),
        )
        with pytest.raises(EngineBroken, match="update of the policy was interrupted"):
            answer(engine, commit, lambda _: None, Exception)
        assert not fault
        assert engine.versions == VersionSet(profile=profile)


@pytest.mark.few(2)
@pytest.mark.parametrize("profile", ROUNDED)
def test_a_version_that_cannot_be_staged_at_any_tensor_leaves_the_old_set_serving(
    profile: str, versions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(versions[0], profile)
    before = said(engine)
    built = ServedTensor.built
    records = list(model_records(engine._weights.policy.config))
    for count in range(len(records)):
        seen = iter(range(len(records)))

        def some(*given: object, at: int = count, seen: Iterator[int] = seen) -> object:
            if next(seen) == at:
                raise Interrupted
            return built(*given)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(ServedTensor, "built", some)
            with pytest.raises(Interrupted):
                prepare(engine, 1, versions[1])
        with pytest.raises(WeightsError, match="not prepared"):
            engine.commit_weights(set_of(engine, 1), PauseMode.IN_PLACE)
    assert said(engine) == before


def test_a_policy_under_a_profile_that_was_not_prepared_is_refused_and_the_old_one_serves(
    versions: list[Path],
) -> None:
    engine = build(versions[0], "fp8_channel")
    before = said(engine)
    prepare(engine, 1, versions[1])
    refusal = r"not prepared; seen: 1 under fp8_tensor; allowed: 0 under .*, 1 under fp8_channel"
    with pytest.raises(WeightsError, match=refusal):
        engine.commit_weights(VersionSet(1, 1, 0, "fp8_tensor"), PauseMode.IN_PLACE)
    with pytest.raises(InvalidInput, match="no such profile; seen: int4"):
        engine.prepare_weights(Target.POLICY, 1, versions[1], "int4")
    assert engine.versions == VersionSet(profile="fp8_channel")
    assert said(engine) == before


def test_the_policy_that_serves_may_be_served_under_another_profile(versions: list[Path]) -> None:
    engine = build(versions[0], "")
    engine.prepare_weights(Target.POLICY, 0, versions[0], "fp8_channel")
    engine.commit_weights(VersionSet(1, 0, 0, "fp8_channel"), PauseMode.RETRACT)
    assert said(engine) == said(build(versions[0], "fp8_channel"))
