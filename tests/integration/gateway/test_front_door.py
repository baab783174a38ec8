"""Counts the HTTP front end's work for a round of the engine: messages, decoded news, writes.
`paceline bench gateway` measures its time.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from integration.gateway.conftest import serving

from benchmarks.gateway.backends import (
    MODEL,
    ScriptPace,
    engine_settings,
    paces_s,
    texts,
    write_model,
)
from benchmarks.gateway.fronts import gateway
from benchmarks.gateway.load import LoadRun, Order
from paceline.local.patience import patient
from paceline.services.rollout_gateway.workers.placement import Seat
from paceline.services.rollout_gateway.workers.router import Router
from paceline.v1 import engine_pb2 as pb

STREAMS = 16
PACE = ScriptPace(tokens=128, tokens_per_round=4, round_s=0.01)
WRITES_BESIDE_EVENTS = 4
"""Writes of a request: its head, its last event with its end, and the wake-up of the worker's
socket.
"""


def order(port: int, model: str, first_seed: int, tokens: int) -> Order:
    """Orders a streamed chat on each of so many connections at once."""
    return Order(
        port=port,
        model=model,
        texts=texts(PACE),
        paces_s=paces_s(PACE),
        think_s=0.0,
        max_tokens=tokens,
        streams=STREAMS,
        keys=("none",) * STREAMS,
        first_seed=first_seed,
    )


def main_thread_writes(pid: int) -> int:
    """Calls of write and writev so far by the serving thread."""
    lines = Path(f"/proc/{pid}/task/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("syscw:"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the system calls of a thread")
async def test_an_event_of_a_stream_costs_one_system_call(tmp_path: Path) -> None:
    files = write_model(tmp_path, engine_settings(PACE))
    async with asyncio.timeout(patient(60)), gateway(tmp_path, *files, ()) as front:
        await LoadRun(order(front.port, MODEL, 0, PACE.most_tokens)).run()  # imports modules
        before = main_thread_writes(front.pid)
        run = LoadRun(order(front.port, MODEL, STREAMS, PACE.most_tokens))
        said = await run.run()
        writes = main_thread_writes(front.pid) - before
    assert (said["right"], said["wrong"], said["failed"]) == (STREAMS, 0, 0), said["example"]
    assert writes <= run.tally.chunks + WRITES_BESIDE_EVENTS * STREAMS


async def test_a_round_of_the_engine_is_one_message_with_the_news_of_all_requests(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Counter[int]] = []
    routers: list[Router] = []
    rest = Router.deliver_tokens

    def counted(self: Router, seat: Seat, tokens: pb.TokensEmitted, rows: Any) -> None:
        routers[:] = [self]
        told.append(Counter(chunk.request_id for chunk in tokens.chunks))
        rest(self, seat, tokens, rows)

    monkeypatch.setattr(Router, "deliver_tokens", counted)
    script = engine_settings(PACE) | {"max_sequence_tokens": 4096}
    async with serving(model_dir, script) as served:
        port = int(str(served.http.base_url.port))
        run = LoadRun(order(port, model_dir.name, 0, PACE.most_tokens))
        said = await run.run()
        (health,) = (await routers[0].healths()).values()
    assert (said["right"], said["failed"]) == (STREAMS, 0), said["example"]
    assert len(told) <= health.split.rounds
    assert all(max(news.values()) == 1 for news in told)
    assert max(len(news) for news in told) > 1
