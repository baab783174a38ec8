"""SGLang with Paceline's plugin under EAGLE-3, NGRAM on two ranks, and without speculation.

Tiny random models, fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from random_models import save_random
from sglang_served import (
    Served,
    chi_square_p,
    exact_pairs,
    greedy,
    hidden,
    pair_counts,
    said,
    save_eagle3,
)
from transformers import PreTrainedModel

from paceline.errors import MissingCapability, WeightsError
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

# NGRAM compiles its tables at its first start on a machine
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
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


@pytest.fixture(scope="module", params=["eagle3", "ngram on two ranks", "no speculation"])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("sglang")
    family = "llama" if request.param == "no speculation" else "qwen3"
    oracle = save_random(
        folder / "model",
        family,
        vocab_size=96,
        sharpness=4.0,
        num_hidden_layers=8,
        max_position_embeddings=512,
    )
    served = Served(
        folder,
        model_dir=str(folder / "model"),
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
            prepare_drafter(served, served.client.log_path.parent / "model", 1)
        return
    expected = served.tokens(PROMPTS, max_tokens=60)
    folder = served.client.log_path.parent
    save_eagle3(folder / "next", 48, 96, 32, seed=6)
    save_eagle3(folder / "other tokens", 48, 96, 48, seed=6)
    numbers = served.send(PROMPTS, max_tokens=60)
    served.rounds(20)
    prepare_drafter(served, folder / "next", 1)
    versions = tpb.VersionSet(seq=1, policy=0, drafter=1)
    served.client.ask(
        commit_weights=pb.CommitWeights(versions=versions, mode=pb.PAUSE_MODE_IN_PLACE)
    )
    assert [said(chunks) for chunks in served.wait(numbers)] == expected
    with pytest.raises(WeightsError, match="vocabulary is fixed"):
        prepare_drafter(served, folder / "other tokens", 2)


def prepare_drafter(served: Served, path: Path, version: int) -> None:
    prepare = pb.PrepareWeights(target=pb.WEIGHT_TARGET_DRAFTER, version=version, path=str(path))
    served.client.ask(prepare_weights=prepare)
