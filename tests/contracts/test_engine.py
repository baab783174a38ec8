"""Contract of engines: one suite over every engine that needs no GPU."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from random_models import save_random
from remote_engine import RemoteEngine, WorkerClient

from examples.scripted_engine.engine import build_scripted
from examples.scripted_engine.script import ScriptedSpec
from paceline.errors import FailedPrecondition, InvalidInput, MissingCapability, WeightsError
from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import (
    Capability,
    Chunk,
    Finish,
    PauseMode,
    Request,
)
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.services.rollout_gateway.engines.sglang.spec import SGLangSpec
from paceline.services.rollout_gateway.engines.worker.ring import RowRing
from paceline.trajectory import Target, VersionSet, VersionSpan
from paceline.v1 import engine_pb2 as pb

TOKENIZER = Path(__file__).parents[2] / "examples" / "demo" / "policy_start" / "tokenizer.json"
ROUNDS_AT_MOST = 500


@dataclass
class Rows:
    """A sink that keeps everything."""

    room: int = 1 << 30
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    hidden: list[npt.NDArray[np.uint8]] = field(default_factory=list)

    def write(
        self,
        request_ids: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.uint32],
        token_ids: npt.NDArray[np.uint32],
        policy_version: int,
        hidden: npt.NDArray[np.uint8],
    ) -> int:
        n = min(len(request_ids), self.room - len(self.ids))
        self.ids += request_ids[:n].tolist()
        self.positions += positions[:n].tolist()
        self.token_ids += token_ids[:n].tolist()
        self.versions += [policy_version] * n
        self.hidden += list(hidden[:n])
        return n


@dataclass(frozen=True)
class Case:
    """One engine under test."""

    build: Callable[[RowRing | None], Engine]
    weights: Path  # checkpoint from which a policy version is prepared
    row_bytes: int
    profile: str = ""  # that the engine starts with
    reuses: bool = True  # keys and values of ended requests serve prompts that begin alike


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_random(directory, "llama", sharpness=5.0, vocab_size=320, eos_token_id=1)
    shutil.copy(TOKENIZER, directory)
    return directory


@pytest.fixture(scope="module")
def new_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("weights")
    save_random(directory, "llama", seed=1, sharpness=5.0, vocab_size=320, eos_token_id=1)
    return directory


@pytest.fixture(scope="module")
def sglang(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerClient]:
    """One SGLang for the whole suite: a launch takes a quarter of a minute."""
    spec = SGLangSpec(
        model_dir=str(model_dir),
        drafter="eagle",
        dtype="float32",
        max_sequence_tokens=128,
        max_batch=4,
        device="cpu",
    )
    client = WorkerClient(
        "sglang", spec.model_dump(mode="json"), tmp_path_factory.mktemp("sglang"), 2 * 48
    )
    yield client
    client.close()


@pytest.fixture(scope="module")
def sglang_cuda(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerClient]:
    """The compiled SGLang with memory saver and a CUDA graph set per arm."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    spec = SGLangSpec(
        model_dir=str(model_dir),
        drafter="eagle",
        dtype="float32",
        max_sequence_tokens=128,
        max_batch=4,
        device="cuda",
        memory_saver=True,
    )
    client = WorkerClient(
        "sglang", spec.model_dump(mode="json"), tmp_path_factory.mktemp("cuda"), 2 * 48, 600
    )
    yield client
    client.close()


