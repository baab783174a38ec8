"""Serves scripted responses at a given pace behind the fronts.

The fronts' backends are the scripted engine's files, a worker called without a gateway, and an HTTP
server of the same texts. As a process, the module is that server: OpenAI's streamed chat
completions for a proxy. It reads a ScriptPace as JSON from its arguments, prints its port and ends
when standard input closes. Rounds run as in the scripted engine. One round serves all streams,
lasts `round_s`, and gives every stream its next piece.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import itertools
import json
import random
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
import zmq
from starlette.types import Receive, Scope, Send

from benchmarks.demo_runs import demo_folder
from benchmarks.gateway.load import STREAM_DEADLINE_S, Order, percentile_ms
from examples.scripted_engine.engine import SCRIPTED_PATH
from examples.scripted_engine.script import next_beat
from paceline.errors import DeadlineExceeded, InternalError
from paceline.local.forking import Forker
from paceline.local.patience import patient
from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.services.rollout_gateway.engines import find_engine
from paceline.services.rollout_gateway.engines.worker import WorkerSpec
from paceline.services.rollout_gateway.engines.worker.ring import RowArray
from paceline.services.rollout_gateway.workers.process import WorkerProcess
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

MODEL = "bench-model"
TEXTS = 8
LETTERS = "etaoin shrdlu ETAOIN äöß – 数学"
MAX_BATCH = 1024
MAX_SEQUENCE_TOKENS = 1 << 16
EOS = 1


@dataclass(frozen=True, slots=True)
class ScriptPace:
    """Mean tokens of a response, tokens of a chunk, and seconds of a round. A round gives every
    running request a chunk.
    """

    tokens: int
    tokens_per_round: int
    round_s: float

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest response, end token included."""
        return max(lengths(self)) + 1


def lengths(pace: ScriptPace) -> list[int]:
    """Tokens of each response, from half to one and a half of the mean. Responses of equal length
    would all end in the same round.
    """
    middle = (TEXTS - 1) / 2
    return [
        max(1, round(pace.tokens * (1 + (number - middle) / (TEXTS - 1))))
        for number in range(TEXTS)
    ]


def texts(pace: ScriptPace) -> list[str]:
    """The responses. Each has as many bytes of UTF-8 as `lengths` gives tokens, because the demo's
    tokenizer has one token per byte.
    """
    draw = random.Random(0)
    found = []
    for size in lengths(pace):
        text = "".join(draw.choices(LETTERS, k=size)).encode()[:size].decode(errors="ignore")
        found.append(text + "." * (size - len(text.encode())))
    return found


