"""Starves whole runs of the demo: `python -m benchmarks.chaos.starve --seeds 20`.

Each seed makes two runs of the same settings. The first run is undisturbed. In the second run every
process has the lowest priority and is stopped again and again, and busy processes share the cores.
The starved run has to end with status 0 and to train the same tokens with the same rewards. No
process of it may die, no log may hold an error, no holder may work on a slot of another.

A seed that met its goals stays in the file of results; the next command passes over it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.remains import read_log
from benchmarks.chaos.verdict import judge_samples, unequal
from benchmarks.demo_runs import DemoPlan, demo_folder, words
from benchmarks.options import above_zero, not_negative
from benchmarks.processes import marked
from benchmarks.result import Goal, machine
from benchmarks.trespasses import read_trespasses
from paceline.local.patience import VARIABLE
from paceline.local.processes import child_environment, usable_cores

STEPS, PROMPTS, SAMPLES = 4, 8, 16
STOPPED_S, BETWEEN_S = (0.1, 3.0), (0.5, 15.0)
_DRAFTER = demo_folder() / "drafter_trained"  # of another policy, so that candidates are promoted
_SETTINGS = (
    f"gateway.drafter={_DRAFTER}",
    f"drafter_trainer.drafter={_DRAFTER}",
    "drafter_trainer.gate.interval_steps=4",
    "drafter_trainer.gate.samples=4",
    "drafter_trainer.gate.min_positions=50",
    f"coordinator.prompts_per_step={PROMPTS}",
    f"coordinator.samples_per_task={SAMPLES}",
    "coordinator.evaluation.every=2",
    "coordinator.evaluation.heldout_prompts=64",
    "coordinator.evaluation.probe_every=2",
    "coordinator.evaluation.probe_prompts=16",
    "policy_trainer.checkpoint_interval_steps=1",
)
_MARK = "PACELINE_STARVED_RUN"
_LIMIT_S, _END_S, _LOOK_S = 1200.0, 60.0, 0.2
_ALARM = r"(?!.*(does not answer|no progress))"  # a server or a step is late, no process has died
_DEATH = re.compile(rf"^\w+ (died|given_up|impaired)\b{_ALARM}.*$", re.MULTILINE)
_ERROR = re.compile(r"^.*(\[(error|critical) *\]|Traceback \(most recent).*$", re.MULTILINE)
_DIES = "from paceline.local.processes import die_with_parent\ndie_with_parent()\n"
_BUSY = """
import random, sys, time
draw = random.Random(sys.argv[1])
while True:
    end_s = time.monotonic() + draw.uniform(0.1, 3.0)
    while time.monotonic() < end_s:
        pass
    time.sleep(draw.uniform(0.1, 3.0))
