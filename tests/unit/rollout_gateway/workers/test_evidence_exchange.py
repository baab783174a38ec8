"""What workers learn goes round: to each the sum of the others', of one version set only, and to a
new one all.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.messages import from_message, to_message
from paceline.services.rollout_gateway.bandits.evidence import (
    POLICY_TRIALS,
    AcceptanceEvidence,
    CostEvidence,
    Evidence,
    combine,
)
from paceline.services.rollout_gateway.workers.evidence_exchange import EvidenceExchange, told_by
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

numbers = st.floats(0, 1e6, allow_nan=False)
evidences = st.builds(
    Evidence,
    st.lists(
        st.builds(
            AcceptanceEvidence,
            st.sampled_from(["eagle:1", "ngram:1"]),
            st.sampled_from([1, 5]),
            st.lists(numbers, max_size=4).map(tuple),
            st.lists(numbers, max_size=4).map(tuple),
        ),
        max_size=4,
        unique_by=lambda one: (one.family, one.batch_group),
    ).map(tuple),
    st.lists(
        st.builds(
            CostEvidence,
            st.sampled_from(["off", "a"]),
            st.sampled_from([1, 5]),
            st.floats(-3, 3),
            numbers,
        ),
        max_size=4,
        unique_by=lambda one: (one.arm, one.batch_group),
    ).map(tuple),
)


class Worker:
    """A peer that keeps what it is sent."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.heard: list[pb.MergeEvidence] = []

    def send(self, command: pb.WorkerCommand) -> None:
        assert command.WhichOneof("command") == "merge_evidence"
        assert not command.command_id
        self.heard.append(command.merge_evidence)

    @property
    def trials(self) -> list[float]:
        """Of the last message, position 1 of the only family."""
        return [one.trials[0] for one in self.heard[-1].evidence.acceptance]


def health(trials: float, seq: int = 3) -> pb.WorkerHealth:
    known = AcceptanceEvidence("eagle:1", 1, (trials / 2,), (trials,))
    versions = tpb.VersionSet(seq=seq, policy=seq, drafter=1)
    return pb.WorkerHealth(
        versions=versions, evidence=to_message(Evidence((known,)), pb.BanditEvidence)
    )


def test_each_worker_hears_the_sum_of_the_others() -> None:
    workers = [Worker(index) for index in range(3)]
    EvidenceExchange().spread(workers, {index: health(10.0**index) for index in range(3)})
    assert [worker.trials for worker in workers] == [[110.0], [101.0], [11.0]]


def test_what_a_worker_said_earlier_counts_once_and_its_last_word_only() -> None:
    exchange, workers = EvidenceExchange(), [Worker(0), Worker(1)]
    for trials in (5.0, 7.0, 9.0):
        exchange.spread(workers, {0: health(trials), 1: health(1.0)})
    assert workers[1].trials == [9.0]


def test_evidence_of_other_weights_is_not_spread() -> None:
    workers = [Worker(0), Worker(1)]
    EvidenceExchange().spread(workers, {0: health(5.0, seq=3), 1: health(7.0, seq=4)})
    assert not workers[0].heard
    assert not workers[1].heard


def test_a_worker_that_did_not_answer_is_told_nothing_and_its_last_word_is_kept() -> None:
    exchange, workers = EvidenceExchange(), [Worker(0), Worker(1)]
    exchange.spread(workers, {0: health(5.0), 1: health(7.0)})
    exchange.spread(workers, {0: health(6.0)})
    assert len(workers[1].heard) == 1
    assert workers[0].trials == [7.0]


def test_a_worker_that_starts_again_hears_all_of_its_set() -> None:
    exchange = EvidenceExchange()
    exchange.spread([Worker(0), Worker(1)], {0: health(5.0), 1: health(7.0)})
    again = Worker(1)
    exchange.teach(again, VersionSet(3, 3, 1))
    assert again.trials == [12.0]


