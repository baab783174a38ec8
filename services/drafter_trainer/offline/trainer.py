"""Trains offline on one rank: rows in, optimiser steps, held-out figures, checkpoints."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from paceline.errors import ConfigError, InvalidInput
from paceline.services.drafter_trainer.gate.evaluate import chain_matches
from paceline.services.drafter_trainer.learn.learner import DrafterLearner
from paceline.services.drafter_trainer.learn.membership import Members
from paceline.services.drafter_trainer.offline.config import OfflineConfig
from paceline.services.drafter_trainer.offline.data import Example, fingerprint
from paceline.services.drafter_trainer.offline.plan import (
    OPEN_ROWS,
    Document,
    place,
    split,
    steps_from,
    steps_of,
)
from paceline.services.drafter_trainer.offline.report import RunLog
from paceline.services.drafter_trainer.offline.target import TargetModel
from paceline.speculators.net import DraftNet
from paceline.speculators.shift import conditional
from paceline.training.checkpoints import (
    PREFIX,
    CheckpointWriter,
    find_whole,
    read_checkpoint,
    read_state,
    read_whole,
)
from paceline.training.packing import first_fit

Tell = Callable[[dict[str, Any]], None]
STATES = "states"
"""Folder of the states from which a run resumes."""
CHECKPOINT, SPECULATOR = "checkpoint", "speculator"
"""Folder of a run's result, and the drafter's folder in it."""


def acceptance(matches: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Held-out acceptance of a greedy chain of K drafts, teacher-forced.

    matches [N, K]: whether draft k of position n equals the model's token. survival [K] is the
    share of positions with drafts 1 .. k all right. conditional [K] is the share with draft k right
    among positions with drafts 1 .. k - 1 right. length is E[len] = 1 + sum of survival, the bonus
    token included.
    """
    survival = np.cumprod(matches, axis=1, dtype=np.int64).mean(axis=0)
    return {
        "survival": survival.tolist(),
        "conditional": list(conditional(tuple(survival.tolist()))),
        "length": 1.0 + float(survival.sum()),
        "positions": len(matches),
    }