ENGINES = [
    "embedded",
    pytest.param("embedded_int8_w8a8", marks=pytest.mark.slow),
    pytest.param("embedded_fp8_tensor", marks=pytest.mark.slow),
    "scripted",
    pytest.param("sglang", marks=pytest.mark.sglang),
    pytest.param("sglang_cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=ENGINES)
def case(request: pytest.FixtureRequest, model_dir: Path, new_weights: Path) -> Iterator[Case]:
    if request.param.startswith("sglang"):
        client: WorkerClient = request.getfixturevalue(request.param)
        yield Case(lambda sink: RemoteEngine(client, model_dir, sink), new_weights, 2 * 48)
        return
    if request.param == "scripted":
        spec = ScriptedSpec(
            model_dir=str(TOKENIZER.parent),
            response_tokens=(30, 60),
            max_sequence_tokens=128,
            max_batch=4,
        )
        yield Case(
            lambda sink: build_scripted(spec, sink), new_weights, 2 * spec.hidden_size, reuses=False
        )
        return
    embedded = EmbeddedSpec(
        model_dir=str(model_dir),
        drafter="eagle",
        max_sequence_tokens=128,
        max_batch=4,
        memory_saver=True,
        verify_budget=False,
        prefix_tokens=16,
        profile=request.param.removeprefix("embedded").removeprefix("_"),
    )
    yield Case(lambda sink: EmbeddedEngine(embedded, sink), new_weights, 2 * 48, embedded.profile)


def request(
    number: int, *, stream: bool = False, capture: bool = False, arm: str = "", **sampling: object
) -> Request:
    options = {"seed": 100 + number, "max_tokens": 20, "ignore_eos": True, **sampling}
    prompt = tuple(3 + (number * 7 + i) % 300 for i in range(3 + number % 5))
    return Request(
        number, prompt, Sampling(**options), stream=stream, capture=capture, forced_arm=arm
    )  # type: ignore[arg-type]


def drain(
    engine: Engine, chunks: list[Chunk] | None = None, rounds: int = ROUNDS_AT_MOST
) -> dict[int, list[Chunk]]:
    """Chunks by request until nothing is left to do."""
    collected = list(chunks or [])
    for _ in range(rounds):
        if not engine.has_work:
            break
        collected += engine.step()
    by_request: dict[int, list[Chunk]] = {}
    for chunk in collected:
        by_request.setdefault(chunk.request_id, []).append(chunk)
    return by_request


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def run_all(case: Case, requests: list[Request], arm: str = "") -> dict[int, list[int]]:
    engine = case.build(None)
    engine.force_arm(arm)
    for one in requests:
        engine.enqueue(one)
    return {number: tokens_of(chunks) for number, chunks in drain(engine).items()}


def test_every_request_ends_once_with_aligned_tokens_logprobs_and_spans(case: Case) -> None:
    engine = case.build(None)
    for number in range(9):
        engine.enqueue(request(number, stream=number % 2 == 0, max_tokens=5 + number))
    for number, chunks in drain(engine).items():
        assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish is Finish.LENGTH
        assert len(tokens_of(chunks)) == 5 + number
        at = drawn = 0
        for chunk in chunks:
            assert len(chunk.behavior_logprobs) == len(chunk.token_ids)
            assert all(logprob <= 0 for logprob in chunk.behavior_logprobs)
            for span in chunk.version_spans:
                assert (span.start, span.policy_version) == (at, 0)
                at = span.end
            for way in chunk.draw_spans:
                assert way.start == drawn
                assert way.arm in engine.info.arms
                assert way.number_format
                drawn = way.end
        assert at == drawn == 5 + number
    assert engine.load.running == engine.load.waiting == 0
    assert engine.load.tokens_emitted == sum(5 + number for number in range(9))
    split = engine.load.split
    if split.rounds:  # an engine may record no rounds
        assert split.nodes >= engine.load.speculation.target_steps
        assert split.forward_s > 0
        assert min(split.prefill_s, split.draft_s, split.sample_s, split.keep_s) >= 0
    assert 0 <= engine.info.device_tflops < float("inf")


def test_a_request_not_streamed_is_told_once(case: Case) -> None:
    engine = case.build(None)
    engine.enqueue(request(1))
    engine.enqueue(request(2, stream=True))
    news = drain(engine)
    assert len(news[1]) == 1
    assert len(news[2]) > 1


def test_the_stages_of_a_request_account_for_its_tokens_and_its_time(case: Case) -> None:
    engine = case.build(None)
    before = time.time_ns()
    for number in range(6):  # more than there are slots
        engine.enqueue(request(number, stream=number % 2 == 0))
    news = drain(engine)
    after = time.time_ns()
    for chunks in news.values():
        assert [chunk.stages for chunk in chunks[:-1]] == [()] * (len(chunks) - 1)
        last = chunks[-1]
        by_name: dict[str, list[pb.StageTime]] = {}
        for one in last.stages:
            by_name.setdefault(one.stage, []).append(one)
            assert before <= one.start_ns <= one.end_ns <= after
            assert 0 <= one.busy_s <= (one.end_ns - one.start_ns) / 1e9 + 1e-6
        rounds = by_name["decode"]
        assert len(by_name["prefill"]) == 1
        assert sum(one.tokens for one in rounds) == 20
        assert sum(one.rounds for one in rounds) >= last.speculation.target_steps
        drawn = {way.arm for chunk in chunks for way in chunk.draw_spans}
        assert {(one.arm, one.policy_version) for one in rounds} == {(arm, 0) for arm in drawn}
        whole = max(one.end_ns for one in last.stages) - min(one.start_ns for one in last.stages)
        assert sum(one.busy_s for one in last.stages) == pytest.approx(whole / 1e9, abs=1e-3)


def test_tokens_do_not_depend_on_arm_batch_or_company(case: Case) -> None:
    requests = [request(number) for number in range(7)]
    expected = run_all(case, requests)
    for arm in case.build(None).info.arms:
        assert run_all(case, requests, arm) == expected
    for one in requests[:2]:
        assert run_all(case, [one]) == {one.request_id: expected[one.request_id]}
    mixed = [request(number, arm="off" if number % 2 else "") for number in range(7)]
    assert run_all(case, mixed) == expected


def test_an_end_token_ends_the_response_and_is_part_of_it(case: Case) -> None:
    free = run_all(case, [request(3)])[3]
    end = free[6]
    engine = case.build(None)
    engine.enqueue(request(3, stop_token_ids=(end,)))
    chunks = drain(engine)[3]
    assert chunks[-1].finish is Finish.STOP
    assert tokens_of(chunks) == free[: free.index(end) + 1]


def test_a_stop_string_ends_the_response_at_its_last_token(case: Case) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    free = run_all(case, [request(number) for number in range(4)])
    number, tokens = next((n, t) for n, t in free.items() if len(tokenizer.decode(t[:8])) >= 2)
    stop = tokenizer.decode(tokens[:8])[-2:]
    engine = case.build(None)
    engine.enqueue(request(number, stop=(stop,)))
    chunks = drain(engine)[number]
    assert (chunks[-1].finish, chunks[-1].matched_stop) == (Finish.STOP, stop)
    said = tokens_of(chunks)
    assert said == tokens[: len(said)]
    assert stop in tokenizer.decode(said)
    assert stop not in tokenizer.decode(said[:-1])


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (Request(1, (), Sampling(1, 4)), "prompt"),
        (Request(1, (5,) * 128, Sampling(1, 4)), "127"),
        (Request(1, (5, 320), Sampling(1, 4)), "320"),
        (Request(1, (5,), Sampling(1, 4), forced_arm="eagle:9_9_9"), "eagle:9_9_9"),
    ],
    ids=["empty", "too long", "token out of range", "unknown arm"],
)
def test_a_request_that_cannot_work_is_refused_by_name(
    case: Case, bad: Request, named: str
) -> None:
    engine = case.build(None)
    with pytest.raises(InvalidInput, match=named):
        engine.enqueue(bad)
    assert not engine.has_work


