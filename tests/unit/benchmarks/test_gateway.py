"""The gateway bench: texts and pace, the load's reader and counters, the report's comparisons."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from benchmarks.demo_runs import demo_folder
from benchmarks.gateway import run as bench
from benchmarks.gateway.backends import ScriptPace, lengths, paces_s, pieces, texts
from benchmarks.gateway.fronts import LITELLM, OURS, Front, litellm_python
from benchmarks.gateway.load import LoadRun, Order, contents, percentile_ms, unchunked
from benchmarks.gateway.measure import FrontUnderTest, Level, added_ms, goals, work_rows
from benchmarks.gateway.turns import CACHE, NO_CACHE, AnsweredTurn, TurnRun, turn_goals, turn_rows
from benchmarks.processes import child
from paceline.errors import InvalidInput, NotFound

PACE = ScriptPace(tokens=24, tokens_per_round=5, round_s=0.0)
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def order(port: int = 0, **options: Any) -> Order:
    values = {
        "texts": texts(PACE),
        "paces_s": paces_s(PACE),
        "think_s": 0.0,
        "max_tokens": PACE.most_tokens,
    }
    return Order(**{"port": port, "model": "m", "streams": 1, "seconds": 0.05, **values, **options})


def event(text: str) -> bytes:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n".encode()


def chunked(body: bytes, sizes: list[int]) -> bytes:
    """Split a body into chunks with these sizes; the last chunk takes the rest."""
    parts = []
    for size in [*sizes, len(body)]:
        part, body = body[:size], body[size:]
        parts += [b"%x\r\n%b\r\n" % (len(part), part)] if part else []
    return b"".join(parts) + b"0\r\n\r\n"


@given(st.integers(1, 300), st.integers(1, 40))
def test_texts_are_as_many_tokens_as_stated_and_their_pieces_are_those_of_the_rounds(
    tokens: int, size: int
) -> None:
    pace = ScriptPace(tokens, size, 0.01)
    tokenizer = Tokenizer.from_file(str(demo_folder() / "policy_start" / "tokenizer.json"))
    for text, length, seconds in zip(texts(pace), lengths(pace), paces_s(pace), strict=True):
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) == length
        cut = pieces(text, pace)
        assert "".join(cut) == text
        rounds = round(seconds / 0.01)
        assert (
            rounds - 1 <= len(cut) <= rounds
        )  # the end token has a round of its own or shares one
    assert abs(sum(lengths(pace)) / len(lengths(pace)) - tokens) <= 1


@given(
    st.lists(st.text(min_size=1, max_size=9), max_size=8), st.lists(st.integers(1, 60), max_size=6)
)
def test_the_text_of_a_stream_does_not_depend_on_how_it_was_cut(
    said: list[str], sizes: list[int]
) -> None:
    body = b"".join(map(event, said)) + b": a comment\n\ndata: [DONE]\n\n"
    assert unchunked(chunked(body, sizes)) == body
    assert list(contents(chunked(body, sizes))) == said


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(0).exponential(size=200)
    assert percentile_ms(list(values), 99) == pytest.approx(1e3 * np.percentile(values, 99))
    assert percentile_ms([0.5], 99) == 500
    assert percentile_ms([], 50) is None


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[int]:
    """Serve connections with `answer`; yields the port."""
    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:  # its connections need not end: from Python 3.12 on, wait_closed would await them
        listening.close()


async def read_request(reader: asyncio.StreamReader) -> dict[str, Any]:
    head = await reader.readuntil(b"\r\n\r\n")
    size = next(
        int(line.split(b":")[1])
        for line in head.split(b"\r\n")
        if line.startswith(b"content-length")
    )
    return dict(json.loads(await reader.readexactly(size)))


def saying(change: Callable[[list[str]], list[str]], after_s: float = 0.0) -> Answer:
    """Answers requests with the pieces of their text, changed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                seed = (await read_request(reader))["seed"]
                await asyncio.sleep(after_s)
                said = change(pieces(texts(PACE)[seed % len(texts(PACE))], PACE))
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                writer.write(chunked(b"".join(map(event, said)), [7, 40]))
        except asyncio.IncompleteReadError:
            writer.close()

    return answer


