"""Runs a whole system under seeded faults: `python -m benchmarks.chaos --faults 50 --seed 0`.

Every process is a real one. Faults wait for events of the run (facts, files, bytes of a push), not
for time. Recovery counts from the fault to the next step that is committed, so it holds what the
step had left to do; of a full disk it counts from the moment at which there is room again. At the
end the run's Redis log, checkpoints and spool are judged by code that shares nothing with the
product, and its tokens are compared with those of a run without faults.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.chaos.inject import Injected, Injector
from benchmarks.chaos.remains import read_remains
from benchmarks.chaos.schedule import KINDS, Fault, deal
from benchmarks.chaos.system import PROMPTS, RUN_ID, SAMPLES, System
from benchmarks.chaos.verdict import RunVerdict, judge
from benchmarks.options import above_zero, not_negative
from benchmarks.result import Goal, machine
from paceline.errors import PacelineError
from paceline.local.patience import patient

DISK_BYTES = 768 << 20
MEDIAN_S, WORST_S = 6.0, 15.0
_DISK = "PACELINE_CHAOS_DISK"  # where this process has mounted one of its own
_STEPS = 1_000_000
_UNDISTURBED_S = 3600.0


def main() -> int:
    """The run, its verdict, and the file of the last line."""
    options = _options()
    _enter_own_disk()
    place = Path(os.environ[_DISK])
    try:
        return asyncio.run(_run(options, place))
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("stopped; no process is left")
        return 130
    except PacelineError as error:
        sys.stderr.write(f"chaos: {error}\n")
        return 1
    finally:
        _leave_disk(place, options.keep)


def say(text: str) -> None:
    """One line of progress."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="kinds: " + ", ".join(kind.name for kind in KINDS),
    )
    parser.add_argument("--faults", type=above_zero(int), default=50, help="how many (50)")
    parser.add_argument("--seed", type=not_negative(int), default=0, help="which ones (0)")
    parser.add_argument("--only", action="append", default=[], metavar="KIND", help="this kind")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos.json"), help="runs/chaos.json")
    parser.add_argument("--keep", type=Path, help="copy logs and evidence to this folder")
    parser.add_argument("--alone", action="store_true", help="compare with no run without faults")
    return parser.parse_args()


def _enter_own_disk() -> None:
    """Begins again in a mount namespace with a small disk, which a fault may fill; stays where the
    system allows none.
    """
    if os.environ.get(_DISK):
        return
    place = tempfile.mkdtemp(prefix="chaos-")
    mount = f"mount -t tmpfs -o size={DISK_BYTES} none {place}"
    own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    can = (
        shutil.which("unshare")
        and not subprocess.run([*own, mount], capture_output=True, check=False).returncode
    )
    os.environ[_DISK] = place
    if can:
        words = [*own, f'{mount} && exec "$@"', "sh", sys.executable, "-m", "benchmarks.chaos"]
        os.execvp(words[0], [*words, *sys.argv[1:]])  # noqa: S606  no shell reads the arguments


def _leave_disk(place: Path, keep: Path | None) -> None:
    if keep is not None:
        unneeded = shutil.ignore_patterns("*.sock", "*.safetensors")
        shutil.copytree(place, keep, ignore=unneeded, dirs_exist_ok=True)
    if _is_own_disk(place):
        subprocess.run(["umount", place], check=False)
    shutil.rmtree(place, ignore_errors=True)


def _is_own_disk(place: Path) -> bool:
    return shutil.disk_usage(place).total <= DISK_BYTES


async def _run(options: argparse.Namespace, place: Path) -> int:
    working = asyncio.current_task()
    assert working is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    own_disk = _is_own_disk(place)
    faults = deal(options.seed, options.faults, own_disk=own_disk, only=options.only)
    if not own_disk:
        say("this machine lets nobody mount a disk of their own: none is filled")
    began = datetime.now(UTC).isoformat(timespec="seconds")
    course = await _under_faults(place / "a", options.seed, faults)
    other, steps = None, course.steps
    if not course.failure and not options.alone:
        say(f"the same {steps} steps without faults")
        await _undisturbed(place / "b", options.seed, steps)
        other = read_remains(place / "b", RUN_ID)
    verdict = judge(read_remains(place / "a", RUN_ID), steps, PROMPTS, SAMPLES, other)
    facts = report(options.seed, course, verdict)
    facts["began"] = began
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(facts, indent=1) + "\n")
    _show(facts)
    say(str(options.out))
    return 1 if verdict.broken or course.failure or course.left else 0