def test_forcing_an_unknown_arm_is_refused(case: Case) -> None:
    with pytest.raises(InvalidInput, match="eagle:9_9_9"):
        case.build(None).force_arm("eagle:9_9_9")


def test_abort_ends_those_named_and_reports_what_they_said(case: Case) -> None:
    engine = case.build(None)
    for number in range(6):  # the last two wait
        engine.enqueue(request(number, max_tokens=40))
    early = engine.step() + engine.step()
    assert not early
    ended = {chunk.request_id: chunk for chunk in engine.abort(frozenset({0, 5, 77}))}
    assert {number: chunk.finish for number, chunk in ended.items()} == {
        0: Finish.ABORT,
        5: Finish.ABORT,
    }
    assert len(ended[0].token_ids) >= 2
    assert ended[5].token_ids == ()
    rest = drain(engine)
    assert {number: len(tokens_of(chunks)) for number, chunks in rest.items()} == dict.fromkeys(
        (1, 2, 3, 4), 40
    )
    assert engine.abort(None) == []


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
def test_a_pause_stops_rounds_and_changes_no_token(case: Case, mode: PauseMode) -> None:
    requests = [request(number) for number in range(6)]
    expected = run_all(case, requests)
    engine = case.build(None)
    for one in requests:
        engine.enqueue(one)
    early = engine.step() + engine.step()
    assert engine.pause(mode) == []
    assert not engine.has_work
    engine.resume()
    assert {n: tokens_of(chunks) for n, chunks in drain(engine, early).items()} == expected


def test_a_pause_that_aborts_ends_all_requests(case: Case) -> None:
    engine = case.build(None)
    for number in range(6):
        engine.enqueue(request(number))
    engine.step()
    assert {chunk.finish for chunk in engine.pause(PauseMode.ABORT)} == {Finish.ABORT}
    engine.resume()
    assert not engine.has_work


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
def test_a_commit_between_rounds_shows_in_the_spans(case: Case, mode: PauseMode) -> None:
    engine = case.build(None)
    engine.enqueue(request(0, max_tokens=40))
    early = engine.step() + engine.step()
    engine.prepare_weights(Target.POLICY, 1, case.weights, case.profile)
    assert engine.versions == VersionSet(0, 0, 0, case.profile)
    before = "" if isinstance(engine, RemoteEngine) else engine.lm_head_hash
    assert engine.commit_weights(VersionSet(1, 1, 0, case.profile), mode) == []
    assert engine.versions == VersionSet(1, 1, 0, case.profile)
    # An engine in another process reports its head by manifest.
    assert isinstance(engine, RemoteEngine) or engine.lm_head_hash != before
    spans = drain(engine, early)[0][-1].version_spans
    cut = spans[0].end
    assert spans == (VersionSpan(0, cut, 0), VersionSpan(cut, 40, 1))
    assert cut >= 2


def test_a_commit_that_aborts_ends_all_requests(case: Case) -> None:
    engine = case.build(None)
    engine.enqueue(request(0))
    engine.step()
    engine.prepare_weights(Target.POLICY, 1, case.weights, case.profile)
    assert [
        chunk.finish
        for chunk in engine.commit_weights(VersionSet(1, 1, 0, case.profile), PauseMode.ABORT)
    ] == [Finish.ABORT]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_was_ended_goes_on_with_the_tokens_that_it_would_have_had(
    case: Case, stream: bool
) -> None:
    count = 40
    whole = [request(number, max_tokens=count, top_logprobs=2) for number in range(6)]
    expected = run_all(case, whole)
    engine = case.build(None)
    for one in whole:
        engine.enqueue(replace(one, stream=stream))
    news = engine.step() + engine.step()
    news += engine.abort(None)
    said: dict[int, list[Chunk]] = {}
    for chunk in news:
        said.setdefault(chunk.request_id, []).append(chunk)
    kept = {number: tuple(tokens_of(chunks)) for number, chunks in said.items()}
    assert max(map(len, kept.values())) >= 2
    # one in a process of its own may have finished some by then
    ended = [one for one in whole if said[one.request_id][-1].finish is Finish.ABORT]
    assert ended
    for one in ended:  # immediately: the last round may still hold ended requests
        engine.enqueue(replace(one, stream=stream, response=kept[one.request_id]))
    for number, chunks in drain(engine).items():
        before = len(kept[number])
        assert [*kept[number], *tokens_of(chunks)] == expected[number]
        assert chunks[-1].finish is Finish.LENGTH
        spans = [span for chunk in chunks for span in chunk.version_spans]
        assert (spans[0].start, spans[-1].end) == (before, count)
        assert sum(span.end - span.start for span in spans) == count - before
        for chunk in chunks:
            assert len(chunk.token_ids) == len(chunk.behavior_logprobs) == len(chunk.top_logprobs)
            assert all(len(alternatives) == 2 for alternatives in chunk.top_logprobs)
    assert engine.load.running == engine.load.waiting == 0


