"""Runs a whole system under seeded faults: `python -m benchmarks.chaos --faults 50 --seed 0`.

Every process is real. Faults wait for events of the run (facts, files, bytes of a push), not for
time. Recovery is the time from the fault to the next committed step, so it includes the rest of the
step's work. For a full disk it starts when there is room again. At the end, code that shares
nothing with the product judges the run's Redis log, checkpoints and spool. The run's tokens are
compared with the tokens of a run without faults.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.chaos.inject import Injector
from benchmarks.chaos.remains import read_remains
from benchmarks.chaos.report import Course, lines, report
from benchmarks.chaos.schedule import KINDS, Fault, deal
from benchmarks.chaos.settings import PROMPTS, RUN_ID, SAMPLES
from benchmarks.chaos.system import System
from benchmarks.chaos.verdict import judge
from benchmarks.options import above_zero, not_negative
from paceline.errors import PacelineError
from paceline.local.patience import patient

DISK_BYTES = 768 << 20
_DISK = "PACELINE_CHAOS_DISK"  # path at which this process has mounted its own disk
_STEPS = 1_000_000
_UNDISTURBED_S = 3600.0


def main() -> int:
    """Makes the run, its verdict and the result file; the last printed line names the file."""
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
    """Prints one line of progress."""
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
    parser.add_argument("--seed", type=not_negative(int), default=0, help="seed of the faults (0)")
    parser.add_argument("--only", action="append", default=[], metavar="KIND", help="this kind")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos.json"), help="runs/chaos.json")
    parser.add_argument("--keep", type=Path, help="copy logs and evidence to this folder")
    parser.add_argument("--alone", action="store_true", help="compare with no run without faults")
    return parser.parse_args()


def _enter_own_disk() -> None:
    """Restarts the program in a mount namespace with a small disk, which a fault may fill.

    Without permission the program continues on the usual disk.
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
    facts = {**report(options.seed, course, verdict), "began": began}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(facts, indent=1) + "\n")
    for line in lines(facts):
        say(line)
    say(str(options.out))
    return 1 if verdict.broken or course.failure or course.left else 0


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


if __name__ == "__main__":
    sys.exit(main())
