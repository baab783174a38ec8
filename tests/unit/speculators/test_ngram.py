"""The n-gram speculator continues the latest earlier occurrence of the longest suffix."""

from __future__ import annotations

import torch

from paceline.speculators.base import DraftBatch, SpeculatorSetup
from paceline.speculators.ngram import NgramSpeculator


def propose(speculator: NgramSpeculator, tokens: list[int], steps: int = 4, slot: int = 0) -> list[int]:
    known = torch.zeros(2, 64, dtype=torch.int64)
    known[slot, : len(tokens)] = torch.tensor(tokens)
    return speculator.propose(DraftBatch([slot], [len(tokens)], known, torch.empty(2, 64, 0)), steps)[0].tolist()


def fresh() -> NgramSpeculator:
    setup = SpeculatorSetup(target=None, slots=2, capacity=64, dtype=torch.float32, seed=0)  # type: ignore[arg-type]
    return NgramSpeculator(setup)


def test_it_continues_the_latest_occurrence() -> None:
    assert propose(fresh(), [5, 6, 7, 8, 9, 5, 6, 1, 2, 3, 5, 6]) == [1, 2, 3, 5]


def test_a_longer_suffix_beats_a_later_short_one() -> None:
    assert propose(fresh(), [4, 5, 6, 7, 9, 5, 6, 8, 4, 5, 6], steps=1) == [7]


def test_a_match_that_reaches_the_end_repeats_itself() -> None:
    assert propose(fresh(), [1, 2, 3, 1, 2, 3, 1, 2], steps=5) == [3, 1, 2, 3, 1]


def test_nothing_is_proposed_without_a_repetition() -> None:
    assert propose(fresh(), [1, 2, 3, 4]) == [-1] * 4
    assert propose(fresh(), [1]) == [-1] * 4


def test_growing_step_by_step_equals_starting_anew() -> None:
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1, 5, 3, 1, 4]
    growing = fresh()
    for end in range(1, len(tokens) + 1):
        assert propose(growing, tokens[:end]) == propose(fresh(), tokens[:end])


def test_a_freed_slot_forgets_and_a_moved_one_remembers() -> None:
    speculator = fresh()
    propose(speculator, [1, 2, 3, 1, 2])
    speculator.move(0, 1, 5)
    assert propose(speculator, [1, 2, 3, 1, 2], slot=1) == [3, 1, 2, 3]
    speculator.free(1)
    assert propose(speculator, [7, 8, 1, 2], slot=1) == [-1] * 4
