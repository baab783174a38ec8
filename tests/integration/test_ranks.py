"""Ranks as real processes: readiness, messages both ways, immediate detection of deaths, no
leftovers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from listening import beyond_loopback, open_doors
from standstill import standstill

from paceline.errors import DeadlineExceeded, Unavailable
from paceline.local import launch
from paceline.local.child import LIMIT_S
from paceline.local.patience import patient
from paceline.local.user_directory import process_directory
from paceline.ranks.group import RankGroup, RankLost
from paceline.ranks.messages import Doing, Save, Saved
from paceline.ranks.watched import WatchedRanks
from paceline.services.policy_trainer.messages import MESSAGES, Message, Progress, Stepped

BEAT_S = LIMIT_S / 6
IMPORTS = os.pathsep.join([str(Path(__file__).parent), *sys.path])


def _group(tmp_path: Path, world_size: int = 2, **env: str) -> RankGroup:
    return RankGroup("rank_echo", world_size, 1, tmp_path, {"PYTHONPATH": IMPORTS, **env})


pytestmark = pytest.mark.usefixtures("own_forkserver")  # some tests stop the rank


@pytest.fixture
async def ranks(tmp_path: Path) -> AsyncIterator[RankGroup]:
    group = _group(tmp_path)
    await group.start(patient(20.0))
    yield group
    await group.stop(2.0)


async def test_every_rank_answers_a_message_to_all(ranks: RankGroup) -> None:
    ranks.send(b"x" * 2_000_000)
    answers = dict([await ranks.receive(10.0), await ranks.receive(10.0)])
    assert answers == {0: b"x" * 2_000_000, 1: b"x" * 2_000_000}


async def test_a_live_rank_with_many_unread_messages_is_not_lost(ranks: RankGroup) -> None:
    count = 500  # more than the queues of both ends can hold
    os.kill(ranks.pids[0], signal.SIGSTOP)
    for number in range(count):
        ranks.send(b"%d" % number)
    os.kill(ranks.pids[0], signal.SIGCONT)
    answers: dict[int, list[bytes]] = {0: [], 1: []}
    for _ in range(2 * count):
        rank, answer = await ranks.receive(10.0)
        answers[rank].append(answer)
    assert answers[0] == answers[1] == [b"%d" % number for number in range(count)]


STANDS = MESSAGES.encode(Stepped(0, Progress())).decode()


def watching(group: RankGroup, start_deadline_s: float = 0.0) -> WatchedRanks[Message]:
    return WatchedRanks(
        group,
        MESSAGES,
        service="policy_trainer",
        start_deadline_s=start_deadline_s or patient(20.0),
        on_message=lambda message: None,
    )


async def test_a_service_takes_commands_once_it_knows_where_its_ranks_stand(
    tmp_path: Path,
) -> None:
    stand = Stepped(0, Progress(policy_version=2))
    said = [Doing("trains micro-batch 1 of 2"), Doing("trains micro-batch 2 of 2"), stand]
    news = b"\n".join(map(MESSAGES.encode, said)).decode()
    order: list[object] = []

    def started() -> None:
        order.append("start")

    watched = WatchedRanks(
        _group(tmp_path, 1, RANK_ECHO_NEWS=news),
        MESSAGES,
        service="policy_trainer",
        start_deadline_s=patient(20.0),
        on_start=started,
        on_message=order.append,
    )
    watching = asyncio.create_task(watched.supervise())
    await watched.wait_ready(patient(20.0))
    assert order == [stand, "start"]
    watching.cancel()
    await watched.group.stop(2.0)


class Unlucky(RankGroup):
    """Ranks that can start only once."""

    starts = 0

    async def start(self, deadline_s: float) -> None:
        self.starts += 1
        if self.starts > 1:
            raise Unavailable("no memory for a rank")
        await super().start(deadline_s)


async def test_ranks_that_never_start_again_are_given_up_however_long_each_start_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pause(_: launch.RestartPolicy) -> None:
        await asyncio.sleep(0)

    minutes = itertools.count()
    monkeypatch.setattr(launch.RestartPolicy, "pause", pause)
    clock = SimpleNamespace(monotonic=lambda: 60.0 * next(minutes))
    monkeypatch.setattr(launch, "time", clock)
    env = {"PYTHONPATH": IMPORTS, "RANK_ECHO_NEWS": STANDS}
    group = Unlucky("rank_echo", 1, 1, tmp_path, env)
    watched = watching(group)
    supervision = asyncio.create_task(watched.supervise())
    await watched.wait_ready(patient(20.0))
    watched.group.kill()
    with pytest.raises(Unavailable, match="no memory"):
        await asyncio.wait_for(supervision, patient(20.0))
    assert group.starts == 6
    await watched.group.stop(2.0)


async def test_ranks_know_their_places_and_the_file_they_meet_at(ranks: RankGroup) -> None:
    ranks.send(b"environment")
    answers = dict([await ranks.receive(10.0), await ranks.receive(10.0)])
    first, second = json.loads(answers[0]), json.loads(answers[1])
    assert (first["RANK"], second["RANK"], second["LOCAL_RANK"]) == ("0", "1", "1")
    assert first["WORLD_SIZE"] == first["LOCAL_WORLD_SIZE"] == "2"
    assert Path(first["PACELINE_RANK_STORE"]).is_relative_to(process_directory())
    assert first["PACELINE_RANK_STORE"] == second["PACELINE_RANK_STORE"]
    assert first["OMP_NUM_THREADS"] == "1"


@pytest.mark.slow
async def test_ranks_of_two_groups_at_once_keep_apart_and_listen_on_loopback_alone(
    tmp_path: Path,
) -> None:
    before = set(process_directory().iterdir())
    groups = [
        RankGroup("rank_sum", 2, 1, tmp_path / name, {"PYTHONPATH": IMPORTS})
        for name in ("one", "other")
    ]
    async with groups[0], groups[1]:
        await asyncio.gather(*(group.start(patient(60.0)) for group in groups))
        for number, group in enumerate(groups):
            group.send(b"%d" % (10 * number))
        for number, group in enumerate(groups):
            answers = [await group.receive(patient(30.0)) for _ in range(2)]
            assert sorted(answers) == [(rank, b"%.1f" % (20 * number + 1)) for rank in (0, 1)]
        inet, unix = open_doors(psutil.Process(pid) for group in groups for pid in group.pids)
        assert len(inet) >= 4  # each rank listens for the other ranks of its group
        assert beyond_loopback(inet) == []
        assert unix == set()
        assert len(list(process_directory().glob("r-*/store"))) == 2
    assert set(process_directory().iterdir()) == before


@pytest.mark.slow
async def test_polling_an_empty_link_does_not_wait(ranks: RankGroup) -> None:
    ranks.send(b"poll")
    assert {(await ranks.receive(10.0))[1], (await ranks.receive(10.0))[1]} == {b"nothing"}


async def test_a_killed_rank_is_noticed_at_once(ranks: RankGroup) -> None:
    os.kill(ranks.pids[1], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankLost, match=r"rank 1 .*SIGKILL"):
        await ranks.receive(patient(120.0))
    assert time.monotonic() - began < patient(10.0)
    with pytest.raises(RankLost):
        ranks.send(b"x")


@pytest.mark.slow
async def test_a_stopped_rank_is_killed_within_the_limit_and_a_beat_and_named(
    ranks: RankGroup,
) -> None:
    async with standstill() as stood_s:
        os.kill(ranks.pids[1], signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(RankLost, match=r"rank 1 .*killed by SIGKILL, stopped for 3 s"):
            await ranks.receive(patient(30.0))
        # The rank's parent, a separate process, reports its end.
        assert time.monotonic() - began < LIMIT_S + patient(BEAT_S) + LIMIT_S + stood_s()
    await ranks.end_ranks(0.0)
    await ranks.start(patient(20.0))
    ranks.send(b"again")
    assert (await ranks.receive(patient(10.0)))[1] == b"again"


@pytest.mark.slow
async def test_a_rank_stopped_together_with_the_process_that_forked_it_is_replaced(
    ranks: RankGroup,
) -> None:
    forker = psutil.Process(ranks.pids[0]).ppid()
    for pid in (forker, *ranks.pids):
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RankLost, match="stopped for 3 s"):
        await ranks.receive(patient(30.0))
    await asyncio.wait_for(ranks.end_ranks(0.0), patient(10.0))
    await ranks.start(patient(20.0))
    assert psutil.Process(ranks.pids[0]).ppid() != forker


@pytest.mark.slow
async def test_news_of_a_rank_that_is_ready_before_the_others_is_not_lost(tmp_path: Path) -> None:
    async with _group(tmp_path, RANK_ECHO_EARLY=str(tmp_path / "spoken")) as group:
        await group.start(patient(20.0))
        assert await group.receive(patient(10.0)) == (0, b"news")


@pytest.mark.slow
async def test_silence_ends_at_the_deadline(ranks: RankGroup) -> None:
    with pytest.raises(DeadlineExceeded):
        await ranks.receive(0.1)


@pytest.mark.slow
async def test_a_stopped_group_leaves_no_process_and_starts_again(ranks: RankGroup) -> None:
    before = ranks.pids
    await ranks.stop(2.0)
    assert ranks.pids == []
    assert not any(psutil.pid_exists(pid) for pid in before)
    await ranks.start(patient(20.0))
    ranks.send(b"again")
    assert (await ranks.receive(10.0))[1] == b"again"


async def test_a_rank_that_dies_at_its_start_is_quoted(tmp_path: Path) -> None:
    group = _group(tmp_path, 1, RANK_ECHO="dies")
    with pytest.raises(RankLost, match="no device for this rank"):
        await group.start(patient(20.0))
    assert group.pids == []


async def test_a_rank_that_is_never_ready_fails_the_start_and_is_gone(tmp_path: Path) -> None:
    group = _group(tmp_path, 1, RANK_ECHO="silent")
    with pytest.raises(DeadlineExceeded):
        await group.start(0.5)
    assert group.pids == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["reports", "starved"])
async def test_ranks_that_start_for_longer_than_the_deadline_are_awaited_while_they_get_on(
    tmp_path: Path, how: str
) -> None:
    group = _group(tmp_path, 1, RANK_ECHO_SLOW=how, RANK_ECHO_SLOW_S="6", RANK_ECHO_NEWS=STANDS)
    watched = watching(group, start_deadline_s=3.0)
    supervising = asyncio.create_task(watched.supervise())
    seen = set[str]()
    while not watched.ready:
        assert not supervising.done(), supervising.exception()
        seen.add(watched.parts({})[1].doing.partition(",")[0])
        with suppress(Unavailable):
            await watched.wait_ready(0.1)
    assert watched.group.pids
    assert ("loads" in seen) == (how == "reports"), "progress is shown while the ranks start"
    supervising.cancel()
    await watched.group.stop(2.0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stuck", "computes"])
async def test_a_rank_that_makes_no_progress_at_its_start_is_found(
    tmp_path: Path, how: str
) -> None:
    group = _group(tmp_path, 1, RANK_ECHO_SLOW=how, RANK_ECHO_SLOW_S="600")
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await group.start(3.0)
    assert time.monotonic() - began < patient(30.0)
    assert group.pids == []


async def test_a_command_may_take_longer_than_its_deadline_while_ranks_report_progress(
    tmp_path: Path,
) -> None:
    watched = watching(_group(tmp_path, 1, RANK_ECHO_NEWS=STANDS))
    supervising = asyncio.create_task(watched.supervise())
    await watched.wait_ready(patient(20.0))

    async def progress() -> None:
        for number in range(10):
            watched._take(0, MESSAGES.encode(Doing(f"trains micro-batch {number} of 10")))
            await asyncio.wait({supervising}, timeout=0.2)

    reporting, began = asyncio.create_task(progress()), time.monotonic()
    with pytest.raises(DeadlineExceeded, match="the ranks stay silent"):
        async for _ in watched.run(Save(), Saved, 1.0):
            pass
    assert reporting.done()
    assert time.monotonic() - began > 2.5
    supervising.cancel()
    await watched.group.stop(2.0)


def test_ranks_die_with_a_killed_parent(tmp_path: Path) -> None:
    script = (
        "import asyncio, pathlib\n"
        "from paceline.ranks.group import RankGroup\n"
        "async def main():\n"
        f"    group = RankGroup('rank_echo', 1, 1, pathlib.Path({str(tmp_path)!r}))\n"
        f"    await group.start({patient(20.0)})\n"
        "    print(group.pids[0], flush=True)\n"
        "    await group.receive(60.0)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": IMPORTS},
    )
    assert parent.stdout is not None
    rank = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs([rank], timeout=patient(5))
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