def test_a_commit_that_aborts_lets_requests_go_on_under_the_new_weights(case: Case) -> None:
    engine = case.build(None)
    engine.enqueue(request(0, max_tokens=40))
    early = engine.step() + engine.step()
    engine.prepare_weights(Target.POLICY, 1, case.weights, case.profile)
    (ended,) = early + engine.commit_weights(VersionSet(1, 1, 0, case.profile), PauseMode.ABORT)
    kept = len(ended.token_ids)
    assert ended.finish is Finish.ABORT
    assert ended.version_spans == (VersionSpan(0, kept, 0),)
    engine.enqueue(replace(request(0, max_tokens=40), response=ended.token_ids))
    (chunk,) = drain(engine)[0]
    assert chunk.version_spans == (VersionSpan(kept, 40, 1),)


def test_a_response_goes_on_into_a_stop_string_and_into_its_penalties(case: Case) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    free = run_all(case, [request(number) for number in range(4)])
    number, tokens = next((n, t) for n, t in free.items() if len(tokenizer.decode(t[:8])) >= 2)
    stop = tokenizer.decode(tokens[:8])[-2:]
    stopping = [request(number, stop=(stop,))]
    if Capability.PENALTIES in case.build(None).info.capabilities:
        stopping.append(request(9, max_tokens=30, **PENALTIES[2]))
    for one in stopping:
        expected = run_all(case, [one])[one.request_id]
        engine = case.build(None)
        engine.enqueue(replace(one, response=tuple(expected[: len(expected) - 1])))
        assert tokens_of(drain(engine)[one.request_id]) == expected[-1:]


@pytest.mark.parametrize(
    ("response", "named"), [((5,) * 20, "20"), ((5, 320), "320")], ids=["over", "out of range"]
)
def test_a_response_that_cannot_go_on_is_refused_by_name(
    case: Case, response: tuple[int, ...], named: str
) -> None:
    engine = case.build(None)
    with pytest.raises(InvalidInput, match=named):
        engine.enqueue(replace(request(0), response=response))
    assert not engine.has_work


def test_rows_of_a_request_that_goes_on_leave_for_all_of_its_tokens(case: Case) -> None:
    rows, one = Rows(), request(0, capture=True)
    expected = run_all(case, [request(0)])[0]
    engine = case.build(rows)
    engine.enqueue(replace(one, response=tuple(expected[:9])))
    drain(engine)
    written = sorted(zip(rows.positions, rows.token_ids, strict=True))
    assert written == list(enumerate([*one.prompt, *expected][:-1]))


def test_what_is_not_prepared_is_not_committed(case: Case) -> None:
    engine = case.build(None)
    engine.prepare_weights(Target.POLICY, 1, case.weights, case.profile)
    engine.abort_weights(Target.POLICY, 1)
    engine.abort_weights(Target.POLICY, 9)
    with pytest.raises(WeightsError, match="prepared"):
        engine.commit_weights(VersionSet(1, 1, 0, case.profile), PauseMode.IN_PLACE)
    assert engine.versions == VersionSet(0, 0, 0, case.profile)


def test_rows_leave_once_for_every_token_but_the_last(case: Case) -> None:
    rows = Rows()
    engine = case.build(rows)
    assert Capability.CAPTURE in engine.info.capabilities
    requests = [request(number, capture=number != 2, max_tokens=8 + number) for number in range(6)]
    for one in requests:
        engine.enqueue(one)
    said = {number: tokens_of(chunks) for number, chunks in drain(engine).items()}
    for one in requests:
        mine = [i for i, number in enumerate(rows.ids) if number == one.request_id]
        sequence = [*one.prompt, *said[one.request_id]]
        expected = list(enumerate(sequence[:-1])) if one.capture else []
        assert sorted((rows.positions[i], rows.token_ids[i]) for i in mine) == expected
    assert {len(row) for row in rows.hidden} == {case.row_bytes}
    assert set(rows.versions) == {0}


def test_a_full_sink_never_holds_a_request_up(case: Case) -> None:
    engine = case.build(Rows(room=5))
    engine.enqueue(request(0, capture=True))
    assert len(tokens_of(drain(engine)[0])) == 20


def test_top_logprobs_come_with_every_token(case: Case) -> None:
    engine = case.build(None)
    engine.enqueue(request(0, top_logprobs=3, stream=True))
    for chunk in drain(engine)[0]:
        assert [len(alternatives) for alternatives in chunk.top_logprobs] == [3] * len(
            chunk.token_ids
        )
        for alternatives in chunk.top_logprobs:
            assert [value for _, value in alternatives] == sorted(
                (v for _, v in alternatives), reverse=True
            )


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 1.0},
    {
        "presence_penalty": -2.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 0.9,
        "logit_bias": ((7, 3.0),),
    },
]


def require_penalties(case: Case) -> None:
    if Capability.PENALTIES not in case.build(None).info.capabilities:
        pytest.skip("this engine lacks penalties; that it says so is tested below")


