"""The scripted engine answers by script for every arm, and its costs move the bandit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.scripted_engine.engine import ScriptedEngine, build_scripted
from examples.scripted_engine.script import (
    ScriptedSpec,
    next_beat,
    scripted_response,
    scripted_rows,
)
from paceline.errors import InvalidInput, WeightsError
from paceline.services.rollout_gateway.engines.nouns import Chunk, Finish, PauseMode, Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.services.rollout_gateway.engines.worker.ring import RowRing
from paceline.trajectory import Target, VersionSet, VersionSpan

SCRIPT = ScriptedSpec(script=[{"prompt": [5, 6], "responses": [[10, 11, 12, 13, 14, 1], [20, 1]]}])  # type: ignore[list-item]


def request(
    request_id: int = 1, *, prompt: tuple[int, ...] = (5, 6), seed: int = 0, **options: object
) -> Request:
    sampling = Sampling(
        seed=seed,
        max_tokens=int(options.pop("max_tokens", 64)),
        ignore_eos=bool(options.pop("on", 0)),
    )  # type: ignore[call-overload]
    return Request(request_id, prompt, sampling, **options)  # type: ignore[arg-type]


def run(engine: ScriptedEngine) -> dict[int, Chunk]:
    """Last chunks by request, of requests that do not stream."""
    ended: dict[int, Chunk] = {}
    while engine.has_work:
        ended.update({chunk.request_id: chunk for chunk in engine.step()})
    return ended


@pytest.mark.parametrize("arm", ["off", "eagle:3_1_4", "ngram:4_1_5"])
def test_tokens_do_not_depend_on_the_arm(arm: str) -> None:
    engine = build_scripted(SCRIPT)
    engine.enqueue(request(forced_arm=arm))
    engine.enqueue(request(2, seed=1, forced_arm=arm))
    engine.enqueue(request(3, prompt=(9,), seed=4, forced_arm=arm))
    ended = run(engine)
    assert ended[1].token_ids == (10, 11, 12, 13, 14, 1)
    assert ended[2].token_ids == (20, 1)
    assert ended[3].token_ids == scripted_response(SCRIPT, (9,), 4)
    assert {chunk.finish for chunk in ended.values()} == {Finish.STOP}


@pytest.mark.parametrize(("on", "tokens"), [(False, 6), (True, 20)])
def test_no_request_ends_before_the_file_is_there(tmp_path: Path, on: bool, tokens: int) -> None:
    there = tmp_path / "there"
    engine = build_scripted(SCRIPT.model_copy(update={"ends_with": str(there)}))
    engine.enqueue(request(on=on, max_tokens=20))
    for _ in range(100):
        assert engine.step() == []
    assert tokens - 6 < engine.load.tokens_emitted < tokens
    there.touch()
    assert len(run(engine)[1].token_ids) == tokens


def test_streamed_chunks_join_to_the_whole() -> None:
    engine = build_scripted(SCRIPT)
    engine.enqueue(request(stream=True, forced_arm="eagle:3_1_4"))
    chunks = [chunk for _ in range(10) if engine.has_work for chunk in engine.step()]
    assert len(chunks) > 1
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == (10, 11, 12, 13, 14, 1)
    assert chunks[-1].speculation.drafted_round_tokens == 6


def test_generation_stops_at_the_token_limit_and_goes_on_after_eos_when_asked() -> None:
    engine = build_scripted(SCRIPT)
    engine.enqueue(request(max_tokens=3))
    engine.enqueue(request(2, seed=1, max_tokens=5, on=True))
    ended = run(engine)
    assert (ended[1].token_ids, ended[1].finish) == ((10, 11, 12), Finish.LENGTH)
    assert (ended[2].token_ids, ended[2].finish) == ((20, 1, 20, 1, 20), Finish.LENGTH)


def test_acceptance_length_follows_the_table() -> None:
    spec = SCRIPT.model_copy(
        update={"accept_lengths": {"eagle:3_1_4": 2.5}, "response_tokens": (200, 200)}
    )
    engine = build_scripted(spec)
    engine.enqueue(request(prompt=(8,), max_tokens=100, forced_arm="eagle:3_1_4", on=True))
    assert run(engine)[1].speculation.accept_length == pytest.approx(2.5, abs=0.1)


def pulls(costs: dict[str, dict[int, float]]) -> dict[str, int]:
    spec = SCRIPT.model_copy(
        update={
            "arms": ("off", "eagle:3_1_4"),
            "costs_s": costs,
            "accept_lengths": {"eagle:3_1_4": 2.0},
            "response_tokens": (300, 300),
        }
    )
    engine = build_scripted(spec)
    for index in range(3):
        engine.enqueue(request(index + 1, prompt=(index + 3,), max_tokens=300))
    run(engine)
    return {report.arm: report.pulls for report in engine.load.arms if report.batch_group == 2}


@given(
    st.floats(min_value=0, max_value=1e6),
    st.floats(min_value=1e-4, max_value=1.0),
    st.integers(min_value=0, max_value=9),
)
def test_beats_are_a_round_apart_however_late_the_spender_comes(
    now: float, seconds: float, late: int
) -> None:
    first = next_beat(now, 0.0, seconds)
    assert now - 1e-9 <= first <= now + 1.5 * seconds + 1e-9
    second = next_beat(first + late * seconds / 10, first, seconds)
    assert second - first == pytest.approx(seconds, rel=1e-3)


def test_slowing_an_arm_moves_the_shares() -> None:
    fast = pulls({"off": {1: 1e-3}, "eagle:3_1_4": {1: 1.2e-3}})
    slow = pulls({"off": {1: 1e-3}, "eagle:3_1_4": {1: 5e-3}})
    assert fast["eagle:3_1_4"] > 0.8 * sum(fast.values())
    assert slow["off"] > 0.8 * sum(slow.values())


def test_captured_rows_cover_all_tokens_but_the_last() -> None:
    ring = RowRing.create(capacity=64, row_bytes=16)
    engine = build_scripted(SCRIPT, ring)
    engine.enqueue(request(77, capture=True))
    run(engine)
    rows = ring.read(ring.rows_written)
    tokens = np.array([5, 6, 10, 11, 12, 13, 14], dtype=np.uint32)
    assert rows["position"].tolist() == list(range(7))
    assert rows["token_id"].tolist() == tokens.tolist()
    expected = scripted_rows(tokens, np.arange(7, dtype=np.uint32), 8, "bfloat16")
    assert np.array_equal(rows["hidden"], expected)


def test_a_commit_in_place_changes_the_version_of_later_tokens_only(tmp_path: Path) -> None:
    engine = build_scripted(SCRIPT)
    engine.enqueue(request(forced_arm="off"))
    engine.step()
    engine.step()
    engine.prepare_weights(Target.POLICY, 1, tmp_path)
    assert engine.commit_weights(VersionSet(1, 1, 0), PauseMode.IN_PLACE) == []
    assert run(engine)[1].version_spans == (VersionSpan(0, 2, 0), VersionSpan(2, 6, 1))


def test_a_commit_under_abort_ends_running_requests(tmp_path: Path) -> None:
    engine = build_scripted(SCRIPT)
    engine.enqueue(request(forced_arm="off"))
    engine.step()
    engine.prepare_weights(Target.POLICY, 1, tmp_path)
    (chunk,) = engine.commit_weights(VersionSet(1, 1, 0), PauseMode.ABORT)
    assert (chunk.finish, chunk.token_ids) == (Finish.ABORT, (10,))
    assert not engine.has_work


def test_a_drafter_can_be_rolled_back_but_unknown_versions_cannot_be_committed(
    tmp_path: Path,
) -> None:
    engine = build_scripted(SCRIPT)
    with pytest.raises(WeightsError, match="not prepared"):
        engine.commit_weights(VersionSet(1, 0, 3), PauseMode.IN_PLACE)
    assert engine.versions == VersionSet()
    engine.prepare_weights(Target.DRAFTER, 3, tmp_path)
    engine.commit_weights(VersionSet(1, 0, 3), PauseMode.IN_PLACE)
    engine.commit_weights(VersionSet(2, 0, 0), PauseMode.IN_PLACE)
    assert engine.versions == VersionSet(2, 0, 0)


def test_pause_holds_requests_until_resume() -> None:
    engine = build_scripted(SCRIPT)
    engine.enqueue(request())
    engine.pause(PauseMode.IN_PLACE)
    assert not engine.has_work
    engine.resume()
    assert run(engine)[1].finish is Finish.STOP


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": ()}, "does not fit"),
        ({"prompt": (999,)}, "out of range"),
        ({"forced_arm": "warp:9"}, "unknown arm"),
    ],
)
def test_requests_that_cannot_work_are_refused(bad: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        build_scripted(SCRIPT).enqueue(request(**bad))  # type: ignore[arg-type]
