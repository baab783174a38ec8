"""Checkpoints of the policy: a Hugging Face directory beside the optimiser state. Owns the files
and how many are kept.

`<run.dir>/checkpoints/policy/step-<policy version>/`: config.json, model.safetensors (fp32 master
weights), the tokenizer's files, optimizer.safetensors (whole moments, so that any number of ranks
can load them), trainer.json.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import DataLoss
from paceline.tagged_json import from_object, to_object
from policy_trainer.learn.learner import Learner
from policy_trainer.learn.parallel import gather_full, scatter_like
from policy_trainer.messages import Progress

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".index.json")
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a checkpoint holds, whole, on the CPU of rank 0; empty on the other ranks."""

    weights: dict[str, Tensor]  # Hugging Face name -> fp32
    moments: dict[str, Tensor]  # "<moment>/<parameter>" -> fp32
    updates: int


def take_snapshot(learner: Learner) -> Snapshot:
    """Gathers weights and optimiser state; collective."""
    state = learner.optimizer.state
    moments = (
        (f"{moment}/{name}", state[parameter][moment])
        for name, parameter in learner.model.named_parameters()
        if parameter in state
        for moment in _MOMENTS
    )
    return Snapshot(policy_weights(learner), gather_full(moments), learner.updates)


def policy_weights(learner: Learner) -> dict[str, Tensor]:
    """Whole fp32 weights under their Hugging Face names; {} on other ranks than 0. Collective."""
    return gather_full(
        (name.removeprefix("lm."), p) for name, p in learner.model.named_parameters()
    )


def restore_optimizer(learner: Learner, directory: Path) -> None:
    """Loads this rank's shards of the optimiser state.

    Raises DataLoss when the file lacks a parameter.
    """
    learner.updates = int(json.loads((directory / "trainer.json").read_text())["updates"])
    if learner.updates == 0:
        return
    with safe_open(directory / "optimizer.safetensors", framework="pt") as file:
        known = set(file.keys())
        for name, parameter in learner.model.named_parameters():
            state: dict[str, Tensor] = {"step": torch.tensor(float(learner.updates))}
            for moment in _MOMENTS:
                if f"{moment}/{name}" not in known:
                    raise DataLoss(
                        f"{directory} holds no {moment} of {name}", seen=sorted(known)[:4]
                    )
                state[moment] = scatter_like(file.get_tensor(f"{moment}/{name}"), parameter)
            learner.optimizer.state[parameter] = state


class Checkpoints:
    """Directory of one run's checkpoints. Written by rank 0, read by all."""

    def __init__(self, root: Path, start_model: Path, *, keep: int, keep_every: int) -> None:
        self._root = root
        self._start_model = start_model
        self._keep = keep
        self._keep_every = keep_every

    def newest(self) -> Path | None:
        """Directory of the newest checkpoint; None when there is none."""
        found = self._versions()
        return self._root / f"step-{found[-1]}" if found else None

    def progress(self, directory: Path) -> Progress:
        """Where the trainer stood. Raises DataLoss when the file does not say."""
        try:
            state = json.loads((directory / "trainer.json").read_text())
            return from_object(Progress, state["progress"])
        except (OSError, ValueError, KeyError, TypeError, DataLoss) as error:
            raise DataLoss(
                f"{directory} is no checkpoint of this trainer", seen=repr(error)
            ) from error

    def write(self, snapshot: Snapshot, progress: Progress) -> Path:
        """Writes a checkpoint under a temporary name, renames it when all of it is on disk, prunes
        old ones.
        """
        final = self._root / f"step-{progress.policy_version}"
        fresh = self._root / f".step-{progress.policy_version}.tmp"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        self._copy_small_files(fresh)
        save_file(snapshot.weights, fresh / "model.safetensors", metadata={"format": "pt"})
        save_file(snapshot.moments, fresh / "optimizer.safetensors")
        state = {"progress": to_object(progress), "updates": snapshot.updates}
        (fresh / "trainer.json").write_text(json.dumps(state, indent=1))
        for path in [*fresh.iterdir(), fresh]:
            _sync(path)
        if final.exists():
            shutil.rmtree(final)
        fresh.replace(final)
        _sync(self._root)
        self._prune()
        return final

    def _versions(self) -> list[int]:
        names = (path.name.removeprefix("step-") for path in self._root.glob("step-*"))
        return sorted(int(name) for name in names if name.isdigit())

    def _copy_small_files(self, target: Path) -> None:
        for path in self._start_model.iterdir():
            if path.is_file() and not path.name.endswith(_WEIGHT_FILES):
                shutil.copyfile(path, target / path.name)
        config = json.loads((target / "config.json").read_text())
        config.pop("torch_dtype", None)
        (target / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2))

    def _prune(self) -> None:
        versions = self._versions()
        for version in versions[: -self._keep]:
            if not (self._keep_every and version % self._keep_every == 0):
                shutil.rmtree(self._root / f"step-{version}")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
