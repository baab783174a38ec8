"""The n-gram speculator continues the longest suffix as it most often went on, here or in earlier
sequences.
"""

from __future__ import annotations

import torch

from paceline.speculators.base import DraftBatch, Drafts, DraftShape, SpeculatorSetup
from paceline.speculators.ngram import NgramSpeculator
from paceline.speculators.ngram_answers import CONTEXTS, Contexts


def drafts_of(
    speculator: NgramSpeculator, tokens: list[int], shape: DraftShape, slot: int = 0
) -> Drafts:
    known = torch.zeros(2, 64, dtype=torch.int64)
    known[slot, : len(tokens)] = torch.tensor(tokens)
    return speculator.propose(
        DraftBatch([slot], [len(tokens)], known, torch.empty(2, 64, 0)), shape
    )


def propose(
    speculator: NgramSpeculator, tokens: list[int], steps: int = 4, slot: int = 0
) -> list[int]:
    drafts = drafts_of(speculator, tokens, DraftShape(steps), slot)
    assert drafts.parents is None
    return drafts.tokens[0].tolist()


def fresh() -> NgramSpeculator:
    setup = SpeculatorSetup(target=None, slots=2, capacity=64, dtype=torch.float32, seed=0)  # type: ignore[arg-type]
    return NgramSpeculator(setup)


def test_it_continues_the_latest_occurrence() -> None:
    assert propose(fresh(), [5, 6, 7, 8, 9, 5, 6, 1, 2, 3, 5, 6]) == [1, 2, 3, 5]


def test_a_longer_suffix_beats_a_later_short_one() -> None:
    assert propose(fresh(), [3, 4, 5, 6, 7, 9, 5, 6, 8, 3, 4, 5, 6], steps=1) == [7]


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


def test_the_more_frequent_continuation_wins_and_ties_go_to_the_newer() -> None:
    assert propose(fresh(), [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2], steps=1) == [3]
    assert propose(fresh(), [1, 2, 3, 9, 8, 1, 2, 4, 1, 2], steps=1) == [4]


def test_an_ended_sequence_drafts_for_the_next_one() -> None:
    speculator = fresh()
    known = torch.tensor([[1, 2, 3, 4, 5], [0] * 5])
    speculator.ended(DraftBatch([0], [5], known, torch.empty(2, 5, 0)))
    speculator.free(0)
    assert propose(speculator, [9, 1, 2], steps=3, slot=1) == [3, 4, 5]


def test_a_moved_slot_goes_on_where_it_was() -> None:
    speculator = fresh()
    propose(speculator, [1, 2, 3, 1, 2])
    speculator.move(0, 1, 5)
    assert propose(speculator, [1, 2, 3, 1, 2], slot=1) == [3, 1, 2, 3]


def test_a_tree_holds_the_likeliest_continuations_with_their_shares() -> None:
    # After (1, 2): 3 twice, 4 once; after (2, 3): 5 once, 6 once; one count of "something else"
    # each.
    drafts = drafts_of(fresh(), [1, 2, 3, 5, 1, 2, 3, 6, 1, 2, 4, 1, 2], DraftShape(2, 2, 4))
    assert drafts.parents is not None
    assert drafts.tokens[0].tolist() == [3, 4, 6, 5]
    assert drafts.parents[0].tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(drafts.scores[0], torch.tensor([2 / 4, 1 / 4, 1 / 6, 1 / 6]))


def test_nothing_below_the_floor_is_proposed() -> None:
    drafts = drafts_of(fresh(), [1, 2, 3, 1, 2], DraftShape(4, floor=0.2))
    assert drafts.tokens[0].tolist() == [3, 1, -1, -1]


def test_the_table_keeps_at_most_its_capacity_and_drops_the_oldest() -> None:
    table = Contexts(CONTEXTS, capacity=40)
    for start in range(0, 4000, 10):
        table.learn(list(range(start, start + 10)), 0)
        assert len(table) <= 40
    newest = list(range(3990, 3999))
    assert table.follow(newest) == ({3999: 1}, CONTEXTS[0])
    assert table.follow(list(range(8))) == ({}, 0)
    assert CONTEXTS[0] < 8
