"""Checkpoints of the drafter trainer: trainables, optimiser and counters. Owns files, not when they are written."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.errors import DataLoss

STATE = "state.pt"


class CheckpointWriter:
    """Writes one checkpoint at a time in a thread, atomically; a newer one waits for the running one.

    Beside the state lies the drafter as a checkpoint of its own, as `write_model` puts it into the directory.
    """

    def __init__(self, directory: Path, write_model: Callable[[dict[str, Any], Path], None]) -> None:
        self._directory, self._write_model = directory, write_model
        self._thread: threading.Thread | None = None
        self._failure: OSError | None = None

    def write(self, state: dict[str, Any]) -> None:
        """Starts writing `state`, whose tensors must not change any more. Raises the failure of the write before."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(state,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Returns when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _write(self, state: dict[str, Any]) -> None:
        temporary = self._directory.with_name(self._directory.name + ".tmp")
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            self._write_model(state, temporary)
            torch.save(state, temporary / STATE)
            with (temporary / STATE).open("rb") as file:
                os.fsync(file.fileno())
            old = self._directory.with_name(self._directory.name + ".old")
            shutil.rmtree(old, ignore_errors=True)
            if self._directory.exists():
                self._directory.rename(old)
            temporary.rename(self._directory)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            self._failure = error


def read_checkpoint(directory: Path) -> dict[str, Any] | None:
    """State of the newest checkpoint; None when there is none. Raises DataLoss when it does not load."""
    for candidate in (directory, directory.with_name(directory.name + ".old")):
        if (candidate / STATE).is_file():
            try:
                state: dict[str, Any] = torch.load(candidate / STATE, map_location="cpu", weights_only=True)
            except (RuntimeError, EOFError, ValueError) as error:
                raise DataLoss(f"the checkpoint {candidate} does not load", seen=str(error)[:200]) from error
            return state
    return None
