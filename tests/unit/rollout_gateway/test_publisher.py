"""Which rows of a request are kept."""

from __future__ import annotations

import numpy as np

from rollout_gateway.config import FeaturesConfig
from rollout_gateway.engines.ring import RowArray, row_dtype
from rollout_gateway.publisher import FeaturePublisher, Origin, longest_run

TOKENS = [10, 11, 12, 13, 14, 15]


def rows(*positions: int, version: int = 0, tokens: list[int] = TOKENS) -> RowArray:
    made = np.zeros(len(positions), dtype=row_dtype(4))
    made["request_id"] = 1
    made["position"] = positions
    made["token_id"] = [tokens[position] for position in positions]
    made["policy_version"] = version
    return made


def test_the_last_tokens_row_is_left_out() -> None:
    assert longest_run(rows(0, 1, 2, 3, 4, 5), TOKENS)["position"].tolist() == [0, 1, 2, 3, 4]


def test_a_gap_leaves_the_longest_stretch() -> None:
    assert longest_run(rows(0, 1, 3, 4), TOKENS)["position"].tolist() in ([0, 1], [3, 4])
    assert longest_run(rows(0, 2, 3, 4), TOKENS)["position"].tolist() == [2, 3, 4]


def test_the_newest_row_of_a_position_counts() -> None:
    twice = np.concatenate([rows(0, 1, 2), rows(1, 2, version=5)])
    assert longest_run(twice, TOKENS)["policy_version"].tolist() == [0, 5, 5]


def test_rows_of_other_tokens_are_left_out() -> None:
    other = rows(2, tokens=[0, 0, 99])
    assert longest_run(np.concatenate([rows(0, 1), other]), TOKENS)["position"].tolist() == [0, 1]
    assert len(longest_run(other, TOKENS)) == 0


def origin() -> Origin:
    return Origin("run", 0, "s", 2, TOKENS)


def publisher(**settings: int) -> FeaturePublisher:
    import redis.asyncio

    client = redis.asyncio.Redis(port=1)  # never reached: nothing is started
    return FeaturePublisher(client, FeaturesConfig(**settings), lambda version: f"head-{version}")  # type: ignore[arg-type]


async def test_a_full_queue_drops_the_oldest_batch_and_counts_its_rows() -> None:
    sender = publisher(queue_batches=1)
    for _ in range(3):
        sender.expect(1)
        sender.take(rows(0, 1, 2, 3, 4))
        sender.publish(1, origin())
    assert sender.rows_dropped == 10


async def test_rows_beyond_the_budget_are_dropped_and_counted() -> None:
    sender = publisher(gather_bytes=rows(0, 1).nbytes)
    sender.expect(1)
    sender.take(rows(0, 1))
    sender.take(rows(2))
    assert sender.rows_dropped == 1
    sender.forget(1)
    sender.expect(1)
    sender.take(rows(0, 1))
    assert sender.rows_dropped == 1


async def test_rows_nobody_asked_for_are_ignored() -> None:
    sender = publisher()
    sender.take(rows(0, 1))
    sender.publish(1, origin())
    assert sender.rows_dropped == 0
