"""A model with experts divided over the ranks of one worker: its tokens equal the tokens of
transformers, and every rank takes a version set in the same round. No other user reaches the
worker, and a killed worker leaves no file.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from listening import beyond_loopback, open_doors
from prompt_oracle import assert_scores_are
from random_models import save_random
from safetensors.torch import save_file
from sglang_served import Served, greedy, said
from transformers import PreTrainedModel

from paceline.errors import WeightsError
from paceline.local.patience import patient
from paceline.local.user_directory import locked_directory
from paceline.models.loading import read_tensors
from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]
SHARED_MEMORY = Path("/dev/shm")
PROMPTS = [[3, 4, 5, 6, 7, 8], [9, 10, 9, 10, 9], [5]]
NEW_TOKENS = 24


def model(folder: Path, seed: int) -> PreTrainedModel:
    """Eight experts per layer; a token uses two."""
    return save_random(folder, "qwen3_moe", seed=seed, sharpness=4.0, max_position_embeddings=512)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("policies")
    return {str(folder / name): model(folder / name, seed) for seed, name in enumerate("ab")}


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.fixture(scope="module")
def served(
    policies: dict[str, PreTrainedModel],
    temporary: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """Two ranks with four experts per layer each."""
    one = Served(
        tmp_path_factory.mktemp("worker"),
        model_dir=next(iter(policies)),
        drafter="ngram",
        max_sequence_tokens=256,
        tensor_parallel_size=2,
        expert_parallel_size=2,
    )
    yield one
    one.client.close()


def expected(policy: PreTrainedModel) -> list[list[int]]:
    return [greedy(policy, prompt, NEW_TOKENS) for prompt in PROMPTS]


def test_tokens_over_divided_experts_are_those_of_transformers(
    served: Served, policies: dict[str, PreTrainedModel]
) -> None:
    answers = served.tokens(PROMPTS, max_tokens=NEW_TOKENS)
    assert answers == expected(next(iter(policies.values())))


def test_prompts_are_scored_by_heads_that_are_divided(
    served: Served, policies: dict[str, PreTrainedModel]
) -> None:
    policy = next(iter(policies.values()))
    numbers = served.send(PROMPTS, temperature=1.0, prompt_logprobs=2, max_tokens=0)
    for prompt, (chunk,) in zip(PROMPTS, served.wait(numbers), strict=True):
        asked = Request(0, tuple(prompt), Sampling(0, 0, prompt_logprobs=2))
        with torch.inference_mode():
            logits = policy(torch.tensor([prompt])).logits[0]
        assert_scores_are(chunk.prompt_scores, logits, asked)


def test_all_ranks_take_a_set_between_two_rounds_and_a_wrong_one_none(
    served: Served, policies: dict[str, PreTrainedModel], tmp_path: Path
) -> None:
    before, after = policies.values()
    (_, new) = policies
    prepare(served, 1, new)
    running = served.send(PROMPTS[:1], max_tokens=200, stream=True)
    served.rounds(8)
    versions = tpb.VersionSet(seq=1, policy=1)
    served.client.ask(
        commit_weights=pb.CommitWeights(versions=versions, mode=pb.PAUSE_MODE_RETRACT)
    )
    (chunks,) = served.wait(running)
    spans = [span for chunk in chunks for span in chunk.version_spans]
    folded = list(dict.fromkeys(span.policy_version for span in spans))
    assert folded == [0, 1]  # one version per token, never back
    said_before = max(span.end for span in spans if span.policy_version == 0)
    tokens = said(chunks)
    assert tokens[:said_before] == greedy(before, PROMPTS[0], said_before)
    resumed = [*PROMPTS[0], *tokens[:said_before]]
    assert tokens[said_before:] == greedy(after, resumed, 200 - said_before)
    assert served.tokens(PROMPTS, max_tokens=NEW_TOKENS) == expected(after)

    tensors = read_tensors(Path(new))
    for number, name in enumerate(sorted(tensors)[:2]):  # another rank checks each tensor
        folder, values = tmp_path / f"not finite {number}", tensors[name].clone()
        folder.mkdir()
        values.view(-1)[3] = float("nan")
        save_file({**tensors, name: values}, folder / "model.safetensors")
        with pytest.raises(WeightsError, match=rf"{re.escape(name)} holds 1 numbers that are not"):
            prepare(served, 2, str(folder))
    assert served.tokens(PROMPTS, max_tokens=NEW_TOKENS) == expected(after)

    other = tmp_path / "of four experts"
    save_random(other, "qwen3_moe", num_experts=4, max_position_embeddings=512)
    with pytest.raises(WeightsError, match="experts"):
        prepare(served, 2, str(other))
    assert served.tokens(PROMPTS, max_tokens=NEW_TOKENS) == expected(after)


def prepare(served: Served, version: int, policy: str) -> None:
    served.client.ask(
        prepare_weights=pb.PrepareWeights(
            target=pb.WEIGHT_TARGET_POLICY, version=version, path=policy
        )
    )


def mapped_memory(processes: list[int]) -> set[Path]:
    """Named shared memory that the processes have mapped, without memory of parallel tests."""
    mapped = ""
    for pid in processes:
        with contextlib.suppress(OSError):  # it has ended
            mapped += Path(f"/proc/{pid}/maps").read_text()
    return {path for path in SHARED_MEMORY.iterdir() if str(path) in mapped}


def test_its_two_ranks_listen_on_loopback_alone_and_what_they_leave_is_swept(
    served: Served, temporary: Path
) -> None:
    """The last test of the file, for it kills the worker."""
    family = [served.client.process.pid]
    family += [one.pid for one in psutil.Process(family[0]).children(recursive=True)]
    inet, unix = open_doors(psutil.Process(pid) for pid in family)
    assert beyond_loopback(inet) == []
    assert inet  # gloo between the two ranks
    assert {path for path in unix if not Path(path).is_relative_to(temporary)} == set()
    assert list(temporary.rglob("store")) != []
    until = time.monotonic() + patient(20)
    while not list(temporary.rglob("elsewhere/*")):  # SGLang's host learns of its end last
        assert time.monotonic() < until
        time.sleep(0.05)
    memory = mapped_memory(family)
    assert memory != set()

    processes = [psutil.Process(pid) for pid in family]
    for process in processes:
        process.kill()
    served.client.process.wait()
    psutil.wait_procs(processes, timeout=patient(10))
    served.client.close()
    assert list(temporary.rglob("store")) != []
    assert {path for path in memory if path.exists()} != set()
    own = locked_directory(temporary / next(iter(temporary.iterdir())) / "live")
    user = own.parent.parent
    assert {*temporary.rglob("*")} == {user, user / "ports", own.parent, own}
    assert {path for path in memory if path.exists()} == set()
