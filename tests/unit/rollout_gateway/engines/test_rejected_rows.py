"""Rows of rejected drafts: the states transformers gives there, bounded, and nothing else changed
by them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_models import save_random
from rejected_oracle import contexts_of_rows, last_states
from transformers import PreTrainedModel

from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.embedded.build import build_embedded
from paceline.services.rollout_gateway.engines.embedded.nodes import Nodes, node_depths
from paceline.services.rollout_gateway.engines.embedded.rejected import (
    REJECTED_PER_ROUND,
    rejected_drafts,
)
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.embedded.verify import Verdict
from paceline.services.rollout_gateway.engines.nouns import Capability, Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.services.rollout_gateway.engines.worker.ring import RowArray, RowRing
from paceline.services.rollout_gateway.features.selection import hanging_drafts, longest_run

ARMS = ("eagle:5_1_6", "eagle:4_3_10", "ngram:4_3_9")
ROW_BYTES = 4 * 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("model")
    return directory, save_random(directory, "qwen3", sharpness=6.0)


def requests(
    count: int = 6, *, captured: Callable[[int], bool] = lambda number: True
) -> list[Request]:
    rng = random.Random(3)
    made = []
    for number in range(count):
        words = [rng.randrange(3, 97) for _ in range(4)]
        prompt = tuple(words * rng.randrange(2, 5))  # repeats, so that n-grams are found
        sampling = Sampling(
            seed=rng.getrandbits(63),
            max_tokens=rng.randrange(12, 40),
            temperature=rng.choice([0.0, 1.0]),
        )
        made.append(Request(number, prompt, sampling, capture=captured(number)))
    return made


def build(directory: Path, ring: RowRing, arm: str, **options: object) -> Engine:
    settings: dict[str, object] = {
        "model_dir": str(directory),
        "drafter": "eagle",
        "arms": ARMS,
        "features_dtype": "float32",
        "max_batch": 4,
        "verify_budget": False,
        "rejected_rows": True,
        **options,
    }
    engine = build_embedded(EmbeddedSpec.model_validate(settings), ring)
    engine.force_arm(arm)
    return engine


def run(
    engine: Engine, batch: list[Request], ring: RowRing, drain_every: int = 1
) -> tuple[RowArray, dict[int, list[int]]]:
    """All rows that were read, and the sequences."""
    for one in batch:
        engine.enqueue(one)
    prompts = {one.request_id: one.prompt for one in batch}
    rows, sequences, steps = [], {}, 0
    while engine.has_work:
        for chunk in engine.step():
            sequences[chunk.request_id] = [*prompts[chunk.request_id], *chunk.token_ids]
        steps += 1
        if steps % drain_every == 0:
            rows.append(ring.read(ring.rows_written))
    return np.concatenate([*rows, ring.read(ring.rows_written)]), sequences


def ring_of(capacity: int = 20_000, states: int = 1) -> RowRing:
    return RowRing.create(capacity, ROW_BYTES * states)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("arm", "options"),
    [
        *((arm, {}) for arm in ARMS),
        ("eagle:5_1_6", {"verification": "rejection", "arms": ("eagle:5_1_6",)}),
        ("eagle:4_3_10", {"capture_inner": (1, 2)}),
    ],
)
def test_rejected_rows_are_the_states_transformers_gives_after_the_draft(
    arm: str, options: dict[str, Any], model: tuple[Path, PreTrainedModel]
) -> None:
    inner = options.get("capture_inner", ())
    ring = ring_of(states=len(inner) + 1)
    rows, sequences = run(build(model[0], ring, arm, **options), requests(), ring)
    compared = deep = 0
    for number, sequence in sequences.items():
        mine = rows[rows["request_id"] == number]
        contexts = contexts_of_rows(mine, sequence)
        rejected = np.flatnonzero(mine["parent"])
        assert not any(contexts[i] == tuple(sequence[: len(contexts[i])]) for i in rejected)
        states = last_states(model[1], contexts, inner)
        found = np.ascontiguousarray(mine["hidden"]).view(np.float32)
        np.testing.assert_allclose(found, states, rtol=0, atol=2e-5)
        compared += len(rejected)
        deep += int((mine["parent"] > 1).sum())
    assert compared > 50
    assert deep > 10


@pytest.mark.parametrize("arm", ARMS)
def test_rows_of_a_sequence_are_the_same_bytes_in_the_same_order(
    arm: str, model: tuple[Path, PreTrainedModel]
) -> None:
    ring = ring_of()
    without, said = run(build(model[0], ring, arm, rejected_rows=False), requests(), ring)
    assert not without["parent"].any()
    ring = ring_of()
    rows, said_again = run(build(model[0], ring, arm), requests(), ring)
    assert said_again == said
    assert rows["parent"].any()
    own = rows[rows["parent"] == 0]
    by_request, before = (
        one[np.argsort(one["request_id"], kind="stable")] for one in (own, without)
    )
    assert by_request.tobytes() == before.tobytes()


@pytest.mark.parametrize("arm", ARMS)
def test_every_rejected_draft_is_written_or_counted_and_no_round_writes_more_than_the_bound(
    arm: str, model: tuple[Path, PreTrainedModel]
) -> None:
    ring = ring_of()
    engine = build(model[0], ring, arm)
    for number in range(3):
        prompt = (5, 6, 7 + number) * 4
        engine.enqueue(
            Request(
                number, prompt, Sampling(seed=number, max_tokens=90, ignore_eos=True), capture=True
            )
        )
    written = 0
    for _ in range(15):
        engine.step()
        rows = ring.read(ring.rows_written)
        rejected = rows[rows["parent"] > 0]
        per_request = np.bincount(rejected["request_id"].astype(np.int64), minlength=3)
        assert per_request.max() <= REJECTED_PER_ROUND
        written += len(rejected)
    load = engine.load
    assert load.running == 3
    assert (
        written + load.rejected_left_out
        == load.speculation.drafted_tokens - load.speculation.accepted_tokens
    )
    assert (load.rejected_left_out > 0) == (
        written < load.speculation.drafted_tokens - load.speculation.accepted_tokens
    )
    assert written > 20


def test_only_requests_that_ask_for_capture_leave_rejected_rows(
    model: tuple[Path, PreTrainedModel],
) -> None:
    ring = ring_of()
    batch = requests(captured=lambda number: number % 2 == 0)
    rows, _ = run(build(model[0], ring, "eagle:4_3_10"), batch, ring)
    assert set(rows["request_id"][rows["parent"] > 0].tolist()) == {0, 2, 4}


def test_without_drafts_nothing_is_rejected(model: tuple[Path, PreTrainedModel]) -> None:
    ring = ring_of()
    rows, _ = run(build(model[0], ring, "off"), requests(), ring)
    assert len(rows)
    assert not rows["parent"].any()


@pytest.mark.few(3)
@pytest.mark.parametrize("arm", ["eagle:5_1_6", "eagle:4_3_10"])
@pytest.mark.parametrize(("capacity", "drain_every"), [(5, 1), (23, 2), (61, 3), (100, 100)])
def test_a_full_ring_drops_drafts_with_all_that_hangs_under_them(
    capacity: int, drain_every: int, arm: str, model: tuple[Path, PreTrainedModel]
) -> None:
    whole_ring = ring_of()
    whole, sequences = run(build(model[0], whole_ring, arm), requests(), whole_ring)
    ring = ring_of(capacity)
    engine = build(model[0], ring, arm)
    rows, said = run(engine, requests(), ring, drain_every)
    assert said == sequences
    assert len(rows) + ring.rows_dropped == len(whole)
    assert engine.load.rows_dropped == ring.rows_dropped > 0
    for number, sequence in sequences.items():
        mine = rows[rows["request_id"] == number]
        known = set(contexts_of_rows(whole[whole["request_id"] == number], sequence))
        assert set(contexts_of_rows(mine, sequence)) <= known
        path = longest_run(mine, sequence)
        drafts, parents = hanging_drafts(mine, path)
        order = np.concatenate((path, drafts))
        assert (mine["position"][order[parents]] + 1 == mine["position"][drafts]).all()


def test_the_capability_needs_the_setting_and_a_ring(model: tuple[Path, PreTrainedModel]) -> None:
    ring = ring_of()
    assert Capability.REJECTED_ROWS in build(model[0], ring, "off").info.capabilities
    assert (
        Capability.REJECTED_ROWS
        not in build(model[0], ring, "off", rejected_rows=False).info.capabilities
    )
    spec = EmbeddedSpec.model_validate(
        {"model_dir": str(model[0]), "drafter": "off", "rejected_rows": True}
    )
    assert Capability.REJECTED_ROWS not in build_embedded(spec).info.capabilities


#            0
#       1    2    3        level 1
#      4 5   6             level 2: 4, 5 under 1; 6 under 2
#      7     8             level 3: 7 under 4; 8 under 6
PARENTS = [0, 0, 0, 0, 1, 1, 2, 4, 6]


def tree(*rows: list[int]) -> Nodes:
    parents = torch.tensor([PARENTS] * len(rows))
    return Nodes(torch.tensor(rows), parents, node_depths(parents))


def verdict(*paths: list[int]) -> Verdict:
    length = max(len(path) for path in paths)
    padded = torch.tensor([path + [0] * (length - len(path)) for path in paths])
    accepted = torch.tensor([len(path) - 1 for path in paths])
    zeros = torch.zeros(padded.shape)
    return Verdict(torch.zeros_like(padded), accepted, zeros, zeros.double(), padded)


def chosen(
    nodes: Nodes, path: Verdict, taken: list[int], most: int = 99
) -> tuple[list[tuple[int, int, int]], int]:
    found = rejected_drafts(nodes, path, torch.tensor(taken), most)
    return list(
        zip(found.rows.tolist(), found.nodes.tolist(), found.parents.tolist(), strict=True)
    ), found.left_out


def test_drafts_of_a_tree_come_by_level_and_say_how_far_back_their_parent_lies() -> None:
    whole = list(range(10, 19))
    # Path 0, 2: left are 1, 3 under the root, 6 under 2, then 4, 5 under 1 and 7, 8 under 4 and 6.
    expected = [(0, 1, 1), (0, 3, 1), (0, 4, 3), (0, 5, 4), (0, 6, 1), (0, 7, 4), (0, 8, 3)]
    assert chosen(tree(whole), verdict([0, 2]), [2]) == (expected, 0)
    assert chosen(tree(whole), verdict([0, 2]), [2], most=3) == (expected[:3], 4)


def test_rows_of_a_round_are_counted_apart() -> None:
    whole = list(range(10, 19))
    found, left_out = chosen(
        tree(whole, whole, whole), verdict([0], [0, 1, 4, 7], [0, 2]), [1, 4, 0], most=2
    )
    assert found == [(0, 1, 1), (0, 2, 1), (1, 2, 1), (1, 3, 1)]
    assert left_out == 6 + 3  # of eight and of five; nothing of the row that is not asked for


def test_what_hangs_under_the_path_behind_a_stop_was_not_rejected() -> None:
    whole = list(range(10, 19))
    # All of 0, 1, 4, 7 was drawn, but the request ended with the draw at the root: 1 is the last
    # token.
    assert chosen(tree(whole), verdict([0, 1, 4, 7]), [1])[0] == [
        (0, 2, 1),
        (0, 3, 1),
        (0, 6, 3),
        (0, 8, 2),
    ]


def test_absent_drafts_and_those_under_them_are_never_written() -> None:
    thin = [10, 11, -1, 13, -1, 15, 16, 17, 18]
    assert chosen(tree(thin), verdict([0]), [1])[0] == [(0, 1, 1), (0, 3, 1), (0, 5, 3)]


def test_of_a_chain_all_behind_the_first_refusal_are_rejected() -> None:
    nodes = Nodes(torch.tensor([[10, 11, 12, 13, 14], [10, 11, -1, -1, -1]]))
    zeros = torch.zeros(2, 5)
    path = Verdict(torch.zeros(2, 5).long(), torch.tensor([1, 1]), zeros, zeros.double(), None)
    assert chosen(nodes, path, [2, 2]) == ([(0, 2, 1), (0, 3, 2), (0, 4, 2)], 0)
    assert chosen(nodes, path, [1, 1]) == ([], 0)
