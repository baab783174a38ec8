"""Sends the figures of steps to experiment trackers, each in its own thread that never blocks the
run.

`metrics.figures_of` selects the figures of a step.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from paceline.addresses import exempt_loopback
from paceline.errors import ConfigError
from paceline.services.coordinator.metrics import POINTS_DROPPED, figures_of
from paceline.telemetry import get_logger
from paceline.v1.coordinator_pb2 import StepRecord

TrackerName = Literal["tensorboard", "wandb", "trackio"]
PROJECT = "paceline"
WAITING = 1024
"""Maximum steps queued for a slow tracker; further steps are dropped and counted."""
CLOSE_S = 20.0
"""Seconds that a tracker may take at the end of a run."""
_log = get_logger(__name__)


Tracker = tuple[Callable[[int, dict[str, float]], None], Callable[[], None]]
"""Writes the figures of a step; ends."""


def open_tensorboard(run_id: str, run_dir: Path) -> Tracker:
    """Event files in <run.dir>/tensorboard; each start of the run has its own file."""
    from tensorboardX import SummaryWriter

    # The default name has a resolution of seconds, so a second start within one second would
    # overwrite the first file.
    writer = SummaryWriter(str(run_dir / "tensorboard"), filename_suffix=f".{time.time_ns()}")

    def log(step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def open_wandb(run_id: str, run_dir: Path) -> Tracker:
    """A run of project paceline under the run's id; files in <run.dir>/wandb. WANDB_MODE=offline
    sends nothing. wandb drops figures of a step before the last logged step, and logs a warning.
    """
    import wandb

    exempt_loopback(os.environ.get("WANDB_BASE_URL", ""))
    run_dir.mkdir(parents=True, exist_ok=True)
    words = {"project": PROJECT, "id": run_id, "name": run_id, "resume": "allow"}
    run = wandb.init(**words, dir=str(run_dir))
    return lambda step, figures: run.log(figures, step=step), run.finish


def open_trackio(run_id: str, run_dir: Path) -> Tracker:
    """A run of project paceline under the run's id, in trackio's directory (TRACKIO_DIR)."""
    import trackio

    exempt_loopback()
    run = trackio.init(project=PROJECT, name=run_id, resume="allow", embed=False)
    return lambda step, figures: run.log(figures, step=step), run.finish


Points = queue.Queue[tuple[int, dict[str, float]] | None]
"""Steps and their figures; None ends the queue."""
TRACKERS: dict[str, tuple[str, Callable[[str, Path], Tracker]]] = {
    "tensorboard": ("tensorboardX", open_tensorboard),
    "wandb": ("wandb", open_wandb),
    "trackio": ("trackio", open_trackio),
}
"""Package and opener of each receiver of figures, which is created and used in one thread."""


def check_trackers(names: Sequence[str]) -> None:
    """Raises ConfigError for a tracker without its package."""
    for name in names:
        if find_spec(package := TRACKERS[name][0]) is None:
            message = f"coordinator.trackers: not installed; pip install {package}"
            allowed = [one for one, (found, _) in TRACKERS.items() if find_spec(found)]
            raise ConfigError(message, seen=name, allowed=allowed)


class Tracking:
    """The trackers of a run. A failed tracker is logged and dropped; the run continues."""

    def __init__(self, names: Sequence[str], run_id: str, run_dir: Path) -> None:
        self._run_id, self._run_dir = run_id, run_dir
        self._queues: dict[str, Points] = {name: queue.Queue(WAITING) for name in names}
        self._threads = [
            threading.Thread(target=self._follow, args=(name,), name=f"tracker {name}", daemon=True)
            for name in names
        ]
        for thread in self._threads:
            thread.start()

    def step(self, record: StepRecord) -> None:
        """Queues the figures of a finished step."""
        if self._queues:
            self._put(record.step, figures_of(record))

    def evaluated(self, step: int, kind: str, value: float) -> None:
        """Queues an evaluation after `step` finished steps."""
        self._put(step, {f"evaluation/{kind}": value})

    def close(self) -> None:
        """Waits until all figures are written, at most CLOSE_S seconds."""
        for waiting in self._queues.values():
            try:
                waiting.put(None, timeout=CLOSE_S)
            except queue.Full:
                continue  # the tracker's thread is a daemon
        for thread in self._threads:
            thread.join(CLOSE_S)
            if thread.is_alive():
                _log.warning("tracker_unfinished", thread=thread.name, after_s=CLOSE_S)

    def _put(self, step: int, figures: dict[str, float]) -> None:
        for name, waiting in self._queues.items():
            try:
                waiting.put_nowait((step, figures))
            except queue.Full:
                POINTS_DROPPED.record(tracker=name)

    def _follow(self, name: str) -> None:
        try:
            log, close = TRACKERS[name][1](self._run_id, self._run_dir)
            while (point := self._queues[name].get()) is not None:
                log(*point)
            close()
        except Exception as error:  # noqa: BLE001
            # A tracker's library may raise any exception; no such exception may end the run.
            _log.exception("tracker_failed", tracker=name, error=str(error))