class OfflineTrainer:
    """One rank of the run; every public method is collective."""

    def __init__(
        self,
        config: OfflineConfig,
        net: DraftNet,
        target: TargetModel,
        samples: Sequence[Example],
        tell: Tell,
        members: Members,
    ) -> None:
        self._config, self._target, self._tell = config, target, tell
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._train, self._heldout = split(samples, config.heldout_share, config.seed)
        self._settings = config.settings(fingerprint(samples))
        self._whole = net.twin()
        optimizer = config.optimizer_config
        self._rows_per_step = config.rows_per_rank * self._world
        self._learner = DrafterLearner(
            net, optimizer, micro_batches=self._rows_per_step, members=members
        )
        lengths = [len(sample) for sample in self._train]
        self.steps = config.steps or steps_of(
            lengths,
            config.row_tokens,
            config.seed,
            epochs=config.epochs,
            rows_per_step=self._rows_per_step,
        )
        self._members = members
        self._states = config.out / STATES
        self._writer = CheckpointWriter(self._states, self._export)
        self._log = RunLog(config.out / "log.jsonl", keep=self._rank == 0)
        self._saved = -1
        self._resume()

    @property
    def step(self) -> int:
        """Finished optimiser steps, over all processes of the run."""
        return self._learner.total_steps

    def run(self, stopping: Callable[[], bool]) -> bool:
        """Trains until the end, or until a rank is `stopping`, and saves. Returns whether it
        reached the end.
        """
        config = self._config
        plan = steps_from(
            self._train,
            config.row_tokens,
            config.window,
            config.seed,
            rows_per_step=self._rows_per_step,
            first=self.step,
        )
        for rows in islice(plan, max(self.steps - self.step, 0)):
            if self._agreed(stopping()):
                self._save()
                self._writer.wait()
                return False
            self._record(self._train_step(rows))
            if self.step % config.eval_every == 0 and self.step < self.steps:
                self._evaluate()
            if self.step % config.save_every == 0 and self.step < self.steps:
                self._save()

        self._evaluate()
        self._save()
        self._writer.wait()
        return True

    def _train_step(self, rows: Sequence[Sequence[Document]]) -> dict[str, float]:
        """One optimiser step over the rows of all ranks; returns sums of this rank's figures."""
        started = time.perf_counter()
        sums: dict[str, float] = {"loss": 0.0, "positions": 0.0}
        for row in rows[self._rank :: self._world]:
            packed = self._target.row(row, self._target.forward(row))
            result = self._learner.micro_step(packed, self._target.head)
            sums["loss"] += result.loss * result.positions
            sums["positions"] += result.positions
            for name, mean in result.terms.items():
                sums[f"term/{name}"] = sums.get(f"term/{name}", 0.0) + mean * result.positions

        return sums | {"seconds": (time.perf_counter() - started) / self._world}

    def _record(self, sums: dict[str, float]) -> None:
        """Writes the figures of the finished step, over all ranks, to the log and to the parent."""
        values = torch.tensor([sums[name] for name in sorted(sums)], dtype=torch.float64)
        if self._world > 1:
            dist.all_reduce(values)
        whole = dict(zip(sorted(sums), values.tolist(), strict=True))
        count = max(whole["positions"], 1.0)
        line: dict[str, Any] = {
            "step": self.step,
            "loss": whole["loss"] / count,
            "positions": int(whole["positions"]),
        }
        line["terms"] = {
            n.removeprefix("term/"): v / count for n, v in whole.items() if n.startswith("term/")
        }
        line["seconds"] = round(whole["seconds"], 4)
        self._log.write(line)
        self._tell({"kind": "step", "steps": self.steps, **line})

    def _evaluate(self) -> None:
        """Measures acceptance on the held-out sequences, on rank 0, which alone has the whole
        drafter.
        """
        if not self._heldout:
            return
        net = self._learner.snapshot()
        random = np.random.default_rng([self._config.seed, 4])
        placed = [place(sample, self._config.window, random) for sample in self._heldout]
        row_tokens, lengths = self._config.row_tokens, [len(one) for one in self._heldout]
        matches = []
        for row in first_fit(lengths, row_tokens, range(len(lengths)), open_rows=OPEN_ROWS):
            documents = [placed[i] for i in row]
            packed = self._target.row(documents, self._target.forward(documents))
            if self._rank == 0:
                matches.append(
                    chain_matches(net, packed, self._target.head, self._config.draft_steps).numpy()
                )

        if self._rank == 0:
            figures = acceptance(np.concatenate(matches))
            self._log.write({"step": self.step, "heldout": figures})
            self._tell({"kind": "heldout", "step": self.step, **figures})

    def _agreed(self, stop: bool) -> bool:
        """Returns True on all ranks if any rank has `stop` set."""
        flag = torch.tensor(float(stop))
        if self._world > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def _state(self) -> dict[str, Any]:
        return {"learner": self._learner.state(), "settings": self._settings}

    def _save(self) -> None:
        """Starts a checkpoint of this step, unless it exists."""
        if self._saved == self.step:
            return
        self._writer.write(self._state(), self.step, self._members.writing)
        self._tell(
            {"kind": "saved", "step": self.step, "directory": str(self._config.out / CHECKPOINT)}
        )
        self._saved = self.step

    def _export(self, state: dict[str, Any], directory: Path) -> None:
        """Writes the whole drafter from the shards in `directory` to CHECKPOINT."""
        net, out = self._whole.twin(), self._config.out
        fresh, old = out / f".{CHECKPOINT}.tmp", out / f".{CHECKPOINT}.old"
        for left_behind in (fresh, old):
            shutil.rmtree(left_behind, ignore_errors=True)
        net.load_tensors(read_whole(directory, "learner/model", state))
        net.save(fresh / SPECULATOR)
        if (out / CHECKPOINT).exists():
            (out / CHECKPOINT).rename(old)
        fresh.rename(out / CHECKPOINT)
        shutil.rmtree(old, ignore_errors=True)

    def _resume(self) -> None:
        """Resumes from the newest state in the output directory; without `resume`, removes the
        states.

        Raises ConfigError for the state of another run.
        """
        if self._config.resume:
            found = find_whole(self._states, PREFIX, self._members.group)
            for fault in found.damaged:
                self._tell({"kind": "damaged", "fault": fault})
            if found.checkpoint is not None:
                self._go_on_from(found.checkpoint)
        elif self._rank == 0:
            shutil.rmtree(self._states, ignore_errors=True)
        self._members.meet()  # no rank reads the states any more
        self._log.keep_to(self.step)

    def _go_on_from(self, checkpoint: Path) -> None:
        seen = read_state(checkpoint)["settings"]
        if other := next(
            (key for key in self._settings if seen.get(key) != self._settings[key]), None
        ):
            raise ConfigError(
                f"{self._config.out} holds a run with another {other}; --no-resume or another "
                f"--out starts afresh",
                seen=self._settings[other],
                allowed=seen.get(other),
            )
        state = read_checkpoint(checkpoint, self._state())
        self._learner.load_state(state["learner"])
        self._saved = self.step
        self._tell({"kind": "resumed", "step": self.step})


def usable(samples: Sequence[Example], limit: int) -> tuple[list[Example], dict[str, int]]:
    """The samples cut to `limit` tokens that have a drafting target, and counts of cut and left-out
    samples. Raises InvalidInput for fewer than two samples: one for training, one for evaluation.
    """
    shortened = [sample.cut(limit) for sample in samples]
    kept = [sample for sample in shortened if sample.targets]
    if len(kept) < 2:
        raise InvalidInput(
            "too few sequences in which the model says a third or later token",
            seen=f"{len(kept)} of {len(samples)}, cut to {limit} tokens",
            allowed="at least 2",
        )
    cut = sum(len(sample) > limit for sample in samples)
    return kept, {"sequences": len(kept), "cut": cut, "left_out": len(samples) - len(kept)}