def test_a_strong_bias_forces_a_token_or_forbids_it(case: Case) -> None:
    require_penalties(case)
    free = run_all(case, [request(0)])[0]
    forced = request(0, logit_bias=((9, 100.0),))
    forbidden = replace(
        request(0, logit_bias=tuple((token, -100.0) for token in sorted(set(free)))), request_id=1
    )
    for arm in ("off", "eagle:3_1_4"):
        said = run_all(case, [forced, forbidden, request(2)], arm)
        assert said[0] == [9] * 20
        assert not set(said[1]) & set(free)


def test_penalties_change_tokens_and_speculation_changes_none(case: Case) -> None:
    require_penalties(case)
    kinds: list[dict[str, Any]] = [*PENALTIES, {}, *PENALTIES]
    requests = [request(number, max_tokens=40, **kind) for number, kind in enumerate(kinds)]
    expected = run_all(case, requests, "off")
    plain = run_all(case, [request(number, max_tokens=40) for number in range(len(kinds))], "off")
    assert [number for number in expected if expected[number] == plain[number]] == [kinds.index({})]
    for arm in (*case.build(None).info.arms[1:], ""):
        assert run_all(case, requests, arm) == expected, arm


def test_a_pause_that_rebuilds_the_cache_keeps_what_penalties_have_counted(case: Case) -> None:
    require_penalties(case)
    requests = [request(number, max_tokens=40, **kind) for number, kind in enumerate(PENALTIES)]
    expected = run_all(case, requests)
    engine = case.build(None)
    for one in requests:
        engine.enqueue(one)
    early = engine.step() + engine.step()
    assert engine.pause(PauseMode.RETRACT) == []
    engine.resume()
    assert {n: tokens_of(chunks) for n, chunks in drain(engine, early).items()} == expected


def test_penalties_leave_the_reported_logprobs_those_of_the_model(case: Case) -> None:
    require_penalties(case)
    engine = case.build(None)
    engine.enqueue(request(0, max_tokens=3, top_logprobs=3))
    engine.enqueue(
        replace(request(0, max_tokens=3, top_logprobs=3, logit_bias=((9, 100.0),)), request_id=1)
    )
    free, forced = (chunks[-1] for _, chunks in sorted(drain(engine).items()))
    for (token, value), (same, again) in zip(
        free.top_logprobs[0], forced.top_logprobs[0], strict=True
    ):
        assert (token, pytest.approx(value, abs=1e-4)) == (same, again)
    assert forced.token_ids[0] == 9
    assert forced.behavior_logprobs[0] < -0.01


ALLOWED = (4, 7, 9, 11, 200)


def confined(case: Case) -> list[Request]:
    """Requests that may not end before 12 tokens though they like to, or draw five tokens only."""
    free = run_all(case, [request(number) for number in range(4)], "off")
    stops = {number: tuple(sorted(set(tokens))) for number, tokens in free.items()}
    return [
        request(0, min_tokens=12, stop_token_ids=stops[0]),
        request(1, min_tokens=20, stop_token_ids=stops[1], temperature=0.0),
        request(2, allowed_token_ids=ALLOWED),
        request(3, allowed_token_ids=ALLOWED, min_tokens=5, stop_token_ids=ALLOWED[1:]),
    ]


def test_confined_draws_hold_with_drafts_in_every_position_and_speculation_changes_none(
    case: Case,
) -> None:
    require_penalties(case)
    asked = confined(case)
    expected = run_all(case, [*asked, request(4)], "off")
    for one in asked:
        said, stops = expected[one.request_id], set(one.sampling.stop_token_ids)
        least, allowed = one.sampling.min_tokens, one.sampling.allowed_token_ids
        assert len(said) >= least
        assert not set(said[:least]) & stops
        assert not set(said[least:-1]) & stops
        assert set(said) <= set(allowed or range(320))
    assert len(expected[0]) == 20 or expected[0][-1] in asked[0].sampling.stop_token_ids
    assert expected[3][:5] == [ALLOWED[0]] * 5
    for arm in (*case.build(None).info.arms[1:], ""):
        assert run_all(case, [*asked, request(4)], arm) == expected, arm


def test_confined_requests_go_on_as_they_would_have(case: Case) -> None:
    require_penalties(case)
    asked = confined(case)
    expected = run_all(case, asked)
    engine = case.build(None)
    for one in asked:
        kept = tuple(expected[one.request_id][:3])
        engine.enqueue(replace(one, response=kept))
    for number, chunks in drain(engine).items():
        assert tokens_of(chunks) == expected[number][3:]


def test_a_stop_string_counts_from_min_tokens_on(case: Case) -> None:
    require_penalties(case)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    number, free, stop = next(
        (number, tokens, text)
        for number in range(20)
        for tokens in run_all(case, [request(number, max_tokens=12)]).values()
        if (text := tokenizer.decode(tokens[:1]).strip()) and "\ufffd" not in text
    )
    assert run_all(case, [request(number, stop=(stop,))])[number] == free[:1]
    said = run_all(case, [request(number, max_tokens=12, stop=(stop,), min_tokens=4)])[number]
    assert said[:4] == free[:4]
    assert said == free[: len(said)]
    if len(said) < 12:
        assert stop in tokenizer.decode(said[2:])


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"min_tokens": 21}, "min_tokens is above max_tokens"),
        ({"min_tokens": 5, "allowed_token_ids": (4,), "stop_token_ids": (4,)}, "min_tokens"),
        ({"allowed_token_ids": (320,)}, "allowed_token_ids.*320"),
        ({"stop_token_ids": (320,)}, "stop_token_ids.*320"),
        ({"min_tokens": 3, "json_schema": "{}", "ignore_eos": False}, "min_tokens|json_schema"),
    ],
)
def test_confined_draws_that_cannot_work_are_refused_by_name(
    case: Case, asked: dict[str, Any], named: str
) -> None:
    require_penalties(case)
    engine = case.build(None)
    with pytest.raises((InvalidInput, MissingCapability), match=named):
        engine.enqueue(request(0, **asked))
    assert not engine.has_work