@pytest.mark.parametrize(
    ("change", "counted"),
    [
        (lambda said: said, "right"),
        (lambda said: said[:-1], "wrong"),
        (lambda said: [*said, said[-1]], "wrong"),
        (lambda said: [said[1], said[0], *said[2:]], "wrong"),
    ],
    ids=["whole", "lost", "doubled", "swapped"],
)
async def test_lost_and_doubled_tokens_are_counted(
    change: Callable[[list[str]], list[str]], counted: str
) -> None:
    async with server(saying(change)) as port:
        found = await LoadRun(order(port, keys=("a", "b", "c"))).run()
    assert found[counted] == found["requests"] == 3
    assert bool(found["example"]) == (counted == "wrong")


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    writer.write(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(event("x"), [])[:-5]
    )
    writer.close()


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    writer.write(b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull")


@pytest.mark.parametrize(("answer", "example"), [(hang_up, "closed"), (refuse, "429: b'full'")])
async def test_broken_and_refused_streams_are_counted_as_failed(
    answer: Answer, example: str
) -> None:
    async with server(answer) as port:
        found = await LoadRun(order(port, keys=("a",))).run()
    assert (found["failed"], found["requests_per_s"]) == (1, 0)
    assert example in found["example"]


async def test_a_server_that_is_not_there_fails_requests_and_not_the_run() -> None:
    async with server(refuse) as port:
        pass
    found = await LoadRun(order(port, keys=("a", "b"))).run()
    assert found["failed"] == 2
    assert "cannot connect" in found["example"]


async def test_arrivals_keep_their_rate_while_answers_are_slow_and_their_wait_counts() -> None:
    async with server(saying(lambda said: said, after_s=0.2)) as port:
        found = await LoadRun(order(port, rate=100.0, seconds=0.5)).run()
    assert 25 <= found["right"] <= 80  # 50 on average; closed loops would have waited
    assert found["whole_p50_ms"] >= 190


@pytest.mark.slow
async def test_the_backend_and_the_load_are_processes_that_understand_each_other() -> None:
    pace = ScriptPace(24, 5, 0.001)
    words = json.dumps({"tokens": 24, "tokens_per_round": 5, "round_s": 0.001})
    async with child(bench.BACKEND, words) as backend, child(bench.LOAD) as load:
        port = (await backend.answer())["port"]
        wanted = order(port, streams=4, seconds=0.2, paces_s=paces_s(pace))
        found = await load.ask(**{name: getattr(wanted, name) for name in Order.__slots__})
    assert found["right"] == found["requests"] >= 4, found["example"]
    assert found["first_p50_ms"] <= found["whole_p50_ms"]
    assert found["whole_p50_ms"] > 1e3 * min(paces_s(pace)) / 2


def contender(name: str, rates: list[float], late_ms: list[float]) -> FrontUnderTest:
    zero = {"first_p50_ms": 5.0, "first_p99_ms": 5.0, "late_p50_ms": 1.0, "late_p99_ms": 1.0}
    runs = [
        {
            **zero,
            "requests_per_s": rate,
            "late_p99_ms": 1 + late,
            "wrong": 0,
            "failed": 0,
            "right": 9,
            "load_cpu_share": 0.95,
            "cpu_ms_per_request": 2.0,
            "chunks_per_request": 3.0,
        }
        for rate, late in zip(rates, late_ms, strict=True)
    ]
    found = FrontUnderTest(Front(name, 1, 1), lambda order: asyncio.sleep(0, {}))
    found.runs, found.direct_runs = {Level(16): runs}, {Level(16): [zero] * len(runs)}
    return found


def test_goals_are_medians_over_repeats_of_the_worse_of_first_content_and_end() -> None:
    ours, theirs = (
        contender(OURS, [90, 80, 70], [3, 50, 12]),
        contender(LITELLM, [30, 10, 20], [1, 1, 1]),
    )
    assert added_ms(ours, Level(16), "late_p99_ms") == 12
    found = {goal.name: (goal.value, goal.met) for goal in goals([ours, theirs], [Level(16)], None)}
    assert found["minus added p50 at 16 streams, ms, the worse of first content and end"] == (
        0,
        True,
    )
    assert found["minus added p99 at 16 streams, ms, the worse of first content and end"] == (
        -12,
        False,
    )
    assert found["requests/s over LiteLLM's at 16 streams"] == (3.5, True)
    assert work_rows([ours], [Level(16)])[0]["load generator's core"] == "95% saturated"


def turn_run(
    seconds: float, cached: tuple[int, int], first_s: tuple[float, float], last: int = 7
) -> TurnRun:
    """Two dialogues of two turns; the second turns found `cached` of 120 tokens."""
    first = AnsweredTurn(prompt=100, cacheable=0, cached=0, first_s=9.0, tokens=(5, 6))
    later = [
        AnsweredTurn(200, 120, found, at_s, (last,))
        for found, at_s in zip(cached, first_s, strict=True)
    ]
    return TurnRun(seconds, tuple((first, turn) for turn in later))


def test_turns_are_compared_run_by_run_and_dialogues_with_other_tokens_counted() -> None:
    ours = [turn_run(1.0, (120, 0), (0.1, 0.3)), turn_run(2.0, (120, 90), (0.2, 0.2))]
    theirs = [turn_run(2.0, (0, 0), (0.8, 0.8)), turn_run(4.0, (0, 0), (0.4, 0.4), last=8)]
    cached, computed, ratio = turn_rows({CACHE: ours, NO_CACHE: theirs})
    assert (cached["dialogues"], cached["with other tokens"], computed["with other tokens"]) == (
        4,
        0,
        2,
    )
    assert cached["share cached"] == pytest.approx(330 / 1200)
    assert (cached["turns that found all"], computed["turns that found all"]) == (0.5, 0)
    assert cached["first token p50 ms"] == pytest.approx(200)
    assert (cached["tokens/s"], computed["tokens/s"]) == (4.5, 2.25)
    assert ratio["tokens/s"] == pytest.approx(2)
    assert ratio["first token p50 ms"] == pytest.approx((0.25 + 0.5) / 2)
    (goal,) = turn_goals({CACHE: ours, NO_CACHE: theirs})
    assert (goal.value, goal.met) == (pytest.approx(330 / 480), False)


def test_without_turns_there_is_neither_table_nor_goal() -> None:
    assert (turn_rows({}), turn_goals({})) == ([], [])


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    "words",
    [
        ["--streams", "0"],
        ["--streams", "1,x"],
        ["--seconds", "0"],
        ["--repeats", "0"],
        ["--repeats", "many"],
        ["--tokens-per-round", "0"],
        ["--rate", "-1"],
        ["--round-ms", "-1"],
        ["--sessions", "-1"],
        ["--turns", "-1"],
    ],
)
def test_options_of_no_sense_are_refused_by_name(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options(*words)
    assert f"argument {words[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--streams", "5000"],
        ["--turns", "1"],
        ["--turns", "100"],
        ["--dialogues", "0"],
        ["--turn-tokens", "127"],
    ],
)
async def test_options_that_cannot_work_are_refused_by_name(words: list[str]) -> None:
    with pytest.raises(InvalidInput, match=words[0]):
        await bench.plan_of(options(*words))


async def test_levels_come_in_ascending_order_with_the_open_loop_last() -> None:
    plan = await bench.plan_of(options("--streams", "16,1", "--quick"))
    assert plan.levels == (Level(1), Level(16), Level(rate=20.0))
    assert (plan.repeats, plan.sessions, plan.litellm) == (1, 50, None)
    assert plan.turns is not None
    assert (plan.turns.turns, plan.turns.dialogues, plan.turns.repeats) == (6, 2, 1)
    assert (await bench.plan_of(options("--turns", "0", "--quick"))).turns is None


async def test_an_interpreter_without_litellm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="litellm"):
        await litellm_python(tmp_path / "python")
