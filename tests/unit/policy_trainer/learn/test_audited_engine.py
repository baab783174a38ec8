"""Real engines with one path broken on purpose, audited by the real trainer: the path is named, and
nothing else; without a fault nothing is.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from audited import drawn, prompts
from inexact import InexactSpec, build_inexact
from random_models import save_random
from torch.distributed.device_mesh import DeviceMesh

from paceline.services.policy_trainer.audit import AuditState, by_path, judged
from paceline.services.policy_trainer.batches.batch import make_batch
from paceline.services.policy_trainer.config import (
    AuditConfig,
    PolicyOptimizerConfig,
    PolicyTrainerConfig,
)
from paceline.services.policy_trainer.learn.build import build_learner
from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.nouns import PauseMode
from paceline.trajectory import Target, Trajectory, VersionSet
from paceline.v1 import engine_pb2 as pb

ARM = "ngram:4_1_5"
SETTINGS = AuditConfig(share=1.0, least_tokens=100)
SHAPE = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy, and a policy as a long training could have left it."""
    before, after = (tmp_path_factory.mktemp(name) for name in ("before", "after"))
    for directory, seed in ((before, 0), (after, 1)):
        save_random(directory, "llama", seed=seed, sharpness=6.0, **SHAPE)
    return before, after


def engine(model: Path, fault: str = "", **options: object) -> Engine:
    spec = {
        "model_dir": str(model),
        "dtype": "float32",
        "drafter": "ngram",
        "arms": ("off", ARM),
        "max_batch": 6,
        "max_sequence_tokens": 160,
        "seed": 1,
        "threads": 1,
        "bandit": {"kind": "epsilon_greedy", "epsilon": 0.5},
        "fault": fault,
        **options,
    }
    return build_inexact(InexactSpec.model_validate(spec))


def sample(one: Engine, first: int = 0) -> list[Trajectory]:
    """Sample single-sample tasks and tasks of siblings with a shared beginning, with and without
    drafts.
    """
    sampled = []
    for number, (arm, samples) in enumerate([("off", 1), ("", 1), ("off", 2), ("", 2)]):
        tasks = prompts(4 // samples, 24, 97, seed=first + number)
        start = first + 100 * number
        sampled += drawn(one, tasks, samples, 50, temperature=0.5, first=start, arm=arm)
    return sampled


def audited(
    mesh: DeviceMesh, model: Path, sampled: list[Trajectory], version: int = 0
) -> tuple[list[str], dict[str, int]]:
    """Paths that are named, and the tokens of every path."""
    config = PolicyTrainerConfig(
        model=str(model), optimizer=PolicyOptimizerConfig(lr=1e-9), audit=SETTINGS
    )
    facts = build_learner(config, mesh).step(make_batch(sampled, version, SETTINGS.share))
    named = judged(AuditState(), facts.cells, SETTINGS, "float32")[1]
    return (
        [one.path for one in named],
        {path: one.tokens for path, one in by_path(facts.cells).items()},
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fault", "options", "path"),
    [
        ("reused", {}, "reused"),
        ("drafted", {}, f"arm={ARM}"),
        ("quantised", {"profile": "int8"}, "numbers=int8"),
        ("quantised", {"profile": "fp8_tensor"}, "numbers=fp8_tensor"),
    ],
)
def test_a_path_that_is_broken_on_purpose_is_named_and_in_quarantine_all_is_exact_again(
    models: tuple[Path, Path],
    mesh: DeviceMesh,
    fault: str,
    options: dict[str, object],
    path: str,
) -> None:
    broken = engine(models[0], fault, **options)
    named, tokens = audited(mesh, models[0], sample(broken))
    assert named == [path]
    assert tokens[path] >= SETTINGS.least_tokens

    broken.quarantine(pb.Quarantine(arms=(ARM,) * (fault == "drafted"), reuse=fault == "reused"))
    broken.prepare_weights(Target.POLICY, 1, models[0])
    broken.commit_weights(VersionSet(1, 1, 0), PauseMode.IN_PLACE)
    named, tokens = audited(mesh, models[0], sample(broken, first=10_000), 1)
    assert named == []
    assert path not in tokens


def test_an_engine_without_a_fault_is_within_its_bounds_on_every_path(
    models: tuple[Path, Path], mesh: DeviceMesh
) -> None:
    named, tokens = audited(mesh, models[0], sample(engine(models[0])))
    assert named == []
    assert set(tokens) == {"plain", "reused", f"arm={ARM}"}
    assert min(tokens.values()) >= SETTINGS.least_tokens


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
def test_keys_of_an_earlier_policy_are_named_and_those_that_were_made_anew_are_exact(
    models: tuple[Path, Path], mesh: DeviceMesh, mode: PauseMode
) -> None:
    one = engine(models[0])
    one.prepare_weights(Target.POLICY, 1, models[1])

    def swap(rounds: int) -> None:
        if rounds == 12:
            one.commit_weights(VersionSet(1, 1, 0), mode)

    sampled = drawn(one, prompts(6, 24, 97), 1, 40, between=swap)
    named, tokens = audited(mesh, models[1], sampled, 1)
    assert named == (["swapped"] if mode is PauseMode.IN_PLACE else [])
    assert ("swapped" in tokens) == (mode is PauseMode.IN_PLACE)


def test_tokens_of_an_earlier_version_are_scored_in_its_weights_while_these_are_kept(
    models: tuple[Path, Path], mesh: DeviceMesh
) -> None:
    config = PolicyTrainerConfig(
        model=str(models[0]),
        optimizer=PolicyOptimizerConfig(lr=0.05, warmup_steps=0),
        audit=SETTINGS,
        max_staleness=1,
    )
    one = build_learner(config, mesh)
    sampled = sample(engine(models[0]))
    one.step(make_batch(sampled, 0, 1.0))
    before = {name: weight.full_tensor().clone() for name, weight in one.weights.published()}  # type: ignore[attr-defined]
    facts = one.step(make_batch(sampled, 1, 1.0))
    tokens = sum(sum(trajectory.loss_mask) for trajectory in sampled)
    assert sum(cell.tokens for cell in facts.cells.values()) == tokens
    assert max(cell.mean for cell in facts.cells.values()) < SETTINGS.float32.mean
    assert facts.figures["behavior_gap"] > 0.1  # the weights have moved since
    # Scoring in other weights leaves no trace in the step.
    other = build_learner(config.model_copy(update={"audit": AuditConfig(share=0.0)}), mesh)
    other.step(make_batch(sampled, 0))
    assert all(torch.equal(w.full_tensor(), before[name]) for name, w in other.weights.published())  # type: ignore[attr-defined]
    other.step(make_batch(sampled, 1))
    trained = dict(one.weights.published())
    for name, weight in other.weights.published():
        assert torch.equal(weight.full_tensor(), trained[name].full_tensor()), name  # type: ignore[attr-defined]