def test_a_prompt_is_scored_or_that_is_refused_by_capability_and_setting(case: Case) -> None:
    engine = case.build(None)
    asked = replace(request(0, max_tokens=0, prompt_logprobs=2), prompt=tuple(range(3, 40)))
    if Capability.PROMPT_LOGPROBS not in engine.info.capabilities:
        with pytest.raises(MissingCapability, match=r"prompt_logprobs; .*engine\.kind"):
            engine.enqueue(asked)
        assert not engine.has_work
        return
    said = replace(request(1, prompt_logprobs=0, stream=True), prompt=asked.prompt)
    for one in (asked, said, replace(request(2), prompt=asked.prompt)):
        engine.enqueue(one)
    found = drain(engine)
    (alone,) = found[0]
    assert (alone.token_ids, alone.finish) == ((), Finish.LENGTH)
    assert len(alone.prompt_scores) == 36
    for score in alone.prompt_scores:
        assert len(score.top.token_ids) == 2
        assert (score.rank == 1) == (score.logprob == score.top.logprobs[0])
        assert score.logprob <= 0 < score.rank
    assert [len(chunk.prompt_scores) for chunk in found[1]] == [36, *[0] * (len(found[1]) - 1)]
    assert [score.logprob for score in found[1][0].prompt_scores] == pytest.approx(
        [score.logprob for score in alone.prompt_scores], abs=1e-4
    )
    assert not any(chunk.prompt_scores for chunk in found[2])
    engine.enqueue(replace(asked, request_id=5))  # scores are computed anew for a cached prompt
    (again,) = drain(engine)[5]
    assert again.prompt_scores == alone.prompt_scores


def test_nothing_is_generated_only_where_the_prompt_is_scored(case: Case) -> None:
    with pytest.raises(InvalidInput, match="max_tokens is out of range"):
        case.build(None).enqueue(request(0, max_tokens=0))


@pytest.mark.parametrize("asked", PENALTIES, ids=["repetition", "frequency", "all"])
def test_penalties_that_an_engine_lacks_are_refused_by_capability_and_setting(
    case: Case, asked: dict[str, Any]
) -> None:
    engine = case.build(None)
    if Capability.PENALTIES in engine.info.capabilities:
        pytest.skip("this engine has them")
    with pytest.raises(
        MissingCapability, match=r"the \w+ engine lacks the capability penalties; .*engine\.kind"
    ):
        engine.enqueue(request(0, **asked))
    assert not engine.has_work


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"logit_bias": ((320, 1.0),)}, "320"),
        ({"logit_bias": ((5, -101.0),)}, "-101"),
    ],
)
def test_penalties_out_of_range_are_refused_by_name(
    case: Case, asked: dict[str, Any], named: str
) -> None:
    require_penalties(case)
    engine = case.build(None)
    with pytest.raises(InvalidInput, match=named):
        engine.enqueue(request(0, **asked))
    assert not engine.has_work


def test_a_json_schema_is_followed_or_refused_by_capability_and_setting(case: Case) -> None:
    from tokenizers import Tokenizer

    engine = case.build(None)
    asked = request(0, json_schema='{"enum": ["ab", 7]}', ignore_eos=False, max_tokens=40)
    if Capability.JSON_SCHEMA not in engine.info.capabilities:
        with pytest.raises(
            MissingCapability,
            match=r"the \w+ engine lacks the capability json_schema; .*engine\.kind",
        ):
            engine.enqueue(asked)
        assert not engine.has_work
        return
    engine.enqueue(asked)
    (chunk,) = drain(engine)[0]
    assert chunk.finish is Finish.STOP
    assert Tokenizer.from_file(str(TOKENIZER)).decode(list(chunk.token_ids)) in ('"ab"', "7")
    for bad in ("nonsense", '{"type": "nothing"}'):
        with pytest.raises(InvalidInput, match="response_format"):
            engine.enqueue(replace(asked, sampling=replace(asked.sampling, json_schema=bad)))
    assert not engine.has_work


STRUCTURED: list[tuple[dict[str, Any], str, dict[str, Any], str]] = [
    # sampling fields, pattern of the text, fields that cannot be followed, field named in the error
    ({"regex": "[0-9]{2}-(ab|c)+"}, "[0-9]{2}-(ab|c)+", {"regex": "(["}, "regex"),
    ({"choice": ("ab", "ac.", "7")}, r"ab|ac\.|7", {"choice": ("a", "")}, "choice"),
    (
        {"grammar": 'start: "<" word ("," word){0,2} ">"\nword: /[a-d]{1,3}/'},
        "<[a-d]{1,3}(,[a-d]{1,3}){0,2}>",
        {"grammar": "start: missing"},
        "grammar",
    ),
    (
        {"grammar": 'root ::= "x" [0-9] | "yy"'},
        "x[0-9]|yy",
        {"grammar": "root ::= ("},
        "grammar",
    ),
    (
        {"tool_grammar": 'start: "<f>" %json {"enum": [1, 22]}'},
        "<f>(1|22)",
        {"tool_grammar": "start: %json {"},
        "tools",
    ),
]


