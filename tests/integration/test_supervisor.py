"""The supervisor over real processes: order, health, restarts, clear failures, and no leftovers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from integration.supervised import QUICK, Events, stub_launch
from standstill import standstill

from paceline.errors import DeadlineExceeded, RunFailed, Unavailable
from paceline.local.child import LIMIT_S
from paceline.local.launch import ChildEvent, Launch, RestartPolicy
from paceline.local.patience import patient
from paceline.local.processes import EXIT_CONFIG, EXIT_FULL, EXIT_RUN_FAILED
from paceline.local.supervisor import Supervisor

pytestmark = pytest.mark.slow


def _end_when_healthy(name: str) -> Callable[[ChildEvent], None]:
    """Ends a service each time it is healthy."""

    def hear(event: ChildEvent) -> None:
        if event.name == name and event.kind == "healthy":
            os.kill(event.pid, signal.SIGUSR1)

    return hear


async def test_work_done_before_anyone_looked_counts_as_finished(tmp_path: Path) -> None:
    done = Launch(
        "coordinator", (sys.executable, "-c", ""), stub_launch("x").healthy, ends_run=True
    )
    async with Supervisor([done], tmp_path) as supervisor:
        await supervisor.start(patient(30.0))
        await asyncio.wait_for(supervisor.wait_finished(), patient(20))


def _gone(pids: list[int]) -> bool:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(processes, timeout=patient(5))
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
async def test_services_start_after_what_they_depend_on_and_stop_in_reverse(tmp_path: Path) -> None:
    events = Events()
    launches = [
        stub_launch("first"),
        stub_launch("middle", needs=("first",)),
        stub_launch("last", needs=("middle",)),
    ]
    supervisor = Supervisor(launches, tmp_path, on_event=events.hear)
    await supervisor.start(patient(30.0))
    pids = list(supervisor.pids.values())
    assert list(supervisor.pids) == ["first", "middle", "last"]
    assert [(event.name, event.kind) for event in events] == [
        (name, kind) for name in ("first", "middle", "last") for kind in ("started", "healthy")
    ]
    await supervisor.stop(5.0)
    assert [event.name for event in events if event.kind == "stopped"] == [
        "last",
        "middle",
        "first",
    ]
    assert _gone(pids)
    assert supervisor.pids == {}


async def test_a_killed_service_is_restarted_and_healthy_again(tmp_path: Path) -> None:
    events = Events()
    async with Supervisor(
        [stub_launch("one"), stub_launch("two")], tmp_path, on_event=events.hear, policy=QUICK
    ) as supervisor:
        await supervisor.start(patient(30.0))
        before = supervisor.pids
        os.kill(before["one"], signal.SIGKILL)
        await events.until(lambda heard: heard.kinds("one").count("healthy") == 2)
        assert events.kinds("one") == ["started", "healthy", "died", "restarted", "healthy"]
        assert supervisor.pids["one"] != before["one"]
        assert supervisor.pids["two"] == before["two"]


@pytest.mark.slow
async def test_a_stopped_service_is_killed_and_restarted(tmp_path: Path) -> None:
    events = Events()
    async with Supervisor(
        [stub_launch("one"), stub_launch("two")],
        tmp_path,
        on_event=events.hear,
        policy=QUICK,
    ) as supervisor:
        await supervisor.start(patient(30.0))
        before = supervisor.pids
        async with standstill() as stood_s:
            os.kill(before["one"], signal.SIGSTOP)
            began = time.monotonic()
            await events.until(lambda heard: "died" in heard.kinds("one"))
            took_s = time.monotonic() - began
            assert took_s < LIMIT_S + patient(LIMIT_S / 6) + 1.0 + stood_s()
        (died,) = [event for event in events if event.kind == "died"]
        assert died.detail.startswith("was killed by SIGKILL, stopped for 3 s; log ")
        await events.until(lambda heard: heard.kinds("one").count("healthy") == 2)
        assert supervisor.pids["two"] == before["two"]


@pytest.mark.slow
async def test_a_service_that_dies_too_often_fails_the_run_with_its_log(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    launch = stub_launch("gateway", "--exits", "7", "--starts", str(starts))
    async with Supervisor(
        [launch], tmp_path, on_event=_end_when_healthy("gateway"), policy=QUICK
    ) as supervisor:
        await supervisor.start(patient(30.0))
        with pytest.raises(
            Unavailable, match=r"(?s)gateway exited with status 7, time 3.*the disk is full"
        ) as caught:
            await asyncio.wait_for(supervisor.wait_finished(), patient(60))
        assert str(tmp_path / "logs" / "gateway.log") in str(caught.value)
        assert starts.read_text() == "xxx"


@pytest.mark.slow
async def test_a_service_that_finds_memory_or_disk_full_is_started_again_without_a_limit(
    tmp_path: Path,
) -> None:
    events = Events()
    end = _end_when_healthy("gateway")
    policy = RestartPolicy(tries=1, base_s=0.01, cap_s=0.01)

    def hear(event: ChildEvent) -> None:
        events.hear(event)
        if events.kinds("gateway").count("died") < 3:
            end(event)

    launch = stub_launch("gateway", "--exits", str(EXIT_FULL))
    async with Supervisor([launch], tmp_path, on_event=hear, policy=policy) as supervisor:
        await supervisor.start(patient(30.0))
        await events.until(lambda heard: heard.kinds("gateway").count("healthy") == 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["dies too often", "dies at its start", "never serves", "is elsewhere and away"]
)
async def test_an_optional_service_is_given_up_and_the_others_go_on(
    tmp_path: Path, fault: str
) -> None:
    events = Events()
    arguments = {"dies too often": ("--exits", "7"), "never serves": ("--sick",)}.get(fault, ())
    launch = replace(stub_launch("extra", *arguments), optional=True)
    if fault == "dies at its start":
        launch = replace(launch, command=(sys.executable, "-c", "raise SystemExit('no model')"))
    if fault == "is elsewhere and away":
        launch = replace(launch, command=())
    main = stub_launch("coordinator", needs=("extra",), ends_run=True)

    def hear(event: ChildEvent) -> None:
        _end_when_healthy("extra")(event) if fault == "dies too often" else None
        events.hear(event)

    async with Supervisor(
        [launch, main], tmp_path, on_event=hear, policy=QUICK, health_s=patient(2.0)
    ) as supervisor:
        await supervisor.start(patient(30.0))
        await events.until(lambda heard: "given_up" in heard.kinds("extra"))
        (told,) = (event for event in events if event.kind == "given_up")
        assert "the run goes on without it" in told.detail
        assert "\n" not in told.detail
        assert list(supervisor.pids) == ["coordinator"]
        os.kill(supervisor.pids["coordinator"], signal.SIGUSR1)
        await asyncio.wait_for(supervisor.wait_finished(), patient(20))


async def test_wrong_settings_of_an_optional_service_end_the_start(tmp_path: Path) -> None:
    wrong = (sys.executable, "-c", f"raise SystemExit({EXIT_CONFIG})")
    launch = replace(stub_launch("extra"), command=wrong, optional=True)
    with pytest.raises(Unavailable, match=r"extra exited with status 2 .* at its start"):
        await Supervisor([launch], tmp_path).start(patient(30.0))


async def test_a_death_is_told_with_its_reason_and_its_log(tmp_path: Path) -> None:
    events = Events()
    launch = stub_launch("gateway", "--exits", "7")
    async with Supervisor([launch], tmp_path, on_event=events.hear, policy=QUICK) as supervisor:
        await supervisor.start(patient(30.0))
        os.kill(supervisor.pids["gateway"], signal.SIGUSR1)
        await events.until(lambda heard: "died" in heard.kinds("gateway"))
        log = tmp_path / "logs/gateway.log"
        (died,) = (event for event in events if event.kind == "died")
        assert died.detail == f"exited with status 7: of data; log {log}"


@pytest.mark.slow
async def test_what_a_service_tells_of_its_parts_is_heard_before_and_after_it_serves(
    tmp_path: Path,
) -> None:
    for arguments in (("--part-dies",), ("--part-dies", "--sick")):
        events = Events()
        launch = stub_launch("gateway", *arguments)
        async with Supervisor([launch], tmp_path, on_event=events.hear) as supervisor:
            starting = asyncio.create_task(supervisor.start(patient(30.0)))
            await events.until(lambda heard: "recovered" in heard.kinds("gateway"))
            told = [event for event in events if event.kind in ("impaired", "recovered")]
            assert told[0].detail == "a part [died] its pipe: ''"
            assert told[1].detail == "x" * (4096 - len("recovered \n"))
            assert {event.pid for event in told} == {supervisor.pids["gateway"]}
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)


async def test_a_run_that_failed_ends_at_once_with_its_reason(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    failing = ("--exits", str(EXIT_RUN_FAILED), "--starts", str(starts))
    launch = stub_launch("coordinator", *failing, ends_run=True)
    async with Supervisor(
        [launch], tmp_path, on_event=_end_when_healthy("coordinator"), policy=QUICK
    ) as supervisor:
        await supervisor.start(patient(30.0))
        with pytest.raises(RunFailed) as caught:
            await asyncio.wait_for(supervisor.wait_finished(), patient(60))
        log = tmp_path / "logs/coordinator.log"
        assert str(caught.value) == f"coordinator: the disk is full\nof data; log {log}"
        assert starts.read_text() == "x"


@pytest.mark.slow
async def test_the_run_is_over_when_its_coordinator_exits_with_0(tmp_path: Path) -> None:
    launches = [stub_launch("other"), stub_launch("coordinator", needs=("other",), ends_run=True)]
    async with Supervisor(
        launches, tmp_path, on_event=_end_when_healthy("coordinator")
    ) as supervisor:
        await supervisor.start(patient(30.0))
        await asyncio.wait_for(supervisor.wait_finished(), patient(20))
        assert list(supervisor.pids) == ["other"]


async def test_a_service_that_dies_at_its_start_fails_at_once_and_takes_all_down(
    tmp_path: Path,
) -> None:
    broken = Launch(
        "broken",
        (sys.executable, "-c", "raise SystemExit('no such model')"),
        stub_launch("x").healthy,
    )
    supervisor = Supervisor([stub_launch("good"), broken], tmp_path)
    with pytest.raises(
        Unavailable, match=r"(?s)broken exited with status 1 at its start.*no such model"
    ):
        await supervisor.start(patient(30.0))
    assert supervisor.pids == {}


async def test_a_service_that_never_serves_fails_with_its_name(tmp_path: Path) -> None:
    supervisor = Supervisor([stub_launch("sick", "--sick")], tmp_path, health_s=1.0)
    with pytest.raises(Unavailable, match="sick is not healthy"):
        await supervisor.start(patient(30.0))
    assert supervisor.pids == {}


async def test_the_start_ends_at_its_deadline(tmp_path: Path) -> None:
    supervisor = Supervisor([stub_launch("sick", "--sick")], tmp_path)
    with pytest.raises(DeadlineExceeded, match="sick"):
        await supervisor.start(1.0)
    assert supervisor.pids == {}


async def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    events = Events()
    taken = stub_launch("taken")
    async with Supervisor([taken], tmp_path / "a") as first:
        await first.start(patient(30.0))
        second = Supervisor([stub_launch("other"), taken], tmp_path / "b", on_event=events.hear)
        port = taken.ports[0][0].rpartition(":")[2]
        with pytest.raises(Unavailable, match=rf"port {port} is in use.*addresses\.taken"):
            await second.start(patient(30.0))
    assert events == []


async def test_a_service_that_ignores_sigterm_is_killed_with_what_it_started(
    tmp_path: Path,
) -> None:
    note = tmp_path / "grandchild"
    supervisor = Supervisor([stub_launch("deaf", "--deaf", "--grandchild", str(note))], tmp_path)
    await supervisor.start(patient(30.0))
    pids = [supervisor.pids["deaf"], int(note.read_text())]
    async with standstill() as stood_s:
        began = time.monotonic()
        await supervisor.stop(1.0)
        assert time.monotonic() - began < patient(5) + stood_s()
    assert _gone(pids)


@pytest.mark.slow
async def test_what_a_crashed_service_started_is_gone_before_its_restart(tmp_path: Path) -> None:
    note, events = tmp_path / "grandchild", Events()
    launch = stub_launch("one", "--grandchild", str(note))
    async with Supervisor([launch], tmp_path, on_event=events.hear, policy=QUICK) as supervisor:
        await supervisor.start(patient(30.0))
        orphan = int(note.read_text())
        os.kill(supervisor.pids["one"], signal.SIGKILL)
        await events.until(lambda heard: heard.kinds("one").count("healthy") == 2)
        assert _gone([orphan])


def test_services_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    script = (
        "import asyncio, pathlib, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from integration.supervised import stub_launch\n"
        "from paceline.local.supervisor import Supervisor\n"
        "async def main():\n"
        f"    supervisor = Supervisor([stub_launch('one')], pathlib.Path({str(tmp_path)!r}))\n"
        f"    await supervisor.start({patient(30.0)})\n"
        "    print(supervisor.pids['one'], flush=True)\n"
        "    await supervisor.wait_finished()\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert _gone([pid])
