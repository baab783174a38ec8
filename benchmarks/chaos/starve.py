"""Starves whole runs of the demo: `python -m benchmarks.chaos.starve --seeds 20`.

Each seed makes two runs of the same settings. The first run is undisturbed. In the second run every
process has the lowest priority and is stopped again and again, and busy processes share the cores.
The starved run has to end with status 0 and to train the same tokens with the same rewards. No
process of it may die, no log may hold an error, no holder may work on a slot of another.

A finished seed is kept in the file of results, so an interrupted command continues there.
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
from benchmarks.demo_runs import demo_folder
from benchmarks.options import above_zero, not_negative
from benchmarks.processes import marked
from benchmarks.result import Goal, machine
from paceline.local.processes import child_environment, usable_cores

STEPS, PROMPTS, SAMPLES = 6, 8, 16
STOPPED_S, BETWEEN_S = (0.1, 3.0), (0.5, 15.0)
_MARK = "PACELINE_STARVED_RUN"
_LIMIT_S, _END_S, _LOOK_S = 1200.0, 60.0, 0.2
_ZERO = ("deaths", "errors", "trespasses", "lost", "unequal", "left_over")
_DEATH = re.compile(r"^\w+ (died|given_up|impaired)\b(?!.*does not answer).*$", re.MULTILINE)
_ERROR = re.compile(r"^.*(\[(error|critical) *\]|Traceback \(most recent).*$", re.MULTILINE)
_BUSY = """
import random, sys, time
from paceline.local.processes import die_with_parent
die_with_parent()
draw = random.Random(sys.argv[1])
while True:
    end_s = time.monotonic() + draw.uniform(0.1, 3.0)
    while time.monotonic() < end_s:
        pass
    time.sleep(draw.uniform(0.1, 3.0))
