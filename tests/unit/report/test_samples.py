"""Samples token by token: read from the stream, kept in a file, shown as text that cannot become
markup.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import redis.asyncio
from watched_stream import WatchedStream

from paceline.errors import DataLoss
from paceline.report.html import content
from paceline.report.journal import RunHistory
from paceline.report.samples import (
    SHOWN,
    ShownSample,
    newest_samples,
    read_samples,
    write_samples,
)
from paceline.report.summary import summarize
from paceline.streams import LedgerCount, encode_trajectory, run_key
from paceline.trajectory import BranchKey, DrawSpan, Trajectory, VersionSpan

TOKENIZER = Path(__file__).parents[3] / "examples" / "demo" / "policy_start" / "tokenizer.json"
ARM = "eagle:3_1_4"
SAMPLE = ShownSample(
    "t<1>",
    3,
    4,
    0.5,
    "2+2=",
    (
        ("s0", "-0.01 off", "<b>"),
        ("s3 accepted", f"-3.00 -2.50 {ARM}", "44"),
        ("prompt", "", "tool"),
    ),
    left_out=7,
)


def test_text_of_a_sample_cannot_become_markup(history: RunHistory) -> None:
    summary = summarize("demo", history, LedgerCount(0, 0, {}, 0, 0), {}, {})
    shown = content(summary, history, [SAMPLE]).split(">Samples</h2>")[1]
    assert '<span class="s0" title="-0.01 off">&lt;b&gt;</span>' in shown
    assert '<span class="prompt">tool</span> … 7 more tokens' in shown
    assert "t&lt;1&gt; · step 4 · p4 · reward 0.5" in shown
    assert "<b>" not in shown


def test_samples_come_back_from_their_file_and_a_damaged_one_is_data_loss(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    assert read_samples(path) == []
    write_samples(path, [SAMPLE, SAMPLE])
    assert read_samples(path) == [SAMPLE, SAMPLE]
    path.write_text('{"task_id": 3}\n')
    with pytest.raises(DataLoss):
        read_samples(path)


async def test_the_newest_of_each_task_are_read_and_what_does_not_decode_is_left_out(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    stream = WatchedStream(redis_client, run_key(run_id, "trajectories"))
    rng = random.Random(0)
    for number in range(2 * SHOWN + 4):
        ids = tuple(rng.randrange(3, 20) for _ in range(6))
        one = Trajectory(
            BranchKey(run_id, f"s{number}"),
            number,
            f"task-{number // 2}",
            "g",
            2,
            0,
            number % 2,
            ids,
            (0, 0, 1, 1, 1, 1),
            (0.0, 0.0, -0.5, -1.0, -0.25, -2.0),
            (VersionSpan(2, 6, 3),),
            1.0,
            number,
            1.0,
            draw_spans=(DrawSpan(2, 4, "off", "float32"), DrawSpan(4, 6, ARM, "float32")),
            accepted_drafts=(0, 0, 0, 0, 1, 0),
        )
        header, payload = encode_trajectory(one)
        await stream.append(header, payload if number != 2 * SHOWN + 3 else payload[:-3])
    found = await newest_samples(redis_client, run_id, TOKENIZER)
    assert [one.task_id for one in found] == [f"task-{n}" for n in range(SHOWN + 1, 1, -1)]
    assert found[0].step == 2 * SHOWN + 2  # the newest does not decode
    # Tokens are shaded by log-prob, and accepted drafts are underlined.
    assert [(classes, title) for classes, title, _ in found[0].parts] == [
        ("s1", "-0.50 off"),
        ("s2", "-1.00 off"),
        ("s1 accepted", f"-0.25 {ARM}"),
        ("s2", f"-2.00 {ARM}"),
    ]
    assert found[0].policy_version == 3
    assert await newest_samples(redis_client, run_id, TOKENIZER.with_name("none.json")) == []
    await stream.close()