def paces_s(pace: ScriptPace) -> list[float]:
    """Seconds of all rounds of each response, the round of the end token included."""
    return [pace.round_s * -(-(size + 1) // pace.tokens_per_round) for size in lengths(pace)]


def pieces(text: str, pace: ScriptPace) -> list[str]:
    """Cuts a response into the pieces of the scripted engine; characters with incomplete bytes
    wait.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    raw = text.encode()
    starts = range(0, len(raw), pace.tokens_per_round)
    return [decoder.decode(raw[start : start + pace.tokens_per_round]) for start in starts]


def engine_settings(pace: ScriptPace) -> dict[str, Any]:
    """The scripted engine's settings; rounds take no time at all when round_s is 0."""
    return {
        "replies": [
            {
                "pattern": "^<bos>bench ",
                "texts": texts(pace),
                "tokens_per_round": pace.tokens_per_round,
            }
        ],
        "arms": ["off"],
        "default_cost_s": pace.round_s,
        "costs_s": {},
        "real_time": pace.round_s > 0,
        "max_batch": MAX_BATCH,
        "max_sequence_tokens": MAX_SEQUENCE_TOKENS,
        "eos_token_id": EOS,
    }


def write_model(folder: Path, settings: Mapping[str, Any]) -> tuple[Path, Path]:
    """Writes a model directory that only the scripted engine can serve, and its script.

    Raises NotFound outside a clone.
    """
    model = folder / MODEL
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_folder() / "policy_start" / name, model)
    config = {"model_type": "llama", "hidden_size": 8, "vocab_size": 320, "eos_token_id": EOS}
    (model / "config.json").write_text(json.dumps(config))
    script = folder / "script.json"
    script.write_text(json.dumps(settings))
    return model, script


READY_S = 60.0


class DirectWorker:
    """Closed loops of streamed requests on one worker."""

    def __init__(self, process: WorkerProcess, codec: TextCodec) -> None:
        self._process = process
        self._codec = codec
        self._numbers = itertools.count(1)
        self._live: dict[int, _Stream] = {}

    async def run(self, order: Order) -> Mapping[str, Any]:
        """Runs `order.streams` loops for `order.seconds`; returns latencies in milliseconds.

        Raises InternalError for wrong text, DeadlineExceeded for a stream without an end.
        """
        ended: list[_Stream] = []
        seeds, think = itertools.count(order.first_seed), random.Random(order.first_seed)
        until = time.perf_counter() + order.seconds

        async def loop() -> None:
            while time.perf_counter() < until:
                await asyncio.sleep(think.uniform(0, order.think_s))
                ended.append(await self._one(next(seeds), order))

        await asyncio.gather(*(loop() for _ in range(order.streams)))
        return {
            "first_p50_ms": percentile_ms([one.first_s for one in ended], 50),
            "first_p99_ms": percentile_ms([one.first_s for one in ended], 99),
            "late_p50_ms": percentile_ms([one.late_s for one in ended], 50),
            "late_p99_ms": percentile_ms([one.late_s for one in ended], 99),
        }

    async def _one(self, seed: int, order: Order) -> _Stream:
        stream = _Stream()
        number = next(self._numbers)
        self._live[number] = stream
        request = pb.EngineRequest(
            request_id=number,
            prompt_token_ids=self._codec.encode(f"bench {seed}"),
            sampling=tpb.SamplingParams(temperature=1.0, max_tokens=order.max_tokens, seed=seed),
            stream=True,
        )
        self._process.send(pb.WorkerCommand(enqueue=pb.EnqueueRequests(requests=[request])))
        try:
            async with asyncio.timeout(STREAM_DEADLINE_S):
                await stream.ended
        except TimeoutError as error:
            raise DeadlineExceeded(
                "the engine worker does not end a stream", allowed=f"{STREAM_DEADLINE_S} s"
            ) from error
        finally:
            del self._live[number]

        which = seed % len(order.texts)
        stream.late_s = stream.whole_s - order.paces_s[which]
        if self._codec.decode(stream.token_ids) != order.texts[which]:
            raise InternalError("the engine's text differs from its script", seen=seed)
        return stream

    def on_tokens(self, tokens: pb.TokensEmitted, rows: RowArray | None) -> None:
        """Passes the worker's chunks to their streams."""
        for chunk in tokens.chunks:
            if (stream := self._live.get(chunk.request_id)) is not None:
                stream.take(chunk)


class _Stream:
    """Times and tokens of one request."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.first_s = 0.0
        self.whole_s = 0.0
        self.late_s = 0.0
        self.token_ids: list[int] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, chunk: pb.TokenChunk) -> None:
        self.first_s = self.first_s or time.perf_counter() - self.began
        self.token_ids += chunk.token_ids
        if chunk.finish_reason:
            self.whole_s = time.perf_counter() - self.began
            self.ended.set_result(None)


@asynccontextmanager
async def direct_worker(
    folder: Path, model: Path, settings: Mapping[str, Any]
) -> AsyncIterator[DirectWorker]:
    """Runs a separate worker with the same script as the gateway's."""
    engine = {**settings, "model_dir": str(model)}
    found: list[DirectWorker] = []
    spec = WorkerSpec(worker_index=0, kind=SCRIPTED_PATH, engine=engine)
    forker = Forker(find_engine(spec.kind).forked, None)
    context: zmq.Context[Any] = zmq.Context()
    process = WorkerProcess(
        spec, forker, None, folder, context, lambda tokens, rows: found[0].on_tokens(tokens, rows)
    )
    found.append(DirectWorker(process, TextCodec(model)))
    try:
        await process.start(patient(READY_S))
        yield found[0]
    finally:
        await process.stop()
        await forker.close()
        context.destroy(linger=0)


class Rounds:
    """Wakes all streams together, once a round, while there are any."""

    def __init__(self, round_s: float) -> None:
        self._round_s = round_s
        self._streams = 0
        self._next: asyncio.Future[None] | None = None
        self._ticker: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def joined(self) -> Any:
        """Counts a stream inside the block."""
        self._streams += 1
        if self._ticker is None and self._round_s:
            self._ticker = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            self._streams -= 1

    async def end_of_round(self) -> None:
        """Waits for the end of the next round."""
        if not self._round_s:
            await asyncio.sleep(0)
            return
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next)

    async def _tick(self) -> None:
        beat = 0.0
        while self._streams:
            beat = next_beat(time.perf_counter(), beat, self._round_s)
            await asyncio.sleep(beat - time.perf_counter())
            waiting, self._next = self._next, None
            if waiting is not None:
                waiting.set_result(None)
        self._ticker = None


class Backend:
    """The ASGI application."""

    def __init__(self, pace: ScriptPace) -> None:
        self._rounds = Rounds(pace.round_s)
        self._events = [
            [_event(delta={"content": one}) for one in pieces(text, pace)] for text in texts(pace)
        ]
        self._tokens_per_round = pace.tokens_per_round
        self._lengths = lengths(pace)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = json.loads(await _body(receive) or b"{}")
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        with self._rounds.joined():
            which = int(body.get("seed", 0)) % len(self._events)
            for number, event in enumerate(self._events[which]):
                await self._rounds.end_of_round()
                first = _event(delta={"role": "assistant", "content": ""}) if number == 0 else b""
                await send({"type": "http.response.body", "body": first + event, "more_body": True})
            if (
                self._lengths[which] % self._tokens_per_round == 0
            ):  # the end token has a round of its own
                await self._rounds.end_of_round()

        await send(
            {
                "type": "http.response.body",
                "body": _event(delta={}, finish="stop") + b"data: [DONE]\n\n",
            }
        )


def _event(*, delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    head = {"id": "chatcmpl-bench", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
    return (
        b"data: " + json.dumps({**head, "choices": [choice]}, ensure_ascii=False).encode() + b"\n\n"
    )


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def serve(pace: ScriptPace) -> None:
    """Serves until standard input closes."""
    config = uvicorn.Config(
        Backend(pace), host="127.0.0.1", port=0, log_config=None, access_log=False, lifespan="off"
    )
    server = uvicorn.Server(config)
    listening = config.bind_socket()
    listening.listen(config.backlog)  # a reader of the port may connect at once
    serving = asyncio.create_task(server.serve([listening]))
    sys.stdout.write(json.dumps({"port": listening.getsockname()[1]}) + "\n")
    sys.stdout.flush()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    await reader.read()
    server.should_exit = server.force_exit = True
    await serving


if __name__ == "__main__":
    # the signal may reach the whole process group; closed input ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uvloop.run(serve(ScriptPace(**json.loads(sys.argv[1]))))
