"""What is kept, what is dropped and counted, what is drawn, and what is never trained on."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from unit.drafter_trainer.samples import TARGET, batch, sample, sessions

from drafter_trainer.buffer import FeatureBuffer
from drafter_trainer.sample import sample_from
from paceline.errors import DataLoss
from paceline.streams import FeatureBatch
from paceline.tensors import from_numpy

EVERY = 5


def buffer(*, samples: int = 100, byte_budget: int = 1 << 20, heldout: int = 64) -> FeatureBuffer:
    return FeatureBuffer(
        max_samples=samples, byte_budget=byte_budget, heldout_every=EVERY, heldout_samples=heldout, seed=0
    )


def test_the_oldest_go_when_samples_or_bytes_exceed_the_budget() -> None:
    trained = sessions(12, heldout=False, every=EVERY)
    made = [sample(10, seed, session=name) for seed, name in enumerate(trained)]
    by_count, by_bytes = buffer(samples=5), buffer(byte_budget=made[0].nbytes * 4 + 1)
    for one in made:
        by_count.add(one)
        by_bytes.add(one)
    assert (len(by_count), by_count.dropped["evicted"]) == (5, 7)
    assert (len(by_bytes), by_bytes.dropped["evicted"], by_bytes.nbytes) == (4, 8, made[0].nbytes * 4)
    kept = {one.session for one in by_count.draw(10_000, recency=1, known={made[0].lm_head_hash})}
    assert kept == set(trained[-5:])


def test_held_out_sessions_are_never_drawn_and_only_the_newest_version_judges() -> None:
    held = buffer(heldout=3)
    for seed, name in enumerate(sessions(6, heldout=True, every=EVERY)):
        held.add(sample(10, seed, session=name, version=seed // 2, head=f"{seed // 2:016x}"))
    for seed, name in enumerate(sessions(6, heldout=False, every=EVERY)):
        held.add(sample(10, seed, session=name))
    heads = [f"{version:016x}" for version in range(3)]
    assert [one.policy_version for one in held.heldout(heads)] == [2, 2]
    assert [one.policy_version for one in held.heldout(heads[:2])] == [1], "only the newest three are kept"
    assert held.heldout([]) == []
    trained = set(sessions(6, heldout=False, every=EVERY))
    for _ in range(50):
        assert {one.session for one in held.draw(40, recency=0.7, known={sample(10, 0).lm_head_hash})} <= trained


def test_heads_are_drawn_by_recency_and_size_and_one_at_a_time() -> None:
    held = buffer()
    names = iter(sessions(30, heldout=False, every=EVERY))
    for head, count in (("old", 10), ("mid", 10), ("new", 5)):
        for seed in range(count):
            version = ("old", "mid", "new").index(head)
            held.add(sample(12, seed, session=next(names), version=version, head=head))
    drawn = Counter[str]()
    for _ in range(3_000):
        (head,) = {one.lm_head_hash for one in held.draw(20, recency=0.5, known={"old", "mid", "new"})}
        drawn[head] += 1
    weights = {"old": 0.25 * 10, "mid": 0.5 * 10, "new": 1.0 * 5}
    for head, weight in weights.items():
        assert drawn[head] / 3_000 == pytest.approx(weight / sum(weights.values()), abs=0.03)
    assert held.draw(20, recency=0.5, known={"unknown"}) == []
    assert {one.lm_head_hash for one in held.draw(20, recency=0.5, known={"mid", "new"}, at_least=6)} == {"mid"}


def test_a_draw_is_worth_the_tokens_asked_for_without_repetition() -> None:
    held = buffer()
    for seed, name in enumerate(sessions(20, heldout=False, every=EVERY)):
        held.add(sample(8 + seed, seed, session=name))
    known = {sample(8, 0).lm_head_hash}
    for tokens in (1, 30, 100):
        drawn = held.draw(tokens, recency=1, known=known)
        assert len({one.session for one in drawn}) == len(drawn)
        assert len(drawn) == 1 or sum(one.positions for one in drawn) <= tokens
    assert len(held.draw(10_000, recency=1, known=known)) == 20
    assert len(held.draw(1, recency=1, known=known, at_least=3)) == 3


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
