"""An operator has the policy of a run trained on another number of ranks, against peers from
scripts.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from integration.coordinator_world import (
    WAIT_S,
    Script,
    check_slots,
    config_of,
    held,
    journal_of,
    overrides,
    run_to_end,
    running_peers,
    status_of,
)
from integration.test_pause import Work, asked, told

from paceline.cli.ranks import set_ranks
from paceline.errors import FailedPrecondition, InvalidInput
from paceline.rpc import rpc_errors
from paceline.services.coordinator.server import serve
from paceline.v1 import coordinator_pb2 as pb

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("no_late_readers")]
ALONE = {"drafter_enabled": False}


def on_ranks(count: int) -> Work:
    return lambda coordinator, console: set_ranks(coordinator, count, console)


async def test_ranks_change_with_the_next_step_that_trains_and_stay_for_those_after_it(
    redis_url: str, tmp_path: Path
) -> None:
    script = Script(hold_step=1, bubbles=False)
    async with running_peers(script) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, **ALONE))
        run = await held(script, config)  # step 1 is rolled out, step 0 is trained
        waiting = asyncio.Event()
        changing = asyncio.create_task(told(config, on_ranks(1), waiting))
        await asyncio.wait_for(waiting.wait(), WAIT_S)
        assert "ranks of the policy from the next step on that trains: 1" in await status_of(config)
        script.released.set()
        status, lines = await changing
        await run
    assert (status, lines[0]) == (0, "1 rank to train from step 1 on")
    assert lines[-1] == "the policy has 1 rank"
    assert script.ranks_by_step == {0: [2], 1: [1], 2: [1]}
    assert script.trained == [0, 1, 2]
    check_slots(await journal_of(config))


async def test_ranks_that_do_not_come_up_are_told_of_and_those_of_before_train(
    redis_url: str, tmp_path: Path
) -> None:
    script = Script(hold_step=1, bubbles=False, ranks=1, most_ranks=1)
    async with running_peers(script) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, **ALONE))
        run = await held(script, config)
        waiting = asyncio.Event()
        changing = asyncio.create_task(told(config, on_ranks(2), waiting))
        await asyncio.wait_for(waiting.wait(), WAIT_S)
        script.released.set()
        status, lines = await changing
        await run
    assert status == 1
    assert lines[-1].startswith("the policy keeps its 1 rank: rank 1 ended with exit status 1")
    assert script.ranks_by_step == {0: [1], 1: [1], 2: [1]}
    names = [one["event"] for one in await journal_of(config)]
    assert (names.count("RanksKept"), names.count("RanksChanged")) == (1, 0)


async def test_a_change_that_a_coordinator_was_asked_for_is_made_by_the_next_one(
    redis_url: str, tmp_path: Path
) -> None:
    script = Script(hold_step=1, bubbles=False)
    async with running_peers(script) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, **ALONE))
        stop = asyncio.Event()
        first = asyncio.create_task(serve(config, stop))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        await asked(config, "RequestRanks", pb.RequestRanksRequest(ranks=1))
        stop.set()
        await first
        script.released.set()
        await run_to_end(config)
    assert script.ranks_by_step == {0: [2], 1: [1], 2: [1]}


async def test_a_step_whose_ranks_are_lost_is_trained_again_by_the_new_ones(
    redis_url: str, tmp_path: Path
) -> None:
    script = Script(hold_step=1, bubbles=False)
    async with running_peers(script) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, **ALONE))
        run = await held(script, config)
        await asked(config, "RequestRanks", pb.RequestRanksRequest(ranks=1))
        script.policy_ranks_lost = 1
        script.released.set()
        await run
    assert script.ranks_by_step == {0: [2], 1: [1, 1], 2: [1]}
    assert script.trained == [0, 1, 2]


async def test_what_cannot_be_is_refused_with_what_may_be(redis_url: str, tmp_path: Path) -> None:
    script = Script(hold_step=1, bubbles=False)

    async def refused(ranks: int, kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=message), rpc_errors():
            await asked(config, "RequestRanks", pb.RequestRanksRequest(ranks=ranks))

    async with running_peers(script) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=2, **ALONE))
        run = await held(script, config)
        await refused(0, InvalidInput, "seen: 0; allowed: 1 to 2")
        await refused(
            3, FailedPrecondition, r"seen: 3 ranks; allowed: 1 to 2; gateway\.engine\.most_workers"
        )
        await asked(config, "RequestRanks", pb.RequestRanksRequest(ranks=1))
        await refused(2, FailedPrecondition, "under way; seen: to 1 from step 1 on")
        script.released.set()
        await run
    assert script.ranks_by_step == {0: [2], 1: [1]}