@pytest.mark.parametrize(("demand", "form", "bad", "field"), STRUCTURED)
def test_a_demand_on_the_response_is_followed_whatever_is_drafted_or_refused_by_its_field(
    case: Case, demand: dict[str, Any], form: str, bad: dict[str, Any], field: str
) -> None:
    from tokenizers import Tokenizer

    engine = case.build(None)
    settings = {"ignore_eos": False, "max_tokens": 60}
    asked = [request(number, **settings, **demand) for number in range(4)]
    if Capability.GRAMMARS not in engine.info.capabilities:
        with pytest.raises(
            MissingCapability, match=r"the \w+ engine lacks the capability grammars; .*engine\.kind"
        ):
            engine.enqueue(asked[0])
        assert not engine.has_work
        return
    plain = run_all(case, asked, "off")
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    for tokens in plain.values():
        assert tokens[-1] == 1
        assert re.fullmatch(form, tokenizer.decode(tokens))
    for arm in engine.info.arms:
        assert run_all(case, asked, arm) == plain, arm
    for wrong, named in (
        ({**settings, **bad}, field),
        ({**demand, "ignore_eos": True}, f"{field}.*ignore_eos"),
        ({**settings, **demand, "json_schema": "{}"}, f"{field}.*no other demand"),
    ):
        with pytest.raises(InvalidInput, match=named):
            case.build(None).enqueue(request(9, **wrong))


def test_a_structured_response_goes_on_where_it_was_interrupted(case: Case) -> None:
    engine = case.build(None)
    if Capability.GRAMMARS not in engine.info.capabilities:
        pytest.skip("this engine follows no grammar")
    whole = request(3, ignore_eos=False, max_tokens=60, regex="[0-9]{4}-[a-f]{4}")
    tokens = run_all(case, [whole])[3]
    for said in (1, 4, len(tokens) - 2):
        again = replace(whole, response=tuple(tokens[:said]))
        assert run_all(case, [again], "eagle:3_1_4")[3] == tokens[said:]


def test_speculation_statistics_add_up(case: Case) -> None:
    engine = case.build(None)
    engine.force_arm("eagle:3_1_4")
    engine.enqueue(request(0))
    stats = drain(engine)[0][-1].speculation
    assert stats.drafted_rounds == stats.target_steps
    assert stats.drafted_tokens == 3 * stats.drafted_rounds
    assert stats.drafted_round_tokens in (
        19,
        20,
    )  # some engines draw the first token with the prompt
    assert 1.0 <= stats.accept_length <= 4.0
    assert stats.arm_drafted_rounds == {"eagle:3_1_4": stats.drafted_rounds}
    assert stats.arm_round_tokens == {"eagle:3_1_4": stats.drafted_round_tokens}
    assert stats.proposed_at == (stats.drafted_rounds,) * 3
    assert sum(stats.accepted_at) == stats.accepted_tokens
    assert list(stats.accepted_at) == sorted(stats.accepted_at, reverse=True)


def test_memory_that_an_engine_keeps_is_refused_by_engine_capability_and_setting(
    case: Case,
) -> None:
    engine = case.build(None)
    if Capability.RELEASE_MEMORY in engine.info.capabilities:
        pytest.skip("this engine releases memory")
    with pytest.raises(
        MissingCapability,
        match=r"the \w+ engine lacks the capability release_memory; .*engine\.sglang",
    ):
        engine.release_memory()
    with pytest.raises(MissingCapability):
        engine.resume_memory()


def test_released_memory_refuses_requests_and_comes_back_with_the_same_tokens(case: Case) -> None:
    expected = run_all(case, [request(1), request(2)])
    engine = releasing(case)
    engine.enqueue(request(0))
    with pytest.raises(FailedPrecondition, match="requests run"):
        engine.release_memory()
    drain(engine)
    assert engine.release_memory() > 0
    assert engine.release_memory() == 0  # again
    with pytest.raises(FailedPrecondition, match="released its memory"):
        engine.enqueue(request(1))
    engine.resume_memory()
    engine.resume_memory()  # again
    for number in (1, 2):
        engine.enqueue(request(number))
    assert {n: tokens_of(chunks) for n, chunks in drain(engine).items()} == expected


def test_a_version_committed_while_memory_is_released_serves_after_its_return(case: Case) -> None:
    def tokens_under_new_weights(*, released: bool) -> list[int]:
        engine = releasing(case)
        if released:
            engine.release_memory()
        engine.prepare_weights(Target.POLICY, 1, case.weights, case.profile)
        engine.commit_weights(VersionSet(1, 1, 0, case.profile), PauseMode.RETRACT)
        assert engine.versions == VersionSet(1, 1, 0, case.profile)
        if released:
            engine.resume_memory()
        engine.enqueue(request(1))
        (chunk,) = drain(engine)[1]
        assert chunk.version_spans == (VersionSpan(0, 20, 1),)
        return list(chunk.token_ids)

    assert tokens_under_new_weights(released=True) == tokens_under_new_weights(released=False)


def releasing(case: Case) -> Engine:
    engine = case.build(None)
    if Capability.RELEASE_MEMORY not in engine.info.capabilities:
        pytest.skip("this engine keeps its memory")
    return engine


