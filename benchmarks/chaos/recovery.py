"""Kills the policy rank of a run beside busy processes: `python -m benchmarks.chaos.recovery`.

The run trains a pretrained model of 135M parameters (examples/real/fetch_model.py). The command
kills the only policy rank by SIGKILL while the rank trains a step. Recovery counts from the kill to
the commit of that step. The new rank may use its load time, the time of a whole step beside the
busy processes, and 10 s more. Its load time counts from its fork until it takes commands; steps
that the rank trains again before then do not belong to the load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.chaos.happenings import Happening, Happenings
from benchmarks.chaos.starve import end_run, errors, spinning
from benchmarks.chaos.system import CONSOLE, PARTS
from benchmarks.options import above_zero, not_negative
from benchmarks.processes import running
from benchmarks.result import BenchResult, Goal, at_least, at_most, say
from paceline.config import SecurityConfig
from paceline.errors import DeadlineExceeded, Unavailable
from paceline.local.patience import VARIABLE, patient
from paceline.local.ports import free_port
from paceline.rpc import channel
from paceline.rpc.progress import ask_progress

ROOM_S = 10.0
KILLED, STEPS = 3, 4  # the step of the kill, and how many steps the run has
_DOING, _LOOK_S, _WAIT_S = "doing", 0.1, 240.0
_MARK = "PACELINE_RECOVERY_RUN"
_MODULE = PARTS["policy rank"][1]
_SETTINGS = {
    "run.id": "recovery",
    "coordinator.steps": STEPS,
    "coordinator.prompts_per_step": 2,
    "coordinator.samples_per_task": 4,
    "coordinator.sampling.max_tokens": 32,
    "coordinator.reward": "length",
    "gateway.engine.max_sequence_tokens": 256,
    "gateway.engine.workers": 1,
    "gateway.engine.threads": 1,
    "policy_trainer.ranks": 1,
    "policy_trainer.checkpoint_interval_steps": 1,
}
_REWARD = """class Length:  # differs within a group, so that every step trains
    def score(self, episode):
        return float(len(episode.text))