"""


@dataclass
class Seed:
    """One starved run beside its undisturbed run; lists hold the findings in words."""

    seed: int
    status: int = -1  # of the starved run
    undisturbed_s: float = 0.0
    starved_s: float = 0.0
    stops: int = 0
    longest_stop_s: float = 0.0
    stopped: list[str] = field(default_factory=list)  # processes that were stopped at least once
    never_stopped: list[str] = field(default_factory=list)
    trained: int = 0
    promotions: int = 0
    evaluations: int = 0
    checkpoints: int = 0
    deaths: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # log lines of level error
    trespasses: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)  # samples with other tokens or rewards
    left_over: list[str] = field(default_factory=list)

    @property
    def met(self) -> bool:
        """Whether nothing is wrong and every part of a run took place."""
        whole = self.trained and self.promotions and self.evaluations and self.checkpoints
        return not (self.status or any(getattr(self, name) for name in _ZERO)) and bool(whole)


def settings() -> list[str]:
    """The demo with all parts of a run in few steps. It starts with the drafter of another policy,
    so that candidates are better and are promoted.
    """
    drafter = demo_folder() / "drafter_trained"
    return [
        f"gateway.drafter={drafter}",
        f"drafter_trainer.drafter={drafter}",
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
        "policy_trainer.ledger_keep=1000000",
    ]


class Stopper:
    """Lowers the priority of each process of a run and stops it again and again."""

    def __init__(self, seed: int, run: Path) -> None:
        self._seed, self._run = seed, run
        self.stopped_s: dict[str, list[float]] = {}  # name and process id -> its stops

    async def stop_all(self) -> None:
        """Never returns. A cancelled call leaves no process stopped."""
        async with asyncio.TaskGroup() as group:
            while True:
                for process in marked(_MARK, str(self._run)):
                    with suppress(psutil.Error):
                        name = f"{_short(process)} {process.pid}"
                        if name not in self.stopped_s:
                            self.stopped_s[name] = []
                            group.create_task(self._stop_one(process.pid, self.stopped_s[name]))
                await asyncio.sleep(_LOOK_S)

    async def _stop_one(self, pid: int, stops: list[float]) -> None:
        draw = random.Random(f"{self._seed} {len(self.stopped_s)}")  # noqa: S311  no secret
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                _lower_priority(pid)
                while True:
                    await asyncio.sleep(draw.uniform(*BETWEEN_S))
                    signal.pidfd_send_signal(handle, signal.SIGSTOP)
                    began_s = time.monotonic()
                    try:
                        await asyncio.sleep(draw.uniform(*STOPPED_S))
                    finally:
                        signal.pidfd_send_signal(handle, signal.SIGCONT)
                        stops.append(time.monotonic() - began_s)
            finally:
                os.close(handle)


def _lower_priority(pid: int) -> None:
    os.setpriority(os.PRIO_PROCESS, pid, 19)
    # Where the kernel groups sessions, the priority of the group decides between them.
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("19")


def _short(process: psutil.Process) -> str:
    words = process.cmdline()
    return words[words.index("-m") + 1] if "-m" in words else process.name()


@asynccontextmanager
async def _busy(count: int, seed: int) -> AsyncIterator[None]:
    """Processes that compute for 0.1 to 3 s and sleep for as long, at normal priority."""
    command = [sys.executable, "-c", _BUSY]
    started = [
        await asyncio.create_subprocess_exec(
            *command, f"{seed} {number}", env=child_environment(), start_new_session=True
        )
        for number in range(count)
    ]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            await one.wait()


async def _demo(run: Path, seed: int, steps: int) -> tuple[int, list[str]]:
    """The status of a whole run and the command lines of processes that outlived it."""
    words = [sys.executable, "-m", "paceline.cli.main", "demo", "--lines", "text", "--out"]
    words += [str(run), "--seed", str(seed), "--steps", str(steps), *settings()]
    environment = {**os.environ, _MARK: str(run)}
    environment.pop("REDIS_URL", None)
    run.mkdir(parents=True)
    with (run / "console.log").open("wb") as console:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdout=console,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(_LIMIT_S):
            return await process.wait(), _kill_left_over(run)
    except TimeoutError:
        return -int(signal.SIGALRM), []
    finally:
        if process.returncode is None:
            process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await process.wait()
        _kill_left_over(run)


def _kill_left_over(run: Path) -> list[str]:
    left = []
    for process in marked(_MARK, str(run)):
        with suppress(psutil.Error):
            left.append(" ".join(process.cmdline()))
            process.kill()
    return left


async def _starved(run: Path, found: Seed, steps: int, busy: int) -> None:
    stopper, began_s = Stopper(found.seed, run), time.monotonic()
    async with _busy(busy, found.seed):
        stopping = asyncio.create_task(stopper.stop_all())
        try:
            found.status, found.left_over = await _demo(run, found.seed, steps)
        finally:
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
    found.starved_s = round(time.monotonic() - began_s, 1)
    stops = [one for each in stopper.stopped_s.values() for one in each]
    found.stops, found.longest_stop_s = len(stops), round(max(stops, default=0.0), 2)
    found.stopped = sorted(name for name, each in stopper.stopped_s.items() if each)
    found.never_stopped = sorted(stopper.stopped_s.keys() - found.stopped)


def _judge(found: Seed, starved: Path, undisturbed: Path, steps: int) -> None:
    (run,), (other,) = (list(one.glob("demo-*")) for one in (starved, undisturbed))
    console = (starved / "console.log").read_text(errors="replace")
    found.deaths = [one[0] for one in _DEATH.finditer(console)]
    for log in sorted((run / "logs").glob("*.log")):
        text = log.read_text(errors="replace")
        found.errors += [f"{log.name}: {one[0][:500]}" for one in _ERROR.finditer(text)]
        found.promotions += text.count("decision=promoted")
    mine, theirs = (read_log(one / "redis-durable", one.name) for one in (run, other))
    verdict = judge_samples(mine, steps, PROMPTS, SAMPLES)
    found.trained, found.lost = verdict.trained, verdict.lost + verdict.duplicated
    found.unequal = unequal(mine, theirs)
    found.checkpoints = len(list((run / "checkpoints" / "policy").glob("step-*")))
    if (run / "summary.json").is_file():
        summary = json.loads((run / "summary.json").read_text())
        pieces = summary["trespasses"].items()
        found.trespasses = [f"{count} of {holder}" for holder, count in pieces if count]
        records = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
        found.evaluations = sum("accuracy" in one.get("evaluations", {}) for one in records)


async def _seed(seed: int, options: argparse.Namespace) -> Seed:
    found, place = Seed(seed), Path(tempfile.mkdtemp(prefix="starve-"))
    try:
        began_s = time.monotonic()
        status, _ = await _demo(place / "b", seed, options.steps)
        if status:
            found.deaths = [f"the undisturbed run ended with status {status}"]
        else:
            found.undisturbed_s = round(time.monotonic() - began_s, 1)
            await _starved(place / "a", found, options.steps, options.busy)
            _judge(found, place / "a", place / "b", options.steps)
        if not found.met:
            kept, unneeded = options.out.with_suffix("") / str(seed), "*.safetensors"
            ignored = shutil.ignore_patterns("*.sock", unneeded)
            shutil.copytree(place, kept, ignore=ignored, dirs_exist_ok=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return found


def _goals(seeds: Sequence[Mapping[str, Any]]) -> Iterator[Goal]:
    ended = sum(one["status"] == 0 for one in seeds)
    yield Goal("seeds that ended with status 0", len(seeds), ended, ended == len(seeds))
    for name in _ZERO:
        count = sum(len(one[name]) for one in seeds)
        yield Goal(name, 0, count, count == 0)
    for name in ("trained", "promotions", "evaluations", "checkpoints"):
        least = min((one[name] for one in seeds), default=0)
        yield Goal(f"{name} in each seed, at least", 1, least, least >= 1)


async def _run(options: argparse.Namespace) -> int:
    working = asyncio.current_task()
    assert working is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    conditions = {"steps": options.steps, "busy": options.busy}
    facts: dict[str, Any] = {**conditions, "seeds": []}
    if options.out.is_file():
        held = json.loads(options.out.read_text())
        facts = held if conditions.items() <= held.items() else facts
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
        _say(f"{'met   ' if goal['met'] else 'MISSED'} {goal['name']} {goal['goal']}: {goal['value']}")
    _say(str(options.out))
    return 0 if all(goal["met"] for goal in facts["goals"]) else 1


def _line(found: Seed) -> str:
    wrong = [f"{name} {len(getattr(found, name))}" for name in _ZERO if getattr(found, name)]
    if found.status:
        wrong.insert(0, f"status {found.status}")
    return (
        f"seed {found.seed}: {'met' if found.met else 'MISSED ' + ', '.join(wrong)}; {found.stops} "
        f"stops of {len(found.stopped)} processes, the longest {found.longest_stop_s} s; "
        f"{found.trained} trained, {found.promotions} promotions, {found.evaluations} evaluations, "
        f"{found.checkpoints} checkpoints; {found.starved_s} s, undisturbed {found.undisturbed_s} s"
    )


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """All seeds; the last line names the file of results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos.starve", description=__doc__)
    parser.add_argument("--seeds", type=above_zero(int), default=20, help="how many (20)")
    parser.add_argument("--first", type=not_negative(int), default=0, help="the first seed (0)")
    cores = 2 * usable_cores()
    parser.add_argument("--busy", type=not_negative(int), default=cores, help=f"({cores})")
    parser.add_argument("--steps", type=above_zero(int), default=STEPS, help=f"of a run ({STEPS})")
    parser.add_argument("--out", type=Path, default=Path("runs/starve.json"))
    try:
        return asyncio.run(_run(parser.parse_args()))
    except (KeyboardInterrupt, asyncio.CancelledError):
        _say("stopped; no process is left")
        return 130


if __name__ == "__main__":
    sys.exit(main())
