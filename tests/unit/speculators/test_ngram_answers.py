"""The n-gram speculator proposes continuations from answers to the same prompt, as a search through
all outputs finds them.

Its kept answers are bounded and age.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from drawn_cases import case_count
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.speculators.base import DraftBatch, Drafts, DraftShape, SpeculatorSetup
from paceline.speculators.ngram import NgramSpeculator
from paceline.speculators.ngram_answers import (
    ANSWER_BYTES,
    AnswerStore,
    KeptAnswers,
    prompt_key,
)

CAPACITY = 64
Rows = dict[int, tuple[list[int], list[int]]]
"""Slot -> prompt and answer."""


def fresh(versions: int = 0) -> NgramSpeculator:
    setup = SpeculatorSetup(
        target=None,  # type: ignore[arg-type]
        slots=4,
        capacity=CAPACITY,
        dtype=torch.float32,
        seed=0,
        answer_versions=versions,
    )
    return NgramSpeculator(setup)


def batch_of(rows: Rows, version: int = 0) -> DraftBatch:
    known = torch.zeros(4, CAPACITY, dtype=torch.int64)
    for slot, (prompt, answer) in rows.items():
        known[slot, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
    return DraftBatch(
        list(rows),
        [len(prompt) + len(answer) for prompt, answer in rows.values()],
        known,
        torch.empty(4, CAPACITY, 0),
        prompts=[len(prompt) for prompt, _ in rows.values()],
        policy_version=version,
    )


def say(
    speculator: NgramSpeculator, prompt: list[int], answer: list[int], version: int = 0
) -> None:
    """A whole life of a sequence in slot 3."""
    speculator.ended(batch_of({3: (prompt, answer)}, version))
    speculator.free(3)


def drafts_of(drafts: Drafts, row: int = 0) -> list[tuple[int, float]]:
    return list(zip(drafts.tokens[row].tolist(), drafts.scores[row].tolist(), strict=True))


# ---- the oracle: search all texts anew for each token


@dataclass
class Said:
    """All that was read, in order: of each sequence its prompt, its answer and its version."""

    versions: int
    sequences: list[tuple[list[int], list[int], int]] = field(default_factory=list)

    def occurrences(
        self, context: list[int], texts: Sequence[tuple[list[int], int]]
    ) -> dict[int, int]:
        size, counts = len(context), dict[int, int]()
        for tokens, start in texts:
            for end in range(max(start, size), len(tokens)):
                if tokens[end - size : end] == context:
                    counts[tokens[end]] = counts.get(tokens[end], 0) + 1
        return counts

    def longest(
        self, known: list[int], sizes: Sequence[int], texts: Sequence[tuple[list[int], int]]
    ) -> tuple[dict[int, int], int]:
        for size in sizes:
            if size <= len(known) and (counts := self.occurrences(known[-size:], texts)):
                return counts, size
        return {}, 0

    def next(self, prompt: list[int], known: list[int], version: int) -> tuple[int, float] | None:
        """The likeliest next token and its share."""
        own = [
            ([*asked, *answer], len(asked))
            for asked, answer, drawn in self.sequences
            if asked == prompt and version - drawn <= self.versions
        ]
        every = [([*asked, *answer], 0) for asked, answer, _ in self.sequences]
        counts, size = self.longest(known, (16, 8, 4, 2), own)
        others, length = self.longest(known, (6, 4, 2), every)
        prior = 2 / size if size else 0.0
        if size < 4 and length > size:
            counts, prior = others, 1.0
        if not counts:
            return None
        most = max(counts.values())
        newest = [token for token, count in counts.items() if count == most][-1]
        return newest, most / (sum(counts.values()) + prior)

    def chain(self, steps: int) -> list[tuple[int, float]]:
        """Drafts under the last sequence."""
        prompt, answer, version = self.sequences[-1]
        known, score = [*prompt, *answer], 1.0
        found: list[tuple[int, float]] = []
        while len(found) < steps and (one := self.next(prompt, known, version)) is not None:
            known, score = [*known, one[0]], score * one[1]
            found.append((one[0], score))
        return found + [(-1, 1.0)] * (steps - len(found))


TOKENS = st.integers(0, 2)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=3)
SEQUENCES = st.lists(
    st.tuples(st.integers(0, 1), st.lists(TOKENS, max_size=24), st.integers(0, 2)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=case_count(200), deadline=None)
@given(st.tuples(PROMPTS, PROMPTS), SEQUENCES, st.integers(0, 3))
def test_the_tokens_and_scores_are_those_that_a_search_of_all_answers_finds(
    prompts: tuple[list[int], list[int]],
    sequences: list[tuple[int, list[int], int]],
    versions: int,
) -> None:
    """Each sequence but the last has ended; each is read in two parts, as rounds give them."""
    speculator, said, version = fresh(versions), Said(versions), 0
    for number, answer, later in sequences:
        version += later
        prompt = prompts[number]
        said.sequences.append((prompt, answer, version))
        if said.sequences[1:]:
            say(speculator, *said.sequences[-2])
    prompt, answer, version = said.sequences[-1]
    speculator.catch_up(batch_of({0: (prompt, answer[: len(answer) // 2])}, version))
    drafts = speculator.propose(batch_of({0: (prompt, answer)}, version), DraftShape(3))
    expected = said.chain(3)
    assert drafts.tokens[0].tolist() == [token for token, _ in expected]
    torch.testing.assert_close(drafts.scores[0], torch.tensor([score for _, score in expected]))


# ---- answers that count


def test_an_answer_says_how_its_prompts_next_one_begins_and_a_longer_match_is_surer() -> None:
    """After a whole match of 16 tokens, "something else" has an expected count of 1/8, not of 1."""
    speculator, prompt = fresh(), list(range(20))
    say(speculator, prompt, [31, 32, 33])
    first = drafts_of(speculator.propose(batch_of({0: (prompt, [])}), DraftShape(3)))
    assert [token for token, _ in first] == [31, 32, 33]
    assert [score for _, score in first] == pytest.approx([(8 / 9) ** n for n in (1, 2, 3)])


def test_another_prompts_answers_do_not_come_before_its_own() -> None:
    speculator = fresh()
    for _ in range(3):
        say(speculator, [9, 1, 2, 3, 4, 5, 6], [7])
    say(speculator, [8, 1, 2, 3, 4, 5, 6], [5])
    own = batch_of({0: ([8, 1, 2, 3, 4, 5, 6], [])})
    assert speculator.propose(own, DraftShape(1)).tokens.tolist() == [[5]]
    tree = speculator.propose(own, DraftShape(1, 2, 2))
    assert tree.tokens.tolist() == [[5, -1]], "and beside them neither"


def test_an_unknown_prompt_and_one_that_nobody_names_have_the_table_of_all_sequences() -> None:
    speculator = fresh()
    say(speculator, [1, 2], [3, 4, 5])
    unknown = batch_of({0: ([6, 1, 2], [])})
    assert drafts_of(speculator.propose(unknown, DraftShape(1))) == [(3, 0.5)]
    speculator.free(0)
    nameless = DraftBatch([0], [2], torch.tensor([[1, 2]] * 4), torch.empty(4, 2, 0))
    assert drafts_of(speculator.propose(nameless, DraftShape(1))) == [(3, 0.5)]


def test_siblings_of_one_batch_draft_for_each_other_in_the_round_they_spoke() -> None:
    speculator, prompt = fresh(), [5, 6, 7, 8]
    rows: Rows = {0: (prompt, [1, 2, 3, 4, 9]), 1: (prompt, [1, 2])}
    drafts = speculator.propose(batch_of(rows), DraftShape(3))
    assert drafts.tokens[1].tolist() == [3, 4, 9]
    assert drafts.scores[1, 0].item() == pytest.approx(1 / (1 + 2 / 4))


def test_a_sequence_that_is_read_again_from_its_start_counts_once() -> None:
    speculator, prompt = fresh(), [5, 6, 7, 8]
    rows: Rows = {0: (prompt, [1, 2, 3]), 1: (prompt, [1, 2])}
    before = drafts_of(speculator.propose(batch_of(rows), DraftShape(1)), 1)
    for _ in range(2):
        speculator.free(0)  # retracted
        assert drafts_of(speculator.propose(batch_of(rows), DraftShape(1)), 1) == before
    speculator.free(0)
    alone = drafts_of(speculator.propose(batch_of({1: rows[1]}), DraftShape(1)))
    assert alone == [(3, 0.75)], "the table of all sequences has counted it three times"


def test_a_moved_sequence_stays_among_its_siblings() -> None:
    speculator, prompt = fresh(), [5, 6, 7, 8]
    speculator.catch_up(batch_of({0: (prompt, [1, 2, 3]), 2: (prompt, [1])}))
    speculator.ended(batch_of({0: (prompt, [1, 2, 3])}))
    speculator.move(2, 0, 5)
    speculator.free(2)
    drafts = speculator.propose(batch_of({0: (prompt, [1])}), DraftShape(2))
    assert drafts.tokens.tolist() == [[2, 3]]


def test_flushed_answers_are_forgotten() -> None:
    speculator = fresh()
    say(speculator, [1, 2, 3, 4], [5, 6])
    speculator.flush()
    asked = batch_of({0: ([1, 2, 3, 4], [])})
    assert speculator.propose(asked, DraftShape(1)).tokens.tolist() == [[-1]]


def test_prompts_that_are_not_those_of_the_rows_are_refused() -> None:
    known = torch.tensor([[1, 2]] * 4)
    with pytest.raises(ValueError, match="zip"):
        fresh().catch_up(DraftBatch([0, 1], [2, 2], known, torch.empty(4, 2, 0), prompts=[1]))


# ---- age


def own_count(speculator: NgramSpeculator, prompt: list[int], version: int) -> float:
    """Return the count of the answers' first token, from the score of the only first token."""
    ((_, share),) = drafts_of(
        speculator.propose(batch_of({0: (prompt, [])}, version), DraftShape(1))
    )
    speculator.free(0)
    return round(share * (2 / 4) / (1 - share), 3)


