"""Paths that an audit names pass from the trainer's answer to the gateway, the journal and the
records: a real coordinator between scripted peers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.coordinator_world import (
    Script,
    config_of,
    overrides,
    run_to_end,
    running_peers,
)

from paceline.report.journal import copy_journal, read_history
from paceline.streams import connect
from paceline.v1.engine_pb2 import PAUSE_MODE_IN_PLACE, PAUSE_MODE_RETRACT

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_late_readers")]
ARM = "arm=eagle:3_1_4"


async def test_paths_go_to_the_gateway_at_once_and_before_every_rollout_and_are_recorded(
    redis_url: str, tmp_path: Path
) -> None:
    beyond = {0: ["reused"], 1: [ARM, "reused"]}
    async with running_peers(script := Script(beyond=beyond)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path))
        await run_to_end(config)
    told = list(dict.fromkeys(script.quarantines))
    assert told == [("reused",), ("reused", ARM)]
    # Twice when something was found, and before the two rollouts and two evaluations that
    # followed.
    assert len(script.quarantines) == 2 + 4
    client = connect(redis_url)
    await copy_journal(client, config.run.id, tmp_path / "journal.jsonl")
    await client.aclose()
    history = read_history(tmp_path / "journal.jsonl")
    assert [list(one.quarantined) for one in history.records] == [
        ["reused"],
        ["reused", ARM],
        ["reused", ARM],
    ]
    assert list(history.beyond) == ["reused", ARM]
    assert history.beyond["reused"]["step"] == 0
    assert history.beyond[ARM]["tokens"] == 300
    assert history.gate[0].decision == "promoted"


async def test_a_gateway_that_cannot_do_it_now_is_told_before_the_next_rollout(
    redis_url: str, tmp_path: Path
) -> None:
    script = Script(beyond={0: ["reused"]}, quarantines_failed=1)
    async with running_peers(script) as peers:
        await run_to_end(config_of(overrides(peers, redis_url, tmp_path)))
    assert set(script.quarantines) == {("reused",)}
    assert len(script.commits) == 3


async def test_after_swaps_were_found_inexact_sets_are_committed_with_keys_made_anew(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(beyond={1: ["swapped"]})) as peers:
        await run_to_end(config_of(overrides(peers, redis_url, tmp_path)))
    assert script.modes == [PAUSE_MODE_IN_PLACE, PAUSE_MODE_RETRACT, PAUSE_MODE_RETRACT]