"""


@dataclass
class Starved:
    """One starved run beside its undisturbed run."""

    seed: int
    status: int = -1
    undisturbed_s: float = 0.0
    starved_s: float = 0.0
    stops: dict[str, int] = field(default_factory=dict)  # by process
    longest_stop_s: float = 0.0
    wrong: dict[str, list[str]] = field(default_factory=dict)  # goal -> findings in words
    parts: dict[str, int] = field(default_factory=dict)  # how often each part of a run took place

    @property
    def met(self) -> bool:
        """Whether nothing is wrong and every part of a run took place."""
        return not self.status and not any(self.wrong.values()) and all(self.parts.values())


class Stopper:
    """Stops each process of a run again and again."""

    def __init__(self, seed: int, run: str) -> None:
        self._seed, self._run = seed, run
        self.stops: dict[int, list[float]] = {}  # process -> seconds of each stop
        self.names: dict[int, str] = {}

    async def stop_all(self) -> None:
        """Stops processes without end. A cancelled call leaves no process stopped."""
        async with asyncio.TaskGroup() as group:
            while True:
                for process in marked(_MARK, self._run):
                    if process.pid not in self.stops:
                        self.stops[process.pid] = []
                        group.create_task(self._stop_again(process, len(self.stops)))
                await asyncio.sleep(_LOOK_S)

    async def _stop_again(self, process: psutil.Process, number: int) -> None:
        draw, pid = random.Random(f"{self._seed} {number}"), process.pid
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            handle = os.pidfd_open(pid)
            try:
                _lower_session(pid)
                while True:
                    await asyncio.sleep(draw.uniform(*BETWEEN_S))
                    self.names[pid] = " ".join([*process.cmdline()[:3], str(pid)])
                    await self._stop(handle, draw.uniform(*STOPPED_S), self.stops[pid])
            finally:
                os.close(handle)

    async def _stop(self, handle: int, seconds: float, stops: list[float]) -> None:
        signal.pidfd_send_signal(handle, signal.SIGSTOP)
        began_s = time.monotonic()
        try:
            await asyncio.sleep(seconds)
        finally:
            signal.pidfd_send_signal(handle, signal.SIGCONT)
            stops.append(time.monotonic() - began_s)


def _lower_session(pid: int) -> None:
    """A kernel that groups sessions ignores the priority of a process outside its group."""
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("19")


async def _make(plan: DemoPlan, *within: str) -> tuple[int, list[str]]:
    """Makes a run; returns its status and the command lines of processes that outlived it."""
    plan.out.mkdir()
    environment = {**os.environ, _MARK: str(plan.out)}
    for variable in ("REDIS_URL", VARIABLE):
        environment.pop(variable, None)
    with (plan.out / "console.log").open("wb") as console:
        process = await asyncio.create_subprocess_exec(
            *(*within, *await plan.command()),
            stdout=console,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LIMIT_S):
                await process.wait()
    finally:
        ended = process.returncode
        left = await end_run(process, _MARK, str(plan.out))
    return -signal.SIGALRM if ended is None else ended, left


async def end_run(process: asyncio.subprocess.Process, variable: str, value: str) -> list[str]:
    """Ends a run and each process that has inherited this value of a variable; returns the
    processes that outlived the run.
    """
    if process.returncode is None:
        process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await process.wait()
    left = marked(variable, value)
    for one in left:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    return [str(one) for one in left]


@asynccontextmanager
async def spinning(program: str, names: Sequence[str]) -> AsyncIterator[None]:
    """Runs one process of a Python program for each name. Each process has a session of its own,
    because the kernel shares the cores between sessions.
    """
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", f"{_DIES}{program}", name),
            env=child_environment(),
            start_new_session=True,
        )
        for name in names
    ]
    try:
        yield
    finally:
        for one in processes:
            one.kill()
            await one.wait()


async def _starve(plan: DemoPlan, found: Starved, busy: int) -> None:
    stopper, began_s = Stopper(found.seed, str(plan.out)), time.monotonic()
    async with spinning(_BUSY, [f"{found.seed} {number}" for number in range(busy)]):
        stopping = asyncio.create_task(stopper.stop_all())
        try:
            found.status, found.wrong["left_over"] = await _make(plan, "nice", "-n", "19")
        finally:
            stopping.cancel()
            with suppress(asyncio.CancelledError):
                await stopping
    found.starved_s = round(time.monotonic() - began_s, 1)
    found.stops = {stopper.names[pid]: len(each) for pid, each in stopper.stops.items() if each}
    found.longest_stop_s = round(
        max((one for each in stopper.stops.values() for one in each), default=0.0), 2
    )


def deaths(console: str) -> list[str]:
    """Console lines that report the end of a process or of its work."""
    return [one[0] for one in _DEATH.finditer(console)]


def errors(log: str) -> list[str]:
    """Lines of a log at level error, and first lines of tracebacks."""
    return [one[0] for one in _ERROR.finditer(log)]


def _judge(found: Starved, plan: DemoPlan, undisturbed: DemoPlan) -> None:
    run, promotions = plan.directory, 0
    console = (plan.out / "console.log").read_text(errors="replace")
    found.wrong |= {"deaths": deaths(console), "errors": []}
    for log in sorted((run / "logs").glob("*.log")):
        text = log.read_text(errors="replace")
        found.wrong["errors"] += [f"{log.name}: {one[:500]}" for one in errors(text)]
        promotions += text.count("decision=promoted")
    mine, theirs = (
        read_log(one.directory / "redis-durable", one.directory.name) for one in (plan, undisturbed)
    )
    verdict = judge_samples(mine, plan.steps, PROMPTS, SAMPLES)
    found.wrong |= {"lost": verdict.lost, "duplicated": verdict.duplicated}
    found.wrong["unequal"] = unequal(mine, theirs)
    done = plan.read() if (run / "summary.json").is_file() else None
    trespasses = read_trespasses(run) if done else {"summary": "missing"}
    found.wrong["trespasses"] = [f"{one}: {count}" for one, count in trespasses.items() if count]
    found.parts = {
        "trained": verdict.trained,
        "promotions": promotions,
        "evaluations": len(done.probes) if done else 0,
        "checkpoints": len(list((run / "checkpoints" / "policy").glob("step-*"))),
    }


async def _seed(seed: int, options: argparse.Namespace) -> Starved:
    found, place = Starved(seed), Path(tempfile.mkdtemp(prefix="starve-"))
    plain, starved = (
        DemoPlan(place / arm, seed, arm, options.steps, _SETTINGS, words("--lines", "text"))
        for arm in ("plain", "starved")
    )
    try:
        began_s = time.monotonic()
        status, _ = await _make(plain)
        found.undisturbed_s = round(time.monotonic() - began_s, 1)
        if status:
            found.wrong["deaths"] = [f"the undisturbed run ended with status {status}"]
        else:
            await _starve(starved, found, options.busy)
            _judge(found, starved, plain)
        if not found.met:
            unneeded = shutil.ignore_patterns("*.sock", "*.safetensors")
            kept = options.out.with_suffix("") / str(seed)
            shutil.copytree(place, kept, ignore=unneeded, dirs_exist_ok=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return found


def _goals(seeds: Sequence[Mapping[str, Any]]) -> Iterator[Goal]:
    ended = sum(one["status"] == 0 for one in seeds)
    yield Goal("seeds that ended with status 0", len(seeds), ended, ended == len(seeds))
    for name in dict.fromkeys(name for one in seeds for name in one["wrong"]):
        count = sum(len(one["wrong"].get(name, ())) for one in seeds)
        yield Goal(name, 0, count, count == 0)
    for name in ("trained", "promotions", "evaluations", "checkpoints"):
        least = min(one["parts"].get(name, 0) for one in seeds)
        yield Goal(f"{name} in each seed, at least", 1, least, least >= 1)


async def _run(options: argparse.Namespace) -> int:
    working = asyncio.current_task()
    assert working is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    facts: dict[str, Any] = {"steps": options.steps, "busy": options.busy, "seeds": []}
    if options.out.is_file():
        held = json.loads(options.out.read_text())
        facts = held if all(held[name] == facts[name] for name in ("steps", "busy")) else facts
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for seed in range(options.first, options.first + options.seeds):
        if any(one["seed"] == seed and one["met"] for one in facts["seeds"]):
            continue
        found = await _seed(seed, options)
        _say(_line(found))
        others = [one for one in facts["seeds"] if one["seed"] != seed]
        facts["seeds"] = [*others, {**asdict(found), "met": found.met}]
        facts |= {"goals": [asdict(one) for one in _goals(facts["seeds"])], "machine": machine()}
        options.out.write_text(json.dumps(facts, indent=1) + "\n")
    for goal in facts["goals"]:
        word = "met   " if goal["met"] else "MISSED"
        _say(f"{word} {goal['name']} {goal['goal']}: {goal['value']}")
    _say(str(options.out))
    return 0 if all(goal["met"] for goal in facts["goals"]) else 1


def _line(found: Starved) -> str:
    wrong = {"status": found.status} if found.status else {}
    wrong |= {name: len(each) for name, each in found.wrong.items() if each}
    verdict = "met" if found.met else f"MISSED {wrong}"
    return (
        f"seed {found.seed}: {verdict}; {sum(found.stops.values())} stops of {len(found.stops)} "
        f"processes, the longest {found.longest_stop_s} s; {found.parts}; {found.starved_s} s, "
        f"undisturbed {found.undisturbed_s} s"
    )


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """All seeds; the last line names the file of results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos.starve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cores = usable_cores()
    for name, kind, usual, what in (
        ("seeds", above_zero(int), 20, "how many"),
        ("first", not_negative(int), 0, "the first seed"),
        ("busy", not_negative(int), cores, "busy processes beside the run"),
        ("steps", above_zero(int), STEPS, "RL steps of a run"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=usual, help=f"{what} ({usual})")
    parser.add_argument("--out", type=Path, default=Path("runs/starve.json"))
    try:
        return asyncio.run(_run(parser.parse_args()))
    except (KeyboardInterrupt, asyncio.CancelledError):
        _say("stopped; no process is left")
        return 130


if __name__ == "__main__":
    sys.exit(main())