def test_a_cache_is_flushed_when_nothing_runs_and_changes_no_token(case: Case) -> None:
    expected = run_all(case, [request(1)])
    engine = case.build(None)
    engine.enqueue(request(0, max_tokens=40))
    with pytest.raises(FailedPrecondition, match="requests run"):
        engine.flush_cache()
    drain(engine)
    engine.flush_cache()
    engine.enqueue(request(1))
    assert tokens_of(drain(engine)[1]) == expected[1]


def test_a_second_turn_reuses_its_prefix_and_says_what_it_says_alone(case: Case) -> None:
    prompt = tuple(3 + i * i % 300 for i in range(40))
    engine = case.build(None)
    engine.flush_cache()
    assert engine.load.prefixes == pb.PrefixStats()
    engine.enqueue(Request(0, prompt, Sampling(seed=5, max_tokens=20, ignore_eos=True)))
    said = tokens_of(drain(engine)[0])
    second = Request(1, (*prompt, *said, 7, 8, 9), Sampling(seed=6, max_tokens=20, ignore_eos=True))
    engine.enqueue(second)
    (chunk,) = drain(engine)[1]
    # The last token of a response is never cached, and engines may round down to their blocks.
    assert chunk.cached_prompt_tokens in (
        range(len(prompt), len(prompt) + 20) if case.reuses else range(1)
    )
    prefixes = engine.load.prefixes
    assert prefixes.reused_tokens == chunk.cached_prompt_tokens
    assert not case.reuses or prefixes.prompt_tokens == len(prompt) + len(second.prompt)
    assert prefixes.lookups in ((0, 2) if case.reuses else (0,))  # SGLang counts none
    assert (prefixes.lookup_s > 0) == (prefixes.lookups > 0)
    fresh = case.build(None)
    fresh.flush_cache()
    fresh.enqueue(second)
    assert tokens_of(drain(fresh)[1]) == list(chunk.token_ids)


def test_what_is_in_quarantine_is_gone_without_and_no_token_changes(case: Case) -> None:
    siblings = [replace(request(n), prompt=tuple(range(40, 70))) for n in range(1, 4)]
    arm = next(arm for arm in case.build(None).info.arms if arm != "off")
    siblings = [replace(one, forced_arm=arm) for one in siblings]
    engine = case.build(None)
    for one in siblings:
        engine.enqueue(one)
    before = drain(engine)
    drawn = [way for chunks in before.values() for one in chunks for way in one.draw_spans]
    assert {way.arm for way in drawn} - {"off"} == {arm}
    assert any(way.reused for way in drawn) == case.reuses

    engine = case.build(None)
    engine.quarantine(pb.Quarantine(arms=(arm, "no such arm"), reuse=True))
    for one in siblings:
        engine.enqueue(one)
    after = drain(engine)
    drawn = [way for chunks in after.values() for one in chunks for way in one.draw_spans]
    assert {(way.arm, way.reused) for way in drawn} == {("off", False)}
    assert {n: tokens_of(chunks) for n, chunks in after.items()} == {
        n: tokens_of(chunks) for n, chunks in before.items()
    }
    engine.quarantine(pb.Quarantine())  # an engine outlives a test


def test_an_engine_changes_to_a_profile_with_a_set_or_says_that_it_cannot(case: Case) -> None:
    engine = case.build(None)
    if Capability.PROFILES not in engine.info.capabilities:
        with pytest.raises(MissingCapability, match="profiles"):
            engine.prepare_weights(Target.POLICY, 1, case.weights, "fp8_channel")
        assert engine.versions == VersionSet()
        return
    with pytest.raises(InvalidInput, match="no such profile; seen: int4"):
        engine.prepare_weights(Target.POLICY, 1, case.weights, "int4")
    engine.prepare_weights(Target.POLICY, 1, case.weights, "fp8_channel")
    with pytest.raises(WeightsError, match="not prepared; seen: 1;"):
        engine.commit_weights(VersionSet(1, 1, 0), PauseMode.IN_PLACE)
    rounded = VersionSet(1, 1, 0, "fp8_channel")
    engine.commit_weights(rounded, PauseMode.IN_PLACE)
    assert engine.versions == rounded
    engine.enqueue(request(1))
    assert tokens_of(drain(engine)[1])
    engine.prepare_weights(Target.POLICY, 1, case.weights)
    engine.commit_weights(VersionSet(2, 1, 0), PauseMode.IN_PLACE)
    assert engine.versions == VersionSet(2, 1, 0)


def test_a_token_that_was_an_accepted_draft_is_marked_and_all_of_them_are_counted(
    case: Case,
) -> None:
    arm = next(arm for arm in case.build(None).info.arms if arm != "off")
    engine = case.build(None)
    for number in range(4):
        engine.enqueue(request(number, arm=arm if number % 2 else "off", stream=number > 1))
    for number, chunks in drain(engine).items():
        marks = [mark for chunk in chunks for mark in chunk.accepted_drafts]
        assert len(marks) == len(tokens_of(chunks))
        stats = chunks[-1].speculation
        # The last round may have been cut at the limit of tokens.
        assert stats.accepted_tokens <= sum(marks) <= stats.accepted_tokens + 1
        if number % 2 == 0 and len(chunks[-1].draw_spans) == 1:
            assert chunks[-1].draw_spans[0].arm != "off" or not any(marks)
