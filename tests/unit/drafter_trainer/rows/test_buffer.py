"""The row buffer: rows kept, rows dropped and counted, rows drawn, and rows never trained on."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from metric_points import points
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from unit.drafter_trainer.samples import (
    TARGET,
    batch,
    sample,
    sessions,
)

from paceline.errors import DataLoss
from paceline.services.drafter_trainer import metrics
from paceline.services.drafter_trainer.config import BufferConfig
from paceline.services.drafter_trainer.rows.buffer import FeatureBuffer
from paceline.services.drafter_trainer.rows.sample import FeatureSample, sample_from
from paceline.streams import FeatureBatch
from paceline.tensors import from_numpy

EVERY = 5
HEADS = ("old", "mid", "new")


def buffer(
    *,
    samples: int = 100,
    byte_budget: int = 1 << 20,
    fresh: int = 64,
    seed: int = 0,
    **settings: Any,
) -> FeatureBuffer:
    budgets = {"samples": samples, "byte_budget": byte_budget, "judged_every": EVERY}
    config = BufferConfig.model_construct(**{**BufferConfig().model_dump(), **budgets})
    vars(config).update(settings, judged_samples=fresh)  # constants of a run
    return FeatureBuffer(config, seed)


def steps_of(lengths: dict[int, Sequence[int]]) -> list[FeatureSample]:
    """Return training samples with lengths in tokens by RL step; each step has its own policy
    version and head.
    """
    names = iter(sessions(sum(map(len, lengths.values())), heldout=False, every=EVERY))
    return [
        dataclasses.replace(
            sample(length, 0, session=next(names), version=step, head=HEADS[step]), step=step
        )
        for step, part in lengths.items()
        for length in part
    ]


def test_the_oldest_go_when_samples_or_bytes_exceed_the_budget(
    metric_reader: InMemoryMetricReader,
) -> None:
    trained = sessions(12, heldout=False, every=EVERY)
    made = [sample(10, seed, session=name) for seed, name in enumerate(trained)]
    by_count, by_bytes = buffer(samples=5), buffer(byte_budget=made[0].nbytes * 4 + 1)
    for one in made:
        by_count.add(one)
        by_bytes.add(one)
    assert (len(by_count), by_count.dropped["evicted"]) == (5, 7)
    assert (len(by_bytes), by_bytes.dropped["evicted"], by_bytes.nbytes) == (
        4,
        8,
        made[0].nbytes * 4,
    )
    assert points(metric_reader, metrics, "samples_dropped") == {("evicted",): 7 + 8}
    kept = {one.session for one in by_count.draw(10_000, known={made[0].lm_head_hash})}
    assert kept == set(trained[-5:])


def test_short_samples_of_past_steps_go_first_then_their_long_ones_and_this_steps_last() -> None:
    made = steps_of({0: (10, 30, 20, 40), 1: (12, 50, 14, 60), 2: (16, 18)})
    held = buffer(samples=len(made))
    for one in made:
        held.add(one)
    # The shorter half of 10, 30, 20, 40 is 10 and 20, that of 12, 50, 14, 60 is 12 and 14.
    order = [10, 20, 12, 14, 30, 40, 50, 60, 16, 18]
    gone = list[int]()
    for number in range(len(made)):
        before = Counter(one.positions + 2 for one in held)
        held.add(dataclasses.replace(steps_of({2: (100 + number,)})[0], step=2))
        after = Counter(one.positions + 2 for one in held)
        gone += (before - after).elements()
    assert gone == order


@pytest.mark.parametrize(
    ("arrived", "share"), [((), 0.5), ((40,), 0.25), ((40, 45), 0.0), ((40, 45, 50), 0.0)]
)
def test_draws_are_of_the_previous_steps_long_samples_until_this_step_delivers_as_many(
    arrived: tuple[int, ...], share: float
) -> None:
    # So small a weight leaves older heads to the draws of long samples alone.
    held = buffer(recency=1e-9)
    for one in steps_of({0: (90, 95), 1: (10, 40, 12, 35), 2: (9, 8, 11, *arrived)}):
        held.add(one)
    drawn = Counter[str]()
    for _ in range(2_000):
        samples = held.draw(30, known=HEADS)
        (head,) = {one.lm_head_hash for one in samples}
        drawn[head] += 1
        if head == "mid":
            assert {one.positions + 2 for one in samples} <= {40, 35}
    assert drawn["old"] == 0
    assert drawn["mid"] / 2_000 == pytest.approx(share, abs=0.04)


def test_where_the_previous_steps_long_samples_are_too_few_or_headless_draws_are_of_what_there_is() -> (
    None
):
    held = buffer(long_share=1.0, recency=1e-9)
    for one in steps_of({1: (10, 40, 12), 2: (9, 8, 11)}):
        held.add(one)
    assert {one.step for one in held.draw(100, known=["mid", "new"])} == {1}
    assert {one.step for one in held.draw(100, known=["mid", "new"], at_least=3)} == {2}
    assert {one.step for one in held.draw(100, known=["new"])} == {2}


def test_late_samples_join_the_long_or_short_ones_of_their_step_and_older_steps_are_not_mixed_in() -> (
    None
):
    made = steps_of({0: (90, 95), 1: (10, 40, 12, 11, 50), 2: (9,)})
    late, made[5:7] = made[5:7], []
    held = buffer(long_share=1.0, samples=8)
    for one in (*made, *late):
        # the samples differ in their step only
        held.add(dataclasses.replace(one, lm_head_hash="one"))
    drawn = [one for _ in range(50) for one in held.draw(60, known=["one"])]
    assert {one.positions + 2 for one in drawn} == {40, 12, 50}
    held.forget(lambda one: one.step == 1, "other")
    for number in range(2):
        held.add(dataclasses.replace(steps_of({2: (20 + number,)})[0], step=2))
    assert [one.positions + 2 for one in held] == [10, 11, 40, 12, 50, 20, 21]


def test_windows_of_a_long_sample_come_from_all_over_it_and_are_those_of_the_seed() -> None:
    length, window = 120, 16
    (name,) = sessions(1, heldout=False, every=EVERY)
    # each row holds its position
    rows = torch.arange(length - 1.0)[:, None].expand(-1, TARGET.hidden_size)
    tokens = torch.arange(length)
    long = dataclasses.replace(
        sample(length, 3, session=name), hidden=rows, token_ids=tokens, generated=tokens >= 50
    )
    starts = {seed: list[int]() for seed in (0, 1, 2)}
    for seed, found in starts.items():
        held = buffer(window=window, seed=min(seed, 1))
        held.add(long)
        for _ in range(400):
            (one,) = held.draw(100, known=[long.lm_head_hash])
            assert one.positions == window
            assert one.generated[2:].any(), "a stretch of the prompt alone teaches nothing"
            found.append(int(one.hidden[0, 0]))
            assert torch.equal(one.hidden[:, 0], torch.arange(found[-1], found[-1] + window + 1.0))
            assert torch.equal(one.token_ids, torch.arange(found[-1], found[-1] + window + 2))
    assert starts[1] == starts[2] != starts[0]
    # Targets are at positions 48 .. 117; the first window with a target starts at 33, the last
    # window at 102.
    assert 33 <= min(starts[0]) < 40
    assert max(starts[0]) == 102
    assert len(set(starts[0])) > 60


def test_fresh_samples_are_not_drawn_before_they_have_judged_or_newer_ones_take_their_place() -> (
    None
):
    held = buffer(fresh=3)
    names = sessions(6, heldout=True, every=EVERY)
    for seed, name in enumerate(names):
        held.add(sample(10, seed, session=name, version=seed // 2, head=f"{seed // 2:016x}"))
    for seed, name in enumerate(sessions(6, heldout=False, every=EVERY)):
        held.add(sample(10, seed, session=name))
    heads = [f"{version:016x}" for version in range(3)]
    assert [one.policy_version for one in held.fresh(heads)] == [2, 2]
    assert [one.policy_version for one in held.fresh(heads[:2])] == [1], "the newest three wait"
    assert held.fresh([]) == []
    both = held.fresh(heads, at_least=held.fresh(heads)[0].targets * 2 + 1)
    assert [one.policy_version for one in both] == [1, 2, 2], (
        "short responses do not keep drafters from being judged"
    )

    def drawn() -> set[str]:
        known = {*heads, sample(10, 0).lm_head_hash}
        return {one.session for _ in range(80) for one in held.draw(40, known=known)}

    trained = {*sessions(6, heldout=False, every=EVERY), *names[:3]}
    assert drawn() == trained
    nbytes = held.nbytes
    held.release(held.fresh(heads))
    held.release(both)  # twice changes nothing
    assert held.fresh(heads) == []
    assert drawn() == {*trained, *names}, "what has judged is trained on"
    assert held.nbytes == nbytes


def test_siblings_are_all_fresh_or_none_is() -> None:
    held = buffer()
    groups = {
        fresh: sessions(3, heldout=fresh, every=EVERY) for fresh in (True, False)
    }  # names that the rule puts on either side
    for fresh, names in groups.items():
        for name in names:
            for sibling in range(4):
                one = sample(10, sibling, session=f"{name}-{sibling}-{fresh}")
                held.add(dataclasses.replace(one, group=name))
    known = [sample(10, 0).lm_head_hash]
    assert {one.group for one in held.fresh(known)} == set(groups[True])
    assert len(held.fresh(known)) == 12
    assert {one.group for one in held} == set(groups[False])


def test_fresh_samples_end_with_one_of_each_group_and_are_of_as_many_groups_as_are_asked_for() -> (
    None
):
    held = buffer()
    names = sessions(3, heldout=True, every=EVERY)
    for seed, (group, version) in enumerate([(2, 0), (0, 1), (1, 1), (0, 1), (0, 1)]):
        one = sample(10, seed, session=f"{seed}", version=version)
        held.add(dataclasses.replace(one, group=names[group]))
    known = [sample(10, 0).lm_head_hash]
    assert [one.session for one in held.fresh(known)] == ["1", "3", "2", "4"]
    assert [one.session for one in held.fresh(known, groups=3)] == ["1", "3", "0", "2", "4"]


def test_the_newest_versions_samples_are_those_on_either_side() -> None:
    held = buffer()
    (fresh,), (trained,) = (sessions(1, heldout=side, every=EVERY) for side in (True, False))
    for seed, (group, version) in enumerate(
        [(fresh, 0), (trained, 0), (trained, 1), (fresh, 1), (trained, 1)]
    ):
        one = sample(10, seed, session=f"{seed}", version=version, head=f"{version:016x}")
        held.add(dataclasses.replace(one, group=group))
    heads = [f"{version:016x}" for version in range(2)]
    assert [one.session for one in held.newest(heads)] == ["2", "4", "3"]
    assert [one.session for one in held.newest(heads[:1])] == ["1", "0"]
    assert held.newest([]) == []


def test_of_too_many_fresh_samples_the_oldest_of_the_largest_group_is_trained_on() -> None:
    held = buffer(fresh=4)
    names = sessions(3, heldout=True, every=EVERY)
    for seed, group in enumerate([0, 1, 1, 2, 1]):
        one = sample(10, seed, session=f"{seed}")
        held.add(dataclasses.replace(one, group=names[group]))
    assert [one.session for one in held] == ["1"]


def test_bytes_of_fresh_samples_count_and_go_last() -> None:
    size = sample(10, 0).nbytes
    held = buffer(byte_budget=3 * size)
    fresh, trained = (sessions(4, heldout=side, every=EVERY) for side in (True, False))
    for seed, name in enumerate([*trained, *fresh]):
        held.add(sample(10, seed, session=name))
    assert (len(held), held.nbytes, held.dropped["evicted"]) == (0, 3 * size, 5)
    assert [one.session for one in held.fresh([sample(10, 0).lm_head_hash])] == fresh[1:]


def test_heads_are_drawn_by_recency_and_size_and_one_at_a_time() -> None:
    held = buffer(recency=0.5)
    names = iter(sessions(30, heldout=False, every=EVERY))
    for head, count in (("old", 10), ("mid", 10), ("new", 5)):
        for seed in range(count):
            version = ("old", "mid", "new").index(head)
            held.add(sample(12, seed, session=next(names), version=version, head=head))
    drawn = Counter[str]()
    for _ in range(3_000):
        (head,) = {one.lm_head_hash for one in held.draw(20, known={"old", "mid", "new"})}
        drawn[head] += 1
    weights = {"old": 0.25 * 10, "mid": 0.5 * 10, "new": 1.0 * 5}
    for head, weight in weights.items():
        assert drawn[head] / 3_000 == pytest.approx(weight / sum(weights.values()), abs=0.03)
    assert held.draw(20, known={"unknown"}) == []
    assert {one.lm_head_hash for one in held.draw(20, known={"mid", "new"}, at_least=6)} == {"mid"}


def test_a_draw_is_worth_the_tokens_asked_for_without_repetition() -> None:
    held = buffer()
    for seed, name in enumerate(sessions(20, heldout=False, every=EVERY)):
        held.add(sample(8 + seed, seed, session=name))
    known = {sample(8, 0).lm_head_hash}
    for tokens in (1, 30, 100):
        drawn = held.draw(tokens, known=known)
        assert len({one.session for one in drawn}) == len(drawn)
        assert len(drawn) == 1 or sum(one.positions for one in drawn) <= tokens
    assert len(held.draw(10_000, known=known)) == 20
    assert len(held.draw(1, known=known, at_least=3)) == 3


def test_stale_heads_are_dropped_and_counted() -> None:
    held = buffer()
    for seed, name in enumerate(sessions(6, heldout=False, every=EVERY)):
        held.add(sample(10, seed, session=name, head="old" if seed < 4 else "new"))
    held.forget(lambda one: one.lm_head_hash == "new", "stale_head")
    assert (len(held), held.dropped["stale_head"]) == (2, 4)
    assert held.tokens == held.tokens_of({"new"}) == 2 * 8
    assert held.nbytes == 2 * sample(10, 0).nbytes


def bad_batches() -> dict[str, FeatureBatch]:
    good = batch(10, 0)
    infinite = np.full((9, TARGET.hidden_size), np.inf, dtype=np.float32)
    gap = good.positions.copy()
    gap[4:] += 1
    foreign = good.token_ids.copy()
    foreign[3] = TARGET.vocab_size
    return {
        "short": batch(2, 0),
        "layer": dataclasses.replace(good, layers="3,7,11"),
        "convention": dataclasses.replace(good, convention="pre_norm"),
        "width": dataclasses.replace(good, hidden=from_numpy("hidden", infinite[:, :3])),
        "not finite": dataclasses.replace(good, hidden=from_numpy("hidden", infinite)),
        "gap": dataclasses.replace(good, positions=gap),
        "vocabulary": dataclasses.replace(good, token_ids=foreign),
    }


@pytest.mark.parametrize("name", list(bad_batches()))
def test_rows_that_cannot_be_trained_on_are_refused(name: str) -> None:
    with pytest.raises(DataLoss):
        sample_from(bad_batches()[name], TARGET)
