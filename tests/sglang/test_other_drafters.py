"""SGLang with Paceline's plugin under EAGLE-3 and NGRAM on two ranks, with tiny random models; and
without speculation, with checkpoints of the policy trainer. All in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from random_models import save_random
from sglang_served import (
    DEMO,
    Served,
    chi_square_p,
    exact_pairs,
    greedy,
    hidden,
    load_oracle,
    pair_counts,
    said,
    save_eagle3,
)
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from unit.policy_trainer.sharded_step import trajectories

from paceline.errors import MissingCapability, WeightsError
from paceline.ranks.messages import Save
from paceline.services.policy_trainer.batches.batch import make_batch
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn.build import build_learner, form_mesh
from paceline.services.policy_trainer.messages import Progress
from paceline.services.policy_trainer.trainer import PolicyTrainer
from paceline.training import STORE_VARIABLE
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

# NGRAM compiles its tables at its first start on a machine
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
START = DEMO / "policy_start"
PROMPTS = [[3, 4, 5, 6, 7, 8], [9, 10] * 7, [5], list(range(3, 19)) * 3]


@dataclass(frozen=True)
class Case:
    """A served model and its oracle."""

    served: Served
    oracle: PreTrainedModel
    arms: tuple[str, ...]
    layers: str = "last"


def settings(name: str, folder: Path) -> dict[str, object]:
    if name == "eagle3":
        save_eagle3(folder / "drafter", 48, 96, 32)
        return {
            "drafter": str(folder / "drafter"),
            "arms": ("off", "eagle3:2_1_3", "eagle3:3_2_6", "eagle3:3_4_10"),
        }
    if name == "ngram on two ranks":
        return {
            "drafter": "ngram",
            "arms": ("off", "ngram:3_1_4", "ngram:7_1_8"),
            "tensor_parallel_size": 2,
        }
    return {"drafter": "off"}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    with pytest.MonkeyPatch.context() as patch:
        store = tmp_path_factory.mktemp("ranks") / "store"
        places = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, STORE_VARIABLE: store}
        for name, value in places.items():
            patch.setenv(name, str(value))
        found = form_mesh(PolicyTrainerConfig(device="cpu"))
    yield found
    dist.destroy_process_group()


def trained(run: Path, mesh: DeviceMesh, adapter_rank: int) -> Path:
    """The checkpoint of a policy after two large steps."""
    config = PolicyTrainerConfig.model_validate(
        {
            "model": str(START),
            "run": {"dir": str(run)},
            "adapters": {"rank": adapter_rank},
            "optimizer": {"lr": 2e-2 if adapter_rank else 3e-3},
        }
    )
    trainer = PolicyTrainer(config, build_learner(config, mesh), None)
    vocabulary = int(trainer.learner.weights.shapes()["model.embed_tokens.weight"][0])
    for _ in range(2):
        trainer.learner.step(make_batch(trajectories(vocabulary=vocabulary), 4))
    trainer.progress = Progress(policy_version=2, step=1)
    trainer.handle(Save(1))
    return config.checkpoints_dir / "step-2"


@pytest.fixture(scope="module", params=["eagle3", "ngram on two ranks", "no speculation"])
def case(
    request: pytest.FixtureRequest, mesh: DeviceMesh, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("sglang")
    if request.param == "no speculation":
        model = trained(folder / "run", mesh, 0)
        oracle = load_oracle(model)
    else:
        model = folder / "model"
        oracle = save_random(
            model,
            "qwen3",
            vocab_size=96,
            sharpness=4.0,
            num_hidden_layers=8,
            max_position_embeddings=512,
        )
    served = Served(
        folder,
        model_dir=str(model),
        bandit={"epsilon": 1.0},
        max_sequence_tokens=192,
        prefill_tokens=16,
        **settings(request.param, folder),
    )
    yield Case(served, oracle, tuple(served.client.ready.arms), served.client.ready.row_layers)
    served.client.close()


def test_greedy_tokens_are_those_of_transformers_with_any_arm(case: Case) -> None:
    expected = [greedy(case.oracle, prompt, 40) for prompt in PROMPTS]
    assert case.served.tokens(PROMPTS, max_tokens=40) == expected
    for arm in case.arms:
        assert case.served.tokens(PROMPTS, max_tokens=40, arm=arm) == expected


def test_rows_are_the_states_of_transformers(case: Case) -> None:
    for _ in range(2):  # the second time from the prefix cache
        numbers = case.served.send(PROMPTS, temperature=1.0)
        for prompt, number, chunks in zip(PROMPTS, numbers, case.served.wait(numbers), strict=True):
            tokens = [*prompt, *said(chunks)]
            rows, expected = (
                case.served.kept.of(number, tokens),
                hidden(case.oracle, tokens, case.layers),
            )
            assert (rows - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max()))
    assert case.served.wait(numbers)[3][-1].cached_prompt_tokens >= 30


def test_pairs_of_tokens_come_with_their_exact_probabilities(case: Case) -> None:
    exact = exact_pairs(case.oracle, PROMPTS[0], temperature=4.0, top_k=3)
    counts = pair_counts(case.served, PROMPTS[0], 600, temperature=4.0, top_k=3)
    assert chi_square_p(counts, exact) > 0.001


def test_a_drafter_swapped_under_running_requests_changes_no_token_and_keeps_its_vocabulary(
    case: Case,
) -> None:
    served = case.served
    if served.spec.speculator != "eagle3":
        with pytest.raises(
            MissingCapability, match="sglang engine lacks the capability drafter_update"
        ):
            prepare(served, pb.WEIGHT_TARGET_DRAFTER, served.client.log_path.parent / "model")
        return
    expected = served.tokens(PROMPTS, max_tokens=60)
    folder = served.client.log_path.parent
    save_eagle3(folder / "next", 48, 96, 32, seed=6)
    save_eagle3(folder / "other tokens", 48, 96, 48, seed=6)
    numbers = served.send(PROMPTS, max_tokens=60)
    served.rounds(20)
    prepare(served, pb.WEIGHT_TARGET_DRAFTER, folder / "next")
    versions = tpb.VersionSet(seq=1, policy=0, drafter=1)
    served.client.ask(
        commit_weights=pb.CommitWeights(versions=versions, mode=pb.PAUSE_MODE_IN_PLACE)
    )
    assert [said(chunks) for chunks in served.wait(numbers)] == expected
    with pytest.raises(WeightsError, match="vocabulary is fixed"):
        prepare(served, pb.WEIGHT_TARGET_DRAFTER, folder / "other tokens", 2)


@pytest.mark.parametrize("case", ["no speculation"], indirect=True)
def test_a_policy_that_was_trained_through_adapters_follows(
    case: Case, mesh: DeviceMesh, tmp_path: Path
) -> None:
    """The last test of its SGLang, because it changes the policy."""
    adapted = trained(tmp_path, mesh, 4)
    before, weights, adapters = (
        [greedy(model, prompt, 24) for prompt in PROMPTS]
        for model in (load_oracle(START), case.oracle, load_oracle(adapted))
    )
    assert before != weights != adapters != before, "the test needs policies that have moved"
    prepare(case.served, pb.WEIGHT_TARGET_POLICY, adapted)
    versions = tpb.VersionSet(seq=1, policy=1)
    case.served.client.ask(
        commit_weights=pb.CommitWeights(versions=versions, mode=pb.PAUSE_MODE_IN_PLACE)
    )
    assert case.served.tokens(PROMPTS) == adapters


def prepare(served: Served, target: pb.WeightTarget, path: Path, version: int = 1) -> None:
    asked = pb.PrepareWeights(target=target, version=version, path=str(path))
    served.client.ask(prepare_weights=asked)