def test_answers_are_forgotten_when_enough_policy_versions_have_passed() -> None:
    speculator, prompt = fresh(versions=2), [1, 2, 3, 4]
    for version in (0, 1, 1, 3):
        say(speculator, prompt, [9], version)
    # Of version 0 none is left at 3, of version 1 none at 4.
    assert [own_count(speculator, prompt, version) for version in (3, 4)] == [3.0, 1.0]
    asked = batch_of({0: (prompt, [])}, 6)
    (draft,) = drafts_of(speculator.propose(asked, DraftShape(1)))
    assert draft == (9, pytest.approx(4 / 5)), "all sequences' table, which does not grow old"


def test_answers_of_a_version_that_was_taken_back_still_count() -> None:
    speculator, prompt = fresh(versions=0), [1, 2, 3, 4]
    say(speculator, prompt, [9], 5)
    assert own_count(speculator, prompt, 4) == 1.0


def test_an_answer_that_ended_under_a_version_taken_back_is_as_old_as_that() -> None:
    speculator, prompt = fresh(versions=0), [1, 2, 3, 4]
    speculator.catch_up(batch_of({2: (prompt, [])}, 5))  # counted from version 5 on
    say(speculator, prompt, [9], 4)
    rows: Rows = {2: (prompt, [])}
    before = drafts_of(speculator.propose(batch_of(rows, 4), DraftShape(1)))
    assert before == [(9, pytest.approx(1 / (1 + 2 / 4)))]
    after = drafts_of(speculator.propose(batch_of(rows, 5), DraftShape(1)))
    assert after == [(9, 0.5)], "the table's"


