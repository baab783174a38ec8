"""The embedded engine frees the bytes that it reports as released: bytes of the process and of its
tensors.

Each test fails for an engine that reports the bytes of a part and keeps the part.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from live_memory import live_bytes, resident_bytes
from random_models import save_random

from paceline import processor
from paceline.errors import FailedPrecondition, InvalidInput
from paceline.models import products
from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import PauseMode, Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.trajectory import Target, VersionSet

MIB = 2**20
CAPACITY, SLOTS = 1024, 4
SHAPE = {
    "vocab_size": 12_000,
    "hidden_size": 512,
    "intermediate_size": 6_000,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "max_position_embeddings": CAPACITY,
}
"""Every matrix of note is so large that malloc maps it by itself, and gives it back when freed."""
ROTATION_BYTES = MIB
"""Upper bound: the table of rotations stays with the engine."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_random(directory, "llama", **SHAPE)
    return directory


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No matrix has a packed copy, which comes with the first product that reads it."""
    monkeypatch.setattr(processor, "PACKED_SHARE", 10**9)


def build(model_dir: Path, **settings: object) -> Engine:
    given = {
        "model_dir": str(model_dir),
        "max_batch": SLOTS,
        "prefix_slots": 0,
        "max_sequence_tokens": CAPACITY,
        "memory_saver": True,
        **settings,
    }
    return EmbeddedEngine(EmbeddedSpec.model_validate(given))


def answer(engine: Engine, prompt: int = 8, first: int = 3) -> tuple[int, ...]:
    """Return the tokens of one request with a prompt of `prompt` tokens."""
    asked = tuple(range(first, first + prompt))
    engine.enqueue(Request(0, asked, Sampling(seed=1, max_tokens=4)))
    tokens: tuple[int, ...] = ()
    while engine.has_work:
        for chunk in engine.step():
            tokens += chunk.token_ids
    return tokens


@pytest.mark.usefixtures("unpacked")
@pytest.mark.few(1)
@pytest.mark.parametrize("profile", ["", "int8_w8a8"])
def test_released_weights_leave_the_process_and_come_back(model_dir: Path, profile: str) -> None:
    engine = build(model_dir, profile=profile, max_sequence_tokens=32)
    expected = answer(engine)
    held, resident = live_bytes(), resident_bytes()
    freed = engine.release_memory()
    assert freed > 50 * MIB
    assert live_bytes() == held - freed
    assert resident_bytes() < resident - 0.9 * freed
    engine.resume_memory()
    assert answer(engine) == expected
    assert live_bytes() == held
    assert abs(resident_bytes() - resident) < 0.2 * freed


def test_a_version_staged_and_served_while_weights_are_released_is_held_once(
    model_dir: Path,
) -> None:
    engine = build(model_dir, max_sequence_tokens=32)
    held, resident = live_bytes(), resident_bytes()
    freed = engine.release_memory()
    engine.prepare_weights(Target.POLICY, 1, model_dir)
    engine.commit_weights(VersionSet(1, 1, 0), PauseMode.RETRACT)
    assert live_bytes() == held - freed
    engine.resume_memory()
    assert live_bytes() == held
    assert abs(resident_bytes() - resident) < 0.2 * freed


@pytest.mark.usefixtures("unpacked")
def test_a_released_cache_leaves_the_process_and_comes_back_empty(model_dir: Path) -> None:
    engine = build(model_dir, drafter="eagle")
    for _ in range(2):  # a slot's pages are resident once they were written
        answer(engine, prompt=CAPACITY - 8)
    held, resident = live_bytes(), resident_bytes()
    freed = engine.release_memory()
    keys_and_values = 2 * SLOTS * CAPACITY * 2 * 512 * 4
    assert freed >= keys_and_values
    assert live_bytes() == held - freed
    assert resident_bytes() < resident - 0.9 * freed / SLOTS
    engine.resume_memory()
    for _ in range(2):
        assert len(answer(engine, prompt=CAPACITY - 8)) == 4
    assert live_bytes() == held


@pytest.mark.usefixtures("unpacked")
def test_ended_requests_take_no_more_than_their_budget(model_dir: Path) -> None:
    engine = build(model_dir, max_batch=1, prefix_slots=8, prefix_bytes=16 * MIB)
    answer(engine, prompt=CAPACITY - 8)
    held = resident_bytes()
    for first in range(100, 106):  # 8 MiB each, and nothing in common
        answer(engine, prompt=CAPACITY - 8, first=first)
    assert resident_bytes() - held < 8 * MIB + 4 * MIB  # the second of two kept requests
    assert engine.load.prefixes.reused_tokens == 0
    answer(engine, prompt=CAPACITY - 8, first=105)
    assert engine.load.prefixes.reused_tokens > CAPACITY / 2


@pytest.mark.slow
def test_all_released_memory_is_all_but_what_the_drafter_and_the_tables_hold(
    model_dir: Path,
) -> None:
    before = live_bytes()
    engine = build(model_dir)
    held = live_bytes() - before
    freed = engine.release_memory()
    left = live_bytes() - before
    assert left == held - freed
    assert left < ROTATION_BYTES


def test_packed_copies_are_freed_with_their_weights(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = ["packed"] * len(products.MEASURED_ROWS)
    monkeypatch.setattr(
        products, "_fastest_forms", lambda groups, _: (dict.fromkeys(groups, packed), True)
    )
    monkeypatch.setattr(products, "_read_choices", dict)
    monkeypatch.setattr(products, "_write_choices", lambda _: None)
    before = live_bytes()
    engine = build(model_dir, max_sequence_tokens=32)
    both = live_bytes() - before
    freed = engine.release_memory()
    assert freed > 1.7 * sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    assert live_bytes() - before == both - freed < ROTATION_BYTES


@pytest.mark.usefixtures("unpacked")
def test_memory_whose_return_failed_half_way_is_released_and_returns_later(
    model_dir: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(model_dir, tmp_path / "model")
    engine = build(own, max_sequence_tokens=32)
    expected = answer(engine)
    held = live_bytes()
    assert engine.release_memory() > 0
    own.rename(tmp_path / "away")
    with pytest.raises(InvalidInput, match="no weights"):
        engine.resume_memory()
    with pytest.raises(FailedPrecondition, match="released its memory"):
        answer(engine)
    (tmp_path / "away").rename(own)
    engine.resume_memory()
    assert answer(engine) == expected
    assert live_bytes() == held
