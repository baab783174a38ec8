"""The learner on one in-process rank: warm-up, several updates, exact resume from a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from unit.policy_trainer.plain_trainer import PlainTrainer
from unit.policy_trainer.sharded_step import trajectories, whole

from paceline.config import RunConfig
from paceline.errors import ConfigError, DataLoss
from paceline.ranks.messages import Save
from paceline.services.policy_trainer.algorithm_settings import (
    AlgorithmConfig,
    CorrectionConfig,
    DecoupledConfig,
    GrpoConfig,
    GspoConfig,
    KlConfig,
    PpoConfig,
    ReinforceConfig,
)
from paceline.services.policy_trainer.batches.batch import TrainBatch, make_batch
from paceline.services.policy_trainer.batches.packing import mini_batches
from paceline.services.policy_trainer.batches.records import Best, read_best
from paceline.services.policy_trainer.config import PolicyOptimizerConfig, PolicyTrainerConfig
from paceline.services.policy_trainer.learn.build import build_learner
from paceline.services.policy_trainer.learn.learner import Learner
from paceline.services.policy_trainer.learn.model import policy_on_meta
from paceline.services.policy_trainer.learn.objective import Figures
from paceline.services.policy_trainer.messages import BatchFacts, Keep, Progress
from paceline.services.policy_trainer.trainer import PolicyTrainer
from paceline.training import checkpoints
from paceline.training.checkpoints import checkpoint_numbers
from paceline.training.shards import local_of, tensors_of
from paceline.trajectory import DrawSpan, Trajectory
from paceline.whole_files import write_hashes

pytestmark = pytest.mark.few(1)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=request.param,
        initializer_range=0.2,
    )
    directory = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def learner(model: Path, mesh: DeviceMesh, **settings: object) -> Learner:
    config = PolicyTrainerConfig.model_validate(
        {
            "model": str(model),
            "optimizer": PolicyOptimizerConfig(lr=1e-3, warmup_steps=3),
            **settings,
        }
    )
    return build_learner(config, mesh)


def trainer(one: Learner, model: Path, run: Path) -> PolicyTrainer:
    """Return a trainer without the duties of rank 0: no Redis, no pushes."""
    config = PolicyTrainerConfig(model=str(model), run=RunConfig(dir=str(run)))
    return PolicyTrainer(config, one, None)


def rewarded(rewards: Sequence[float]) -> list[Trajectory]:
    """The trajectories with these rewards."""
    return [dataclasses.replace(t, reward=r) for t, r in zip(trajectories(), rewards, strict=True)]


def batch(step: int) -> TrainBatch:
    draw = torch.Generator().manual_seed(step)
    return make_batch(rewarded(torch.randn(24, generator=draw).tolist()), 4)


def test_two_steps_a_checkpoint_and_two_steps_are_four_steps_bit_for_bit(
    model_dir: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    straight, first = learner(model_dir, mesh), learner(model_dir, mesh)
    for step in range(4):
        straight.step(batch(step))
    first.step(batch(0))
    first.step(batch(1))
    writing = trainer(first, model_dir, tmp_path)
    writing.progress = Progress(
        policy_version=2, step=1, trajectories_trained=48, batch=BatchFacts(tokens=5)
    )
    writing.handle(Save(1))
    directory = tmp_path / "checkpoints" / "policy" / "step-2"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in directory.iterdir()
    }
    served = LlamaForCausalLM.from_pretrained(directory).state_dict()
    for name, weight in whole(first.weights.published()).items():
        assert torch.equal(served[name], weight), name

    resumed = learner(model_dir, mesh)
    resuming = trainer(resumed, model_dir, tmp_path)
    resuming.resume()
    assert resuming.progress == dataclasses.replace(writing.progress, checkpoint_version=2)
    resumed.step(batch(2))
    resumed.step(batch(3))
    expected = whole(straight.weights.published())
    for name, weight in whole(resumed.weights.published()).items():
        assert torch.equal(weight, expected[name]), name


def test_each_layer_of_a_step_is_reported_forwards_and_backwards(
    model_dir: Path, mesh: DeviceMesh
) -> None:
    """A micro-batch that takes minutes therefore counts as progress."""
    one, layers, micro_batches = learner(model_dir, mesh), list[int](), list[int]()
    one.on_layer = lambda: layers.append(len(micro_batches))
    one.on_micro_batch = lambda number, of: micro_batches.append(number)
    one.step(batch(0))
    each = len(one.model.layers())
    assert micro_batches
    assert all(layers.count(number) >= 2 * each for number in micro_batches)


def test_loading_is_reported_up_to_the_whole_model(model_dir: Path, mesh: DeviceMesh) -> None:
    read = list[tuple[int, int]]()
    config = PolicyTrainerConfig(model=str(model_dir))
    one = build_learner(config, mesh, lambda done, of: read.append((done, of)))
    assert len(read) == len(one.model.layers()) + 1
    assert read == sorted(read)
    assert read[-1][0] == read[-1][1] > 0


def ways_of(one: Trajectory) -> tuple[DrawSpan, ...]:
    """Two arms in int8 for most of the tokens, of which the last two thirds are trained, another in
    float32 for the rest.
    """
    half, most, end = (len(one.token_ids) * n // 6 for n in (3, 5, 6))
    return (
        DrawSpan(0, half, "off", "int8"),
        DrawSpan(half, most, "eagle:3_1_4", "int8"),
        DrawSpan(most, end, "ngram:2_1_3", "float32"),
    )


SAVING = {
    "algorithm": PpoConfig(kl=KlConfig(coefficient=0.1)),  # a critic and a reference too
    "optimizer": {"lr": 1e-3, "moments": "int8"},
}


@pytest.mark.slow
def test_what_has_left_the_device_between_steps_is_saved_from_there_and_goes_on_bit_for_bit(
    model_dir: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    straight, moved = (learner(model_dir, mesh, **SAVING) for _ in range(2))
    for step in range(3):
        straight.step(batch(step))
    moved.step(batch(0))
    moved.memory.leave()
    assert {local_of(one).untyped_storage().nbytes() for one in moved.model.parameters()} == {0}
    writing = trainer(moved, model_dir, tmp_path)
    writing.progress = Progress(policy_version=1, step=0)
    writing.handle(Save(1))
    moved.memory.enter()
    moved.step(batch(1))
    moved.step(batch(2))

    resumed = learner(model_dir, mesh, **SAVING)
    trainer(resumed, model_dir, tmp_path).resume()
    resumed.step(batch(1))
    resumed.step(batch(2))
    expected = dict(tensors_of(straight.state()))
    for other in (moved, resumed):
        found = dict(tensors_of(other.state()))
        assert found.keys() == expected.keys()
        for name, one in expected.items():
            assert torch.equal(local_of(found[name]), local_of(one)), name


def test_a_checkpoint_in_the_memory_of_the_one_before_holds_the_later_step(
    model_dir: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    one = learner(model_dir, mesh, algorithm=PpoConfig())
    writing = trainer(one, model_dir, tmp_path)
    for version in (1, 2):
        one.step(batch(version))
        writing.progress = Progress(policy_version=version)
        writing.handle(Save(version))
    resumed = learner(model_dir, mesh, algorithm=PpoConfig())
    trainer(resumed, model_dir, tmp_path).resume()
    expected, found = dict(tensors_of(one.state())), dict(tensors_of(resumed.state()))
    assert set(expected) == set(found)
    for name, value in expected.items():
        assert torch.equal(local_of(found[name]), local_of(value)), name


def test_a_checkpoint_of_another_trainer_is_data_loss(
    model_dir: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    writing = trainer(learner(model_dir, mesh), model_dir, tmp_path)
    writing.handle(Save(1))
    described = tmp_path / "checkpoints" / "policy" / "step-0" / "state.json"
    state = json.loads(described.read_text())
    del state["progress"]
    described.write_text(json.dumps(state))
    write_hashes(described.parent)
    with pytest.raises(DataLoss, match="step-0"):
        trainer(learner(model_dir, mesh), model_dir, tmp_path).resume()


def test_the_rate_warms_up_and_a_second_update_sees_ratios_away_from_one(
    model_dir: Path, mesh: DeviceMesh
) -> None:
    once = learner(model_dir, mesh)
    twice = learner(model_dir, mesh, algorithm=GrpoConfig(passes=2, clip_low=0, clip_high=0))
    first, second = once.step(batch(0)), twice.step(batch(0))
    for one, rate in ((once, 1e-3 / 3), (twice, 2e-3 / 3)):
        assert [float(group["lr"]) for group in one.optimizer._groups()] == pytest.approx([rate])
    assert first.figures["clip_fraction"] == 0.0
    assert 0.1 < second.figures["clip_fraction"] < 0.5
    weights = whole(once.weights.published())
    assert any(
        not torch.equal(weight, weights[name])
        for name, weight in whole(twice.weights.published()).items()
    )


def test_a_batch_without_advantage_leaves_the_weights_alone_and_is_measured_all_the_same(
    model_dir: Path, mesh: DeviceMesh
) -> None:
    still, moving = learner(model_dir, mesh), learner(model_dir, mesh)
    before = whole(still.weights.published())
    figures = still.step(make_batch(rewarded([0.3] * 24), 4))
    assert (figures.figures["loss"], figures.figures["grad_norm"]) == (0.0, 0.0)
    assert all(
        torch.equal(weight, before[name])
        for name, weight in whole(still.weights.published()).items()
    )
    measured = moving.step(batch(0))
    assert figures.figures["entropy"] == pytest.approx(measured.figures["entropy"], rel=1e-6)
    assert figures.figures["entropy"] > 1
    assert figures.figures["behavior_gap"] == pytest.approx(
        measured.figures["behavior_gap"], rel=1e-6
    )
    assert figures.figures["behavior_gap"] > 0.5


def test_mismatch_is_measured_as_its_formulas_by_lag_arm_and_number_format(
    model_dir: Path, mesh: DeviceMesh
) -> None:
    plain = PlainTrainer(model_dir, 1e-3, 3, 1.0)
    gaps: dict[int, list[float]] = {0: [], 1: []}
    by_arm: dict[str, list[float]] = {"off": [], "eagle:3_1_4": [], "ngram:2_1_3": []}
    with torch.no_grad():
        for one in trajectories():
            at = [t for t in range(1, len(one.token_ids)) if one.loss_mask[t]]
            starts = plain.logprobs(plain.lm, one)[0].tolist()
            for t, start in zip(at, starts, strict=True):
                lag = 1 if t < len(one.token_ids) // 2 else 0
                gaps[lag].append(start - one.behavior_logprobs[t])
                by_arm[next(s.arm for s in ways_of(one) if s.start <= t < s.end)].append(
                    gaps[lag][-1]
                )
    every = gaps[0] + gaps[1]
    ratios = [math.exp(gap) for gap in every]
    drawn = [dataclasses.replace(one, draw_spans=ways_of(one)) for one in trajectories()]
    found = learner(model_dir, mesh).step(make_batch(drawn, 4))
    assert found.figures["behavior_gap"] == pytest.approx(
        statistics.fmean(map(abs, every)), rel=1e-4
    )
    expected = {
        "behavior_gap_max": max(map(abs, every)),
        "behavior_k3": statistics.fmean(math.exp(gap) - 1 - gap for gap in every),
        "behavior_gap/lag=0": statistics.fmean(map(abs, gaps[0])),
        "behavior_gap/lag=1": statistics.fmean(map(abs, gaps[1])),
        **{
            f"behavior_gap/arm={arm}": statistics.fmean(map(abs, own))
            for arm, own in by_arm.items()
        },
        "behavior_gap/numbers=int8": statistics.fmean(
            map(abs, by_arm["off"] + by_arm["eagle:3_1_4"])
        ),
        "behavior_k3/numbers=float32": statistics.fmean(
            math.exp(gap) - 1 - gap for gap in by_arm["ngram:2_1_3"]
        ),
        "effective_sample_size": sum(ratios) ** 2 / sum(r * r for r in ratios) / len(ratios),
    }
    for name, value in expected.items():
        assert found.figures[name] == pytest.approx(value, rel=1e-4), name
    unknown = learner(model_dir, mesh).step(batch(0)).figures
    assert not any("arm=" in name or "numbers=" in name for name in unknown)


@pytest.mark.few(1)
def test_mini_batches_passes_divergence_entropy_and_weights_step_as_the_plain_trainer(
    model_dir: Path, mesh: DeviceMesh
) -> None:
    plain = PlainTrainer(
        model_dir, 1e-3, 3, 0.5, mini_batches=2, passes=2, clip=0.02, kl=0.1, entropy=0.01, cap=1.5
    )
    algorithm = GrpoConfig(
        mini_batches=2,
        passes=2,
        clip_low=0.02,
        clip_high=0.02,
        entropy_coefficient=0.01,
        kl=KlConfig(coefficient=0.1),
        correction=CorrectionConfig(weight="token", cap=1.5),
    )
    optimizer = PolicyOptimizerConfig(lr=1e-3, warmup_steps=3, clip_norm=0.5, betas=(0.9, 0.95))
    config = PolicyTrainerConfig(
        model=str(model_dir), algorithm=algorithm, optimizer=optimizer, head_rows=7, row_tokens=40
    )
    one = build_learner(config, mesh)
    fractions = []
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        made = rewarded(torch.randn(24, generator=draw).tolist())
        plain.step(made)
        fractions.append(one.step(make_batch(made, 4)).figures["clip_fraction"])
    assert one.updates == plain.updates == 12
    assert statistics.fmean(fractions) == pytest.approx(statistics.fmean(plain.clipped), abs=2e-3)
    assert statistics.fmean(plain.clipped) > 0.1, "the test needs clips"
    start = PlainTrainer(model_dir, 1e-3, 3, 0.5).lm.state_dict()
    expected = plain.lm.state_dict()
    for name, weight in whole(one.weights.published()).items():
        moved = (expected[name] - start[name]).norm()
        assert (weight.double() - expected[name]).norm() < 2e-3 * moved, name


def test_the_loss_is_the_mean_over_all_tokens_also_those_of_the_mean_reward(
    model_dir: Path, mesh: DeviceMesh
) -> None:
    whole = [one for one in trajectories() if one.group_id == "g0"][:3]
    lengths = (10, 100, 10)
    made = [
        dataclasses.replace(
            one,
            token_ids=(3, *tuple((7 * i + n) % 61 for i in range(length))),
            loss_mask=(0,) + (1,) * length,
            behavior_logprobs=(0.0,) + (-1.0,) * length,
            version_spans=(),
            reward=n / 2,
            temperature=1.0,
        )
        for n, (one, length) in enumerate(zip(whole, lengths, strict=True))
    ]
    one = learner(model_dir, mesh)
    config = one.config
    batch_of_three = make_batch(made, 0)
    known, _ = one._know(batch_of_three, Figures())
    (part,) = mini_batches(batch_of_three, config)
    one._accumulate(batch_of_three, part, known, Figures())
    plain = PlainTrainer(model_dir, 1e-3, 3, 1e9)
    total = torch.zeros((), dtype=torch.float64)
    for advantage, trajectory in zip((-1.0, 0.0, 1.0), made, strict=True):
        policy, _ = plain.logprobs(plain.lm, trajectory)
        total = total - advantage * (policy - policy.detach()).exp().sum() * 0.5 / (0.5 + 1e-6)
    (total / 120).backward()
    for name, parameter in plain.lm.named_parameters():
        found = one.optimizer.parameters[name].grad
        assert isinstance(found, DTensor)
        gradient = parameter.grad
        assert gradient is not None
        apart = (found.full_tensor().double() - gradient).norm()
        assert apart <= 1e-5 * gradient.norm(), name


VARIANTS: dict[str, dict[str, object]] = {
    "rows of a token": {"row_tokens": 1},
    "one long row": {"row_tokens": 4096},
    "a micro-batch a row": {"tokens_per_micro_batch": 1},
    "one micro-batch": {"tokens_per_micro_batch": 1 << 20},
    "logits of three tokens": {"head_rows": 3},
}
MODES = [
    GrpoConfig(kl=KlConfig(coefficient=0.1, place="reward"), passes=2),
    GspoConfig(mini_batches=2),
    ReinforceConfig(),
    PpoConfig(gae_lambda=0.9),
    DecoupledConfig(correction=CorrectionConfig(weight="sequence", keep="band")),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("algorithm", MODES, ids=lambda one: one.name)
def test_rows_micro_batches_and_chunks_change_nothing(
    model_dir: Path, mesh: DeviceMesh, algorithm: AlgorithmConfig
) -> None:
    def stepped(trained: list[Trajectory], **settings: object) -> tuple[dict[str, Tensor], float]:
        given = {
            "model": str(model_dir),
            "algorithm": algorithm,
            "optimizer": PolicyOptimizerConfig(lr=1e-3),
            **settings,
        }
        one = build_learner(PolicyTrainerConfig.model_validate(given), mesh)
        figures = [one.step(make_batch(trained, 4)) for _ in range(2)]
        return whole(one.weights.published()), figures[-1].figures["loss"]

    made = rewarded(torch.randn(24, generator=torch.Generator().manual_seed(1)).tolist())
    expected, loss = stepped(made)
    pairs = [made[i : i + 8] for i in range(0, 24, 8)]  # two groups: both mini-batches keep theirs
    turned = [one for pair in reversed(pairs) for one in pair]
    runs = {name: stepped(made, **given) for name, given in VARIANTS.items()}
    runs["groups in another order"] = stepped(turned)
    for name, (weights, other) in runs.items():
        assert other == pytest.approx(loss, rel=1e-4, abs=1e-6), name
        for key, weight in weights.items():
            assert (weight - expected[key]).norm() < 1e-4 * expected[key].norm(), (name, key)


def test_a_critic_learns_what_is_earned_and_its_first_steps_leave_the_policy_alone(
    model_dir: Path, mesh: DeviceMesh
) -> None:
    algorithm = PpoConfig(critic_lr=3e-3, critic_warmup_steps=12, value_clip=0.0)
    config = PolicyTrainerConfig(model=str(model_dir), algorithm=algorithm)
    one = build_learner(config, mesh)
    before = whole(one.weights.published())
    made = make_batch(rewarded([1.0 if i < 12 else -1.0 for i in range(24)]), 4)
    errors = [one.step(made, step).figures["value_error"] for step in range(12)]
    assert errors[0] == pytest.approx(1.0), "a critic begins with values of 0"
    assert errors[-1] < 0.8 * errors[0]
    assert all(
        torch.equal(weight, before[name]) for name, weight in whole(one.weights.published()).items()
    )
    one.step(made, 12)
    assert any(
        not torch.equal(weight, before[name])
        for name, weight in whole(one.weights.published()).items()
    )


def test_a_critic_goes_on_from_a_checkpoint_bit_for_bit(
    model_dir: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    config = PolicyTrainerConfig(
        model=str(model_dir), algorithm=PpoConfig(), run=RunConfig(dir=str(tmp_path))
    )
    straight, first, resumed = (build_learner(config, mesh) for _ in range(3))
    for step in range(3):
        straight.step(batch(step), step)
    first.step(batch(0), 0)
    PolicyTrainer(config, first, None).handle(Save(1))
    PolicyTrainer(config, resumed, None).resume()
    for step in (1, 2):
        resumed.step(batch(step), step)
    for mine, theirs in ((resumed.critic, straight.critic), (resumed, straight)):
        assert mine is not None
        assert theirs is not None
        expected = dict(theirs.model.named_parameters())
        for name, parameter in mine.model.named_parameters():
            assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize(
    ("part", "value"),
    [("behavior_logprobs", math.nan), ("rewards", math.nan), ("rewards", math.inf)],
)
def test_an_update_whose_numbers_are_not_finite_is_not_taken_and_the_next_one_is(
    model_dir: Path, mesh: DeviceMesh, part: str, value: float
) -> None:
    capped = GrpoConfig(correction=CorrectionConfig(weight="token"))
    one, other = (learner(model_dir, mesh, algorithm=capped) for _ in range(2))
    before = whole(one.weights.published())
    broken = batch(0)
    getattr(broken, part)[-1] = value
    figures = one.step(broken)
    assert figures.skipped_updates == 1
    assert "grad_norm" not in figures.figures
    assert "loss" not in figures.figures, "no number stands for one that is not there"
    assert all(map(math.isfinite, figures.figures.values()))
    assert all(
        torch.equal(weight, before[name]) for name, weight in whole(one.weights.published()).items()
    )
    assert one.step(batch(1)).skipped_updates == other.step(batch(1)).skipped_updates == 0
    expected = whole(other.weights.published())
    for name, weight in whole(one.weights.published()).items():
        assert torch.equal(weight, expected[name]), name


def test_a_gradient_that_is_not_finite_is_not_taken_where_the_loss_is(
    model_dir: Path, mesh: DeviceMesh
) -> None:
    one = learner(model_dir, mesh)
    before = whole(one.weights.published())
    one.model.lm.model.norm.register_full_backward_hook(
        lambda module, inwards, outwards: tuple(gradient * math.inf for gradient in inwards)
    )
    figures = one.step(batch(0))
    assert figures.skipped_updates == 1
    assert "grad_norm" not in figures.figures
    assert figures.figures["loss"] != 0.0
    assert all(
        torch.equal(weight, before[name]) for name, weight in whole(one.weights.published()).items()
    )


def test_a_directory_without_a_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        policy_on_meta(tmp_path)


def test_the_checkpoint_of_the_best_evaluation_stays_beside_the_newest(
    model_dir: Path, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "KEPT", 1)
    config = PolicyTrainerConfig(model=str(model_dir), run=RunConfig(dir=str(tmp_path)))
    own = PolicyTrainer(config, learner(model_dir, mesh), None)

    def numbers() -> list[int]:
        return checkpoint_numbers(config.checkpoints_dir, "step-")

    for version, evaluation in ((1, 0.25), (2, 0.75), (3, 0.5), (4, 0.75)):
        own.progress = Progress(version, version - 1, 0, 0)
        own.handle(Keep(evaluation))
    assert read_best(config.checkpoints_dir) == Best(2, 0.75)
    own.handle(Save(1))
    assert numbers() == [2, 4]
    again = PolicyTrainer(config, learner(model_dir, mesh), None)
    again.resume()
    assert again.progress.policy_version == 4, "a run goes on from the newest"
    for version, evaluation in ((5, 0.5), (6, 1.0), (7, 0.0)):
        again.progress = Progress(version, version - 1, 0, 0)
        again.handle(Keep(evaluation))
        again.handle(Save(1))
    assert numbers() == [6, 7]
    (config.checkpoints_dir / "best.json").write_text("{}")
    with pytest.raises(DataLoss, match=r"best\.json does not name"):
        PolicyTrainer(config, learner(model_dir, mesh), None)


def test_a_checkpoint_of_another_model_is_refused_with_the_tensor_and_both_shapes(
    model_dir: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    trainer(learner(model_dir, mesh), model_dir, tmp_path).handle(Save(1))
    wider = LlamaConfig.from_pretrained(model_dir, intermediate_size=40)
    LlamaForCausalLM(wider).save_pretrained(tmp_path / "wider")
    other = trainer(learner(tmp_path / "wider", mesh), tmp_path / "wider", tmp_path)
    with pytest.raises(
        DataLoss, match=r"step-0 is of another model.*mlp\.down.*\(16, 24\).*\(16, 40\)"
    ):
        other.resume()
