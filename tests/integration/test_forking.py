"""Forks of a module that was imported once, as real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.errors import DeadlineExceeded
from paceline.local.child import Child
from paceline.local.forking import FORKSERVER_VARIABLE, Forker
from paceline.local.patience import patient

PLACES = os.pathsep.join([str(Path(__file__).parent), *sys.path])
DEADLINE_S = patient(30)
Make = Callable[..., Forker]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")


@pytest.fixture
async def make(
    tmp_path: Path, own_forkserver: None, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Make]:
    made: list[Forker] = []

    def forker(how: str = "") -> Forker:
        monkeypatch.setenv("STUB_IMPORT", how)
        made.append(Forker(["forked_stub"], tmp_path / "imports.log"))
        return made[-1]

    monkeypatch.setenv("PYTHONPATH", PLACES)
    yield forker
    for each in made:
        await each.close()


async def fork(forker: Forker, log: Path, word: str = "exit") -> Child:
    return await forker.fork("forked_stub", {"WORD": word}, log, DEADLINE_S)


async def ended(forked: Child) -> int:
    return await asyncio.wait_for(forked.wait(), DEADLINE_S)


def facts(log: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
    return found


async def test_forks_share_one_import_and_nothing_else(make: Make, tmp_path: Path) -> None:
    forker, logs = make(), [tmp_path / "0.log", tmp_path / "1.log"]
    forks = await asyncio.gather(*(fork(forker, log) for log in logs))
    assert [await ended(each) for each in forks] == [3, 3]
    assert [each.returncode for each in forks] == [3, 3]
    first, second = (facts(log) for log in logs)
    assert (tmp_path / "imports.log").read_text() == "imported\n"
    assert first["imported_by"] == second["imported_by"] == first["parent"] == second["parent"]
    assert len({first["parent"], os.getpid(), *(each.pid for each in forks)}) == 4
    assert (first["as"], first["argv"], first["word"]) == ("forked_stub", ["forked_stub"], "exit")
    assert (first["input"], first["sigterm"], first["sigchld"]) == ("", True, True)
    assert first["turns"] == "2000"  # waiting threads leave their core to other processes
    assert first["blocked"] == 0
    assert first["drawn"] != second["drawn"]


async def test_an_order_finds_the_imports_that_were_begun_before_it(
    make: Make, tmp_path: Path
) -> None:
    forker = make()
    await forker.begin()
    begun = forker.path
    assert await ended(await fork(forker, tmp_path / "0.log")) == 3
    assert (forker.path, (tmp_path / "imports.log").read_text()) == (begun, "imported\n")


async def test_nothing_is_begun_where_the_run_has_a_forkserver(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    forker = make()
    monkeypatch.setenv(FORKSERVER_VARIABLE, "/of/the/run")
    await forker.begin()
    assert forker.path == ""


async def test_what_a_fork_has_begun_is_done_when_it_ends(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    assert await ended(await fork(make(), log, "late")) == 3
    assert log.read_text().splitlines()[1:] == ["a pool", "a thread", "at exit"]


async def test_a_fork_whose_main_says_nothing_has_ended_well(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    assert await ended(await fork(make(), log, "nothing")) == 0
    assert "Traceback" not in log.read_text()


async def test_a_signal_reaches_a_fork_alone_and_shows_in_its_end(
    make: Make, tmp_path: Path
) -> None:
    forker = make()
    forks = [await fork(forker, tmp_path / f"{n}.log", "wait") for n in range(3)]
    forks[0].kill()
    assert await ended(forks[0]) == -signal.SIGKILL
    os.kill(forks[1].pid, signal.SIGKILL)
    assert await ended(forks[1]) == -signal.SIGKILL
    forks[0].kill()  # the process has ended: no effect
    assert forks[2].returncode is None
    assert psutil.Process(forks[2].pid).is_running()


@pytest.mark.parametrize("how", ["thread", "broken"])
async def test_what_cannot_be_forked_begins_anew(make: Make, tmp_path: Path, how: str) -> None:
    log = tmp_path / "0.log"
    forked = await fork(make(how), log)
    code = await ended(forked)
    if how == "broken":
        assert code == 1
        assert "ValueError: no such device" in log.read_text()
    else:
        assert code == 3
        assert (facts(log)["as"], facts(log)["imported_by"]) == ("__main__", forked.pid)


async def test_forks_end_with_their_parent_and_the_next_has_a_new_one(
    make: Make, tmp_path: Path
) -> None:
    forker = make()
    forked = await fork(forker, tmp_path / "0.log", "wait")
    parent = psutil.Process(forked.pid).parent()
    assert parent is not None
    parent.kill()  # it may cut short the first process's output
    assert await ended(forked) == -signal.SIGKILL
    log = tmp_path / "1.log"
    assert await ended(await fork(forker, log)) == 3
    assert facts(log)["parent"] != parent.pid


async def test_an_import_that_does_not_end_is_waited_for_until_the_deadline(
    make: Make, tmp_path: Path
) -> None:
    with pytest.raises(DeadlineExceeded, match="forked_stub is not imported"):
        await make("slow").fork("forked_stub", {}, tmp_path / "0.log", 0.2)


async def test_it_ends_after_its_last_process_when_it_is_told_to(
    make: Make, tmp_path: Path
) -> None:
    forked = await fork(make(), tmp_path / "0.log", "wait")
    parent = psutil.Process(forked.pid).parent()
    assert parent is not None
    parent.terminate()
    forked.send_signal(signal.SIGTERM)
    assert await ended(forked) == -signal.SIGTERM
    parent.wait(timeout=patient(5))


async def test_a_process_ends_with_whoever_ordered_it(tmp_path: Path, make: Make) -> None:
    """The run's forkserver lives on, and the processes of another forker too."""
    others = make()
    other = await fork(others, tmp_path / "other.log", "wait")
    parent = psutil.Process(other.pid).ppid()
    code = (
        "import asyncio, pathlib, os\n"
        "from paceline.local.forking import Forker\n"
        "async def main():\n"
        f"    log = pathlib.Path({str(tmp_path / 'own.log')!r})\n"
        "    forked = await Forker([], None).fork('forked_stub', {'WORD': 'wait'}, log, 30)\n"
        "    print(forked.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, FORKSERVER_VARIABLE: others.path}
    who = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env=environment, stdout=asyncio.subprocess.PIPE
    )
    assert who.stdout is not None
    ordered = psutil.Process(int(await asyncio.wait_for(who.stdout.readline(), DEADLINE_S)))
    assert ordered.ppid() == parent
    who.kill()
    await who.wait()
    psutil.wait_procs([ordered], timeout=patient(10))
    assert not ordered.is_running()
    assert other.returncode is None


