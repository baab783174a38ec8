"""How many threads an engine computes with where it measures them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import save_random

from paceline.local.processes import usable_cores
from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.embedded.build import (
    build_embedded,
    choose_threads,
    fastest,
)
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.sampling import Sampling


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_random(directory, "llama")
    return directory


@pytest.fixture
def threads_of_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def build(model: Path, threads: int, max_sequence_tokens: int = 100) -> Any:
    return build_embedded(
        EmbeddedSpec(
            model_dir=str(model),
            threads=threads,
            max_batch=4,
            max_sequence_tokens=max_sequence_tokens,
        )
    )


def answer(engine: Engine) -> list[int]:
    engine.enqueue(Request(0, (5, 6, 7), Sampling(seed=3, max_tokens=20, ignore_eos=True)))
    tokens: list[int] = []
    while engine.has_work:
        for chunk in engine.step():
            tokens += chunk.token_ids
    return tokens


@pytest.mark.parametrize(
    ("taken", "chosen"),
    [
        ([[4.0, 2.0, 1.0]], 4),
        ([[4.0, 2.0, 1.9]], 2),
        ([[4.0, 3.8, 3.6]], 1),
        ([[1.0, 1.2, 1.4], [9.0, 5.0, 4.8]], 2),
        ([[4.0, 4.4, 2.0]], 4),
        ([[], [4.0, 2.0, 1.0]], 4),
        ([[], []], 1),
    ],
)
def test_more_threads_are_taken_where_twice_as_many_are_a_tenth_faster(
    taken: list[list[float]], chosen: int
) -> None:
    counts = (1, 2, 4)
    assert counts[fastest(counts, taken)] == chosen


@pytest.mark.slow
@pytest.mark.usefixtures("threads_of_before")
def test_an_engine_that_measures_computes_the_same_tokens_and_keeps_no_request(
    model: Path,
) -> None:
    measured = build(model, threads=0)
    assert 1 <= torch.get_num_threads() <= usable_cores()
    assert not measured.has_work
    assert measured.load.running == 0
    assert answer(measured) == answer(build(model, threads=1))


@pytest.mark.slow
@pytest.mark.usefixtures("threads_of_before")
def test_rounds_that_were_made_to_measure_teach_nothing(model: Path) -> None:
    """Else the bandit and the budget would begin with seconds of other numbers of threads, and
    n-grams would draft from made-up prompts.
    """
    engines = [build(model, threads) for threads in (0, 1)]
    states = [engine._speculation for engine in engines]
    for speculation in states:
        assert (speculation.measuring, speculation.forced) == (False, "")
        assert not speculation.budget.cost.known
        (ngram,) = speculation.drafters.live.values()
        assert len(ngram._table) == 0
        assert not speculation.bandit.reports()


@pytest.mark.usefixtures("threads_of_before")
@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_more_threads_than_cores_are_tried(
    model: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tried = build(model, threads=1), []
    take = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda count: (tried.append(count), take(count)))
    chosen = choose_threads(engine, engine.info.arms, most, 4)
    assert set(tried) == set(range(1, most + 1))
    assert tried[-1] == chosen


@pytest.mark.usefixtures("threads_of_before")
def test_sequences_too_short_to_compare_leave_one_thread(model: Path) -> None:
    engine = build(model, threads=1, max_sequence_tokens=4)
    assert choose_threads(engine, engine.info.arms, 4, 4) == 1
    assert torch.get_num_threads() == 1