@dataclass
class Course:
    """How a run under faults went."""

    done: list[Injected] = field(default_factory=list)
    runs_ended: list[str] = field(default_factory=list)  # why it had to be started again
    left: list[str] = field(default_factory=list)  # processes that outlived it
    failure: str = ""  # what it did not survive
    steps: int = 0


async def _under_faults(directory: Path, seed: int, faults: Sequence[Fault]) -> Course:
    course = Course()
    async with System(directory, seed, _STEPS) as system:
        await system.serves(0.0)
        say("the run serves")
        injector = Injector(system)
        try:
            for fault in faults:
                one = await injector.inject(fault)
                course.done.append(one)
                say(
                    f"fault {fault.number} of {len(faults)}: {fault.title}: recovered in "
                    f"{one.recovery_s:.1f} s, whole after {one.whole_s:.1f} s"
                    f"{one.note and f' ({one.note})'}"
                )
            await system.stop()
        except PacelineError as error:
            course.failure = f"fault {len(course.done) + 1}: {error}"
            say(f"the run did not go on: {course.failure}")
    course.runs_ended, course.left = system.runs_ended, system.left
    course.steps = max(read_remains(directory, RUN_ID).finished, default=-1) + 1
    return course


async def _undisturbed(directory: Path, seed: int, steps: int) -> None:
    async with System(directory, seed, steps) as system, asyncio.timeout(patient(_UNDISTURBED_S)):
        await system.ended()


def report(seed: int, course: Course, verdict: RunVerdict) -> dict[str, Any]:
    """What the JSON file holds."""
    done = course.done
    by_kind = defaultdict[str, list[Injected]](list)
    for one in done:
        by_kind[one.kind].append(one)
    all_s = _spread([one.recovery_s for one in done])
    wrong = {
        name: len(getattr(verdict, name))
        for name in ("lost", "duplicated", "wrong_weights", "disordered", "differing")
    }
    goals = [Goal(name, 0, value, value == 0) for name, value in wrong.items()]
    goals.append(
        Goal("recovery median s, below", MEDIAN_S, all_s["median"], all_s["median"] < MEDIAN_S)
    )
    goals.append(Goal("recovery worst s, below", WORST_S, all_s["worst"], all_s["worst"] < WORST_S))
    return {
        "seed": seed,
        "faults": len(done),
        **wrong,
        "found": {name: getattr(verdict, name)[:20] for name in wrong},
        "failure": course.failure,
        "left_over": course.left,
        "steps": course.steps,
        "samples": verdict.samples,
        "trained": verdict.trained,
        "reported": dict(verdict.reported),
        "versions_compared": verdict.versions,
        "samples_compared": verdict.compared,
        "samples_not_comparable": verdict.not_comparable,
        "steps_with_near_ties": verdict.near_ties,
        "runs_ended": course.runs_ended,
        "recovery_s": all_s,
        "whole_s": _spread([one.whole_s for one in done]),
        "recovery_s_by_kind": {
            kind: {"faults": len(found), **_spread([one.recovery_s for one in found])}
            for kind, found in sorted(by_kind.items())
        },
        "goals": [asdict(goal) for goal in goals],
        "log": [asdict(one) for one in done],
        "machine": machine(),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {"median": 0.0, "worst": 0.0}
    return {"median": round(statistics.median(seconds), 2), "worst": round(max(seconds), 2)}


def _show(facts: dict[str, Any]) -> None:
    for kind, figures in facts["recovery_s_by_kind"].items():
        say(f"{kind:38} {figures['faults']:3} {figures['median']:7.1f} {figures['worst']:7.1f} s")
    for found in facts["found"].values():
        for line in found:
            say(f"wrong: {line}")
    for goal in facts["goals"]:
        word = "met   " if goal["met"] else "MISSED"
        say(f"{word} {goal['name']} {goal['goal']}: {goal['value']}")
    say(
        f"{facts['faults']} faults in {facts['steps']} steps; {facts['trained']} of "
        f"{facts['samples']} samples trained, reported {facts['reported']}; weights of "
        f"{facts['versions_compared']} versions and tokens of {facts['samples_compared']} samples "
        f"compared"
    )


if __name__ == "__main__":
    sys.exit(main())