async def test_one_that_is_stopped_is_ended_at_the_deadline_of_an_order_and_the_next_has_a_new_one(
    make: Make, tmp_path: Path
) -> None:
    forker, log = make(), tmp_path / "0.log"
    forked = await fork(forker, log, "wait")
    stopped = psutil.Process(forked.pid).ppid()
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded):
        await forker.fork("forked_stub", {"WORD": "exit"}, log, 0.2)
    assert await ended(forked) == -signal.SIGKILL
    assert await ended(await fork(forker, log)) == 3
    assert facts(log)["parent"] != stopped


async def test_orders_that_miss_their_deadlines_together_say_so(make: Make, tmp_path: Path) -> None:
    forker, log = make(), tmp_path / "0.log"
    forked = await fork(forker, log, "wait")
    os.kill(psutil.Process(forked.pid).ppid(), signal.SIGSTOP)
    orders = [forker.fork("forked_stub", {"WORD": "exit"}, log, 0.2) for _ in range(2)]
    for error in await asyncio.gather(*orders, return_exceptions=True):
        assert isinstance(error, DeadlineExceeded)
    assert await ended(await fork(forker, log)) == 3


async def test_nothing_is_left_when_it_is_closed(make: Make, tmp_path: Path) -> None:
    forker = make()
    forked = await fork(forker, tmp_path / "0.log", "wait")
    processes = [psutil.Process(forked.pid), *psutil.Process(forked.pid).parents()[:1]]
    await forker.close()
    _, alive = psutil.wait_procs(processes, timeout=patient(5))
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