def test_what_a_process_that_is_gone_had_said_fades_as_its_successor_speaks() -> None:
    exchange, workers = EvidenceExchange(), [Worker(0), Worker(1)]
    exchange.spread(workers, {0: health(5.0), 1: health(8.0)})
    exchange.teach(workers[1], VersionSet(3, 3, 1))
    for trials, left in ((1.0, 4.0), (2.0, 2.0), (2.0, 2.0), (3.0, 1.0), (4.0, 0.0)):
        exchange.spread(workers, {0: health(5.0), 1: health(trials)})
        assert workers[0].trials == [trials + left]
        assert workers[1].trials == [5.0 + left]


def test_a_new_gateway_begins_with_what_the_one_before_has_shown(tmp_path: Path) -> None:
    file = tmp_path / "evidence.json"
    EvidenceExchange(file).spread([Worker(0), Worker(1)], {0: health(5.0), 1: health(7.0)})
    worker = Worker(0)
    EvidenceExchange(file).teach(worker, VersionSet(3, 3, 1))
    assert worker.trials == [12.0]


def test_evidence_of_a_former_policy_is_bounded_and_of_a_former_drafter_tried_anew(
    tmp_path: Path,
) -> None:
    file = tmp_path / "evidence.json"
    EvidenceExchange(file).spread([], {0: health(1000.0)})
    policy, drafter = Worker(0), Worker(1)
    exchange = EvidenceExchange(file)
    exchange.teach(policy, VersionSet(4, 4, 1))
    exchange.teach(drafter, VersionSet(4, 3, 2))
    assert policy.trials == [POLICY_TRIALS]
    assert policy.heard[0].evidence.acceptance[0].accepted == [POLICY_TRIALS / 2]
    assert not drafter.heard


def test_a_damaged_file_of_evidence_is_no_reason_not_to_start(tmp_path: Path) -> None:
    file = tmp_path / "evidence.json"
    for text in ("", "{", "[]", '{"told": 3}'):
        file.write_text(text)
        worker = Worker(0)
        EvidenceExchange(file).teach(worker, VersionSet(3, 3, 1))
        assert not worker.heard


def test_evidence_from_elsewhere_takes_the_place_of_the_last() -> None:
    exchange, worker = EvidenceExchange(), Worker(0)
    for trials in (5.0, 7.0):
        exchange.hear([told_by(health(trials)), told_by(health(100.0, seq=9))])
        exchange.spread([worker], {0: health(1.0)})
        assert worker.trials == [trials]


def test_bandits_that_do_not_share_cause_no_messages() -> None:
    workers = [Worker(0), Worker(1)]
    empty = pb.WorkerHealth(versions=tpb.VersionSet(seq=1))
    EvidenceExchange().spread(workers, {0: empty, 1: empty})
    assert not workers[0].heard
    assert not workers[1].heard


@given(evidences)
def test_evidence_survives_the_wire(evidence: Evidence) -> None:
    message = pb.BanditEvidence.FromString(
        to_message(evidence, pb.BanditEvidence).SerializeToString()
    )
    assert from_message(Evidence, message) == evidence


@given(st.lists(evidences, max_size=4))
def test_counts_add_up_and_factors_are_averaged_by_weight(parts: list[Evidence]) -> None:
    whole = combine(parts)
    for one in whole.acceptance:
        same = [
            p
            for part in parts
            for p in part.acceptance
            if (p.family, p.batch_group) == (one.family, one.batch_group)
        ]
        for position, trials in enumerate(one.trials):
            assert trials == pytest.approx(
                sum(p.trials[position] for p in same if position < len(p.trials))
            )
    for cost in whole.costs:
        told = [
            c
            for part in parts
            for c in part.costs
            if (c.arm, c.batch_group) == (cost.arm, cost.batch_group)
        ]
        weight = sum(c.weight for c in told)
        assert cost.weight == pytest.approx(weight)
        if weight > 1e-6 and len(told) > 1:
            assert cost.log_factor == pytest.approx(
                sum(c.weight * c.log_factor for c in told) / weight, abs=1e-6
            )