def test_a_running_sibling_is_counted_anew_with_what_is_left_when_answers_grow_old() -> None:
    speculator, prompt = fresh(versions=0), [1, 2, 3, 4]
    say(speculator, prompt, [9, 9], 0)
    rows: Rows = {0: (prompt, [8, 7]), 1: (prompt, [])}
    before = speculator.propose(batch_of(rows, 0), DraftShape(1, 2, 2))
    assert before.tokens[1].tolist() == [8, 9]
    after = speculator.propose(batch_of(rows, 1), DraftShape(1, 2, 2))
    assert after.tokens[1].tolist() == [8, -1]


# ---- memory


def test_kept_answers_stay_within_their_bytes_and_the_prompts_asked_last_stay() -> None:
    kept = KeptAnswers(0, most_bytes=20 * (ANSWER_BYTES + 4 * 50))
    keys = [prompt_key([number]) for number in range(500)]
    for key in keys:
        kept.keep(key, [1] * 50, 0)
        assert kept.of(keys[0], 0), "asked again each time"
        assert kept.held_bytes <= 20 * (ANSWER_BYTES + 4 * 50)
    assert len(kept) == 20
    assert [bool(kept.of(key, 0)) for key in keys] == [True, *[False] * 480, *[True] * 19]


def test_of_a_prompts_answers_the_newest_are_kept_and_of_one_too_long_its_front() -> None:
    kept, key = KeptAnswers(0, prompt_tokens=10), prompt_key([1])
    for number in range(8):
        kept.keep(key, [number] * 4, 0)
    assert [one.tokens.tolist() for one in kept.of(key, 0)] == [[6] * 4, [7] * 4]
    kept.keep(key, list(range(30)), 0)
    assert [one.tokens.tolist() for one in kept.of(key, 0)] == [list(range(10))]