"""
_KILL = re.compile(r"rank 0 of policy_trainer\.rank was killed by SIGKILL")
_ALARM = re.compile(r"\w+ (died|given_up|impaired)\b")
Row = dict[str, Any]


class Run:
    """A run in a folder with a path short enough for sockets, and its output and work."""

    def __init__(self, place: Path, model: Path) -> None:
        self.place, self.happenings = place, Happenings()
        self._rule = (place / "length").with_suffix(".py")
        self._address = f"127.0.0.1:{free_port()}"
        models = {f"{one}.model": model for one in ("gateway", "policy_trainer", "drafter_trainer")}
        files = {
            "run.dir": place / "run",
            "coordinator.tasks_path": place / "tasks.jsonl",
            "gateway.rewards.own": f'{{ length = "{self._rule}:Length" }}',
        }
        address = {"addresses.policy_trainer": self._address}
        self._words = [
            f"{key}={one}" for key, one in (_SETTINGS | models | files | address).items()
        ]

    @asynccontextmanager
    async def started(self) -> AsyncIterator[asyncio.subprocess.Process]:
        """Starts the run; afterwards no process of it is left."""
        tasks = ({"prompt": f"What is {one} + 3?", "answer": str(one + 3)} for one in range(40))
        (self.place / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
        self._rule.write_text(_REWARD)
        environment = {**os.environ, _MARK: str(self.place)}
        for variable in ("REDIS_URL", VARIABLE):
            environment.pop(variable, None)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "paceline.cli.main", "up", "--lines", "text", *self._words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            async with asyncio.TaskGroup() as group:
                following = [group.create_task(one) for one in (self._read(process), self._look())]
                yield process
                for task in following:
                    task.cancel()
        finally:
            await end_run(process, _MARK, str(self.place))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self.happenings.tell(CONSOLE, line.decode(errors="replace").rstrip())

    async def _look(self) -> None:
        """Records the work of the rank, without end."""
        last = ""
        async with channel(self._address, SecurityConfig()) as connection:
            while True:
                await asyncio.sleep(_LOOK_S)
                try:
                    parts = (await ask_progress(connection)).parts
                except (Unavailable, DeadlineExceeded):  # the trainer starts, ends or is late
                    continue
                if (doing := parts[-1].doing) != last:
                    last = doing
                    self.happenings.tell(_DOING, doing)

    async def seen(self, what: str, text: str, since_s: float = 0.0) -> float:
        """Time at which a console line, or the work of the rank, first had this text."""

        def matches(one: Happening) -> bool:
            return one.what == what and text in one.detail

        found = await self.happenings.first(matches, since_s, patient(_WAIT_S), text)
        say(found.detail)
        return found.at_s

    def replayed_s(self, from_s: float, to_s: float) -> float:
        """Seconds within the window in which the rank trained steps again."""
        begins = [
            one.at_s
            for one in self.happenings.since(from_s)
            if one.what == _DOING and one.at_s < to_s and "the start values of step" in one.detail
        ]
        return to_s - begins[0] if begins else 0.0

    def alarms(self) -> list[str]:
        """Console lines that report a fault, without lines about the kill."""
        lines = (one.detail for one in self.happenings.since(0.0) if one.what == CONSOLE)
        return [one for one in lines if _ALARM.match(one) and not _KILL.search(one)]

    def errors(self) -> list[str]:
        """Log lines at level error, without lines about the kill."""
        logs = sorted((self.place / "run" / "logs").glob("*.log"))
        lines = (line[:500] for log in logs for line in errors(log.read_text(errors="replace")))
        return [one for one in lines if not _KILL.search(one)]


async def recover(place: Path, model: Path, busy: int) -> Row:
    """Makes a run, kills its rank, and returns the seconds of each part and all errors found."""
    run = Run(place, model)
    async with run.started() as process:
        quiet_s = await run.seen(CONSOLE, f"step {KILLED - 2}/")
        async with spinning("while True: pass", ["busy"] * busy):
            began_s = await run.seen(CONSOLE, f"step {KILLED - 1}/")
            await run.seen(_DOING, "trains micro-batch", began_s)
            (rank,) = running(_MODULE, process.pid)
            rank.kill()
            killed_s = time.monotonic()
            lost_s = await run.seen(CONSOLE, "was killed by SIGKILL", killed_s)
            await run.seen(_DOING, "loads the newest", lost_s)
            (rank,) = running(_MODULE, process.pid)
            forked_s = time.monotonic() - time.time() + rank.create_time()
            ready_s = await run.seen(CONSOLE, "policy_trainer recovered", lost_s)
            trained_s = await run.seen(CONSOLE, f"step {KILLED}/")
            load = os.getloadavg()[0]
            await run.seen(CONSOLE, f"step {STEPS}/")
            async with asyncio.timeout(patient(_WAIT_S)):
                status = await process.wait()
    replay_s = run.replayed_s(lost_s, ready_s)
    parts = {
        "step s": began_s - quiet_s,
        "noticed s": lost_s - killed_s,
        "forked s": forked_s - lost_s,
        "load s": ready_s - forked_s - replay_s,
        "replay s": replay_s,
        "step again s": trained_s - ready_s,
        "recovery s": trained_s - killed_s,
    }
    rounded = {name: round(value, 1) for name, value in parts.items()}
    wrong = {"alarms": run.alarms(), "errors": run.errors()}
    return {**rounded, "load average": round(load, 1), "status": status, **wrong}


def judge_recoveries(rows: Sequence[Row]) -> list[Goal]:
    """Makes the goals of all runs."""
    beyond = max(row["recovery s"] - row["load s"] - row["step s"] for row in rows)
    counts = ((name, sum(len(row[name]) for row in rows)) for name in ("alarms", "errors"))
    ended = sum(row["status"] == 0 for row in rows)
    return [
        at_most("seconds of a recovery beyond load and step", ROOM_S, round(beyond, 1)),
        at_least("runs that ended with status 0", len(rows), ended),
        *(at_most(f"{name} beyond the kill", 0, count) for name, count in counts),
    ]


async def _run(options: argparse.Namespace) -> int:
    working = asyncio.current_task()
    assert working is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    rows: list[Row] = []
    os.environ.setdefault(SecurityConfig().token_env, secrets.token_hex())  # of runs and looks
    for number in range(options.runs):
        with tempfile.TemporaryDirectory(prefix="recover-") as place:
            rows.append({"run": number, **await recover(Path(place), options.model, options.busy)})
    title = f"a killed policy rank beside {options.busy} busy processes"
    result = BenchResult(title, rows, judge_recoveries(rows))
    result.print()
    result.write_json(options.out)
    return 0 if all(goal.met for goal in result.goals) else 1


def main() -> int:
    """Makes all runs; the exit status is 0 if the goals are met."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos.recovery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    model = cache / "paceline" / "smollm2" / "SmolLM2-135M-Instruct"
    parser.add_argument("--busy", type=not_negative(int), default=12, help="busy processes (12)")
    parser.add_argument("--runs", type=above_zero(int), default=1, help="how many (1)")
    parser.add_argument("--model", type=Path, default=model, help="directory of the policy")
    parser.add_argument("--out", type=Path, default=Path("runs/recovery.json"))
    return asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
