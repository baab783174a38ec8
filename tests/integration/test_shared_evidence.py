"""What one engine worker learned reaches another: real worker processes of the scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from remote_engine import WorkerClient

from paceline.services.rollout_gateway.engines.nouns import Finish
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

ROW_BYTES = 16
ARMS = ("off", "eagle:3_1_4", "ngram:4_1_5")
SETTINGS: dict[str, Any] = {
    "arms": ARMS,
    "accept_lengths": {"eagle:3_1_4": 3.0, "ngram:4_1_5": 1.5},
    "costs_s": {},  # no table: every arm's cost has to be learned
    "response_tokens": (200, 220),
    "bandit": {"kind": "cost_model", "groups": (1, 2)},
}


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[WorkerClient]]:
    clients = [
        WorkerClient("scripted", SETTINGS, tmp_path / str(number), ROW_BYTES) for number in range(2)
    ]
    yield clients
    for client in clients:
        client.close()


def generate(client: WorkerClient, request_id: int) -> pb.WorkerHealth:
    """One response from begin to end, alone in its batch."""
    sampling = tpb.SamplingParams(seed=request_id, temperature=1.0, max_tokens=300)
    request = pb.EngineRequest(request_id=request_id, prompt_token_ids=[2, 3, 4], sampling=sampling)
    client.send(enqueue=pb.EnqueueRequests(requests=[request]))
    while not any(
        chunk.request_id == request_id and chunk.finish is Finish.STOP for chunk in client.chunks
    ):
        client.wait()
    return health(client)


def health(client: WorkerClient) -> pb.WorkerHealth:
    return client.ask(get_health=pb.GetHealth()).health


def explorations(told: pb.WorkerHealth) -> int:
    return sum(arm.explorations for arm in told.arms)


def test_a_worker_that_was_told_begins_where_the_other_has_got_to(
    workers: list[WorkerClient],
) -> None:
    teacher, pupil = workers
    learned = generate(teacher, 1)
    assert learned.evidence.acceptance
    assert {one.arm for one in learned.evidence.costs} == set(ARMS)
    assert explorations(learned) >= len(ARMS)
    pupil.send(
        merge_evidence=pb.MergeEvidence(versions=learned.versions, evidence=learned.evidence)
    )
    assert not health(pupil).evidence.costs  # it tells of its own rounds only
    assert explorations(generate(pupil, 1)) < len(ARMS)


def test_evidence_of_other_weights_is_ignored(workers: list[WorkerClient]) -> None:
    teacher, pupil = workers
    learned = generate(teacher, 1)
    other = tpb.VersionSet(seq=9, policy=9, drafter=9)
    pupil.send(merge_evidence=pb.MergeEvidence(versions=other, evidence=learned.evidence))
    assert explorations(generate(pupil, 1)) == explorations(learned)


def test_evidence_of_arms_that_are_not_served_is_left_out(workers: list[WorkerClient]) -> None:
    evidence = pb.BanditEvidence(
        acceptance=[
            pb.AcceptanceEvidence(family="medusa:1", batch_group=1, accepted=[9], trials=[9])
        ],
        costs=[pb.CostEvidence(arm="medusa:3_1_4", batch_group=7, log_factor=1, weight=9)],
    )
    versions = health(workers[0]).versions
    workers[0].send(merge_evidence=pb.MergeEvidence(versions=versions, evidence=evidence))
    assert sum(arm.pulls for arm in generate(workers[0], 1).arms) > 0
