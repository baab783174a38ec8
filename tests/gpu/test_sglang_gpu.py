"""SGLang on CUDA: properties that no CPU can show.

Memory given back in MB, weights loaded in seconds; prints figures.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from remote_engine import WorkerClient

from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.services.rollout_gateway.engines.sglang.spec import SGLangSpec
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
DEMO = Path(__file__).parents[2] / "examples" / "demo"
PROMPT = (3, 14, 15, 9, 26)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerClient]:
    """Memory saver on, a CUDA graph set per arm."""
    spec = SGLangSpec(
        model_dir=str(DEMO / "policy_trained"),
        drafter=str(DEMO / "drafter_trained"),
        dtype="bfloat16",
        device="cuda",
        memory_saver=True,
        max_sequence_tokens=256,
        arms=("off", "eagle:3_1_4", "eagle:4_4_16"),
    )
    one = WorkerClient(
        "sglang", spec.model_dump(mode="json"), tmp_path_factory.mktemp("sglang"), 2 * 128, 600
    )
    yield one
    one.close()


def free_mb() -> float:
    return torch.cuda.mem_get_info()[0] / 2**20


def tokens(client: WorkerClient, number: int, arm: str) -> list[int]:
    request = Request(
        number, PROMPT, Sampling(7, 40, temperature=0.0, ignore_eos=True), forced_arm=arm
    )
    client.send(enqueue=pb.EnqueueRequests(requests=[wire.request_to(request)]))
    while not any(chunk.request_id == number and chunk.finish for chunk in client.chunks):
        client.wait()
    return [t for chunk in client.chunks if chunk.request_id == number for t in chunk.token_ids]


def test_released_memory_comes_back_and_the_tokens_are_the_same(client: WorkerClient) -> None:
    before = tokens(client, 1, "eagle:3_1_4")
    held = free_mb()
    given_back = client.ask(release_memory=pb.ReleaseMemory()).done.released_bytes
    released = free_mb()
    client.ask(resume_memory=pb.ResumeMemory())
    sys.stdout.write(
        f"released {released - held:.0f} MB of {torch.cuda.mem_get_info()[1] / 2**20:.0f} MB\n"
    )
    assert released - held > 1000
    assert given_back / 2**20 == pytest.approx(released - held, abs=64)
    assert tokens(client, 2, "eagle:3_1_4") == before


def test_every_arm_has_a_graph_set_and_runs(client: WorkerClient) -> None:
    said = [tokens(client, 10 + number, arm) for number, arm in enumerate(client.ready.arms)]
    assert {len(one) for one in said} == {40}


def test_weights_are_loaded_between_two_rounds_in_measured_time(client: WorkerClient) -> None:
    prepare = pb.PrepareWeights(
        target=pb.WEIGHT_TARGET_POLICY, version=1, path=str(DEMO / "policy_start")
    )
    began = time.perf_counter()
    client.ask(prepare_weights=prepare)
    prepared = time.perf_counter()
    versions = tpb.VersionSet(seq=1, policy=1)
    client.ask(commit_weights=pb.CommitWeights(versions=versions, mode=pb.PAUSE_MODE_RETRACT))
    committed = time.perf_counter()
    sys.stdout.write(f"prepare {prepared - began:.3f} s, commit {committed - prepared:.3f} s\n")
    assert client.ask(get_health=pb.GetHealth()).health.versions.policy == 1


@pytest.mark.parametrize(
    "rounding", [{"arguments": {"quantization": "fp8"}}, {"profile": "int8_w8a8"}]
)
def test_layers_that_are_rounded_take_a_version_as_if_they_had_begun_with_it(
    rounding: dict[str, Any], tmp_path: Path
) -> None:
    """Captured graphs read the storages that are written over."""
    profile = str(rounding.get("profile", ""))
    said = []
    for number, start in enumerate(("policy_trained", "policy_start")):
        spec = SGLangSpec(
            model_dir=str(DEMO / start),
            dtype="bfloat16",
            device="cuda",
            max_sequence_tokens=256,
            **rounding,
        )
        folder = tmp_path / str(number)
        folder.mkdir()
        one = WorkerClient("sglang", spec.model_dump(mode="json"), folder, 2 * 128, 600)
        try:
            before = tokens(one, 1, "off")
            prepare = pb.PrepareWeights(
                target=pb.WEIGHT_TARGET_POLICY,
                version=1,
                path=str(DEMO / "policy_start"),
                profile=profile,
            )
            one.ask(prepare_weights=prepare)
            versions = tpb.VersionSet(seq=1, policy=1, profile=profile)
            one.ask(commit_weights=pb.CommitWeights(versions=versions, mode=pb.PAUSE_MODE_RETRACT))
            said.append((before, tokens(one, 2, "off")))
        finally:
            one.close()
    (trained, updated), (begun, same) = said
    assert updated == same == begun != trained