def store_with(answers: dict[int, list[int]], tokens: int) -> AnswerStore:
    """A store with kept answers for each prompt, with the given lengths; nothing runs."""
    kept = KeptAnswers(0)
    for number, lengths in answers.items():
        for length in lengths:
            kept.keep(prompt_key([number]), [number] * length, 0)
    return AnswerStore(kept, tokens)


def counted(store: AnswerStore, number: int) -> int:
    """Tokens of ended answers that a prompt's counts hold."""
    return store.counted(prompt_key([number]), [number], 1, 0).ended


def test_a_prompt_that_begins_counts_what_those_that_run_leave_it_and_takes_nothing_away() -> None:
    store = store_with({1: [20, 20], 2: [15, 10, 5]}, tokens=60)
    for number in (1, 2):
        store.begin(prompt_key([number]))
        counted(store, number)
    assert [counted(store, 1), counted(store, 2), store.tokens] == [40, 15, 55]


def test_counts_of_a_prompt_end_with_its_last_running_sequence() -> None:
    store = store_with({1: [30], 2: [20]}, tokens=60)
    for number in (1, 2, 2):
        store.begin(prompt_key([number]))
        counted(store, number)
    for number in (1, 2):
        store.end(prompt_key([number]), [], 0)
    assert list(store._counted) == [prompt_key([2])]
    assert store.tokens == 20


def test_a_prompt_that_is_answered_all_the_time_is_counted_anew_when_it_fills_the_room() -> None:
    store, key, ended = store_with({}, tokens=60), prompt_key([1]), []
    store.begin(key)
    for _ in range(7):
        store.begin(key)
        ended.append(counted(store, 1))
        store.end(key, [1] * 20, 0)
        assert store.tokens <= 60
    assert ended == [0, 20, 40, 60, 60, 60, 60]


OPERATIONS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=60)


@settings(max_examples=case_count(60), deadline=None)
@given(OPERATIONS)
def test_what_is_counted_stays_within_its_tokens_whoever_runs(
    operations: list[tuple[int, int]],
) -> None:
    """At most three sequences of a prompt run; a fourth ends the oldest."""
    store = AnswerStore(KeptAnswers(1, prompt_tokens=30), tokens=40)
    running: dict[bytes, list[list[int]]] = {}
    for version, (number, length) in enumerate(operations):
        key, answer = prompt_key([number]), [number] * length
        store.begin(key)
        running.setdefault(key, []).append(answer)
        store.counted(key, [number], 1, version // 8)
        if len(running[key]) > 3 or length % 3 == 0:
            store.end(key, running[key].pop(0), version // 8)
        elif length % 3 == 1:
            running[key].pop(0)
            store.leave(key)
        assert store.tokens == sum(one.ended for one in store._counted.values()) <= 40
        assert all(running[one] for one in store._counted), "counts without a running sequence"
    assert dict(store._running) == {key: len(one) for key, one in running.items() if one}
