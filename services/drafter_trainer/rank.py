"""`python -m drafter_trainer.rank`: one rank of the trainer. Owns set-up and what a rank does between leases."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drafter_trainer import messages as m
from drafter_trainer import sharing
from drafter_trainer.candidates import Candidates
from drafter_trainer.checkpoint import CheckpointWriter, read_checkpoint
from drafter_trainer.config import CONFIG_VARIABLE, DrafterTrainerConfig
from drafter_trainer.heads import PolicyHead, PolicyHeads, load_policy_head
from drafter_trainer.link import TrainerLink, activation_span
from drafter_trainer.students import Students, initial_nets
from drafter_trainer.trainer import DrafterTrainer
from paceline import telemetry
from paceline.errors import InvalidInput, PacelineError
from paceline.local.ranks import RankLink
from paceline.models.config import read_config
from paceline.streams import RedisStream, connect, run_key

IDLE_S = 1.0
HEAD_DEADLINE_S = 20.0
COLLECTIVE_DEADLINE = timedelta(seconds=120)

log = telemetry.get_logger("drafter_trainer.rank")


class Rank:
    """One process of the group: rank 0 runs the loop, the others follow it row by row."""

    def __init__(self, config: DrafterTrainerConfig, ranks: RankLink) -> None:
        self._config = config
        self._target = read_config(Path(config.model))
        self.rank = ranks.rank
        stream = None
        if ranks.rank == 0:
            stream = RedisStream(connect(config.redis.features), run_key(config.run.id, "features"))
        self.link = TrainerLink(ranks, stream, self._target)
        self.heads = PolicyHeads()
        self.heads.add(load_policy_head(Path(config.model), 0))
        nets = initial_nets(config, self._target)
        checkpoints = Path(config.run.dir) / "checkpoints"
        self.directory = checkpoints / "drafter"
        candidates = Candidates(checkpoints / "drafter-candidates", self._target)
        if self.rank == 0 and not candidates.versions:
            candidates.save(0, nets[0])
        self._whole = nets[0].twin()
        students = Students(config, nets)
        self.learner = students.primary.learner
        self.trainer = DrafterTrainer(config, students, self.heads, self.link, candidates)
        self._writer = CheckpointWriter(self.directory, self._write_drafter)
        self._saved_steps, self._saved_at = 0, time.monotonic()
        if config.resume and (state := read_checkpoint(self.directory)) is not None:
            self.trainer.load_state(state)
            self._saved_steps = self.learner.total_steps
        self.link.on_command = self.obey
        self.link.open_stream()

    def run(self) -> None:
        """Until SIGTERM: wait for a lease, train under it, write a checkpoint when it is time."""
        self.report()
        while not self.link.stopping:
            match self.link.wait_turn(IDLE_S):
                case m.Activate() as command:
                    with activation_span(command):
                        self.activate(command)
                    self.save_if_due()
                case m.Save():
                    self.save(always=True)
                    self._writer.wait()
                    if self.rank == 0:
                        self.link.send(m.Saved(str(self.directory), self.learner.total_steps))
        self.save()
        self._writer.wait()
        self.link.close()

    def activate(self, command: m.Activate) -> None:
        """Trains under a lease; the ranks beside rank 0 take part in every collective that it announces."""
        if self.rank == 0:
            self.link.send(self.trainer.run_activation(command))
            return
        while (told := sharing.receive()) is not None:
            student, row = told
            learner = self.trainer.students[student].learner
            if row is None:
                learner.snapshot()
            else:
                learner.micro_step(row, self._head(row.lm_head_hash))

    def _head(self, wanted: str) -> PolicyHead:
        """The head rank 0 trains with; its parent tells all ranks of it, but this one may not have looked yet."""
        self.link.wait_until(lambda: self.heads.get(wanted) is not None, HEAD_DEADLINE_S)
        head = self.heads.get(wanted)
        assert head is not None
        return head

    def obey(self, message: m.Message) -> None:
        """Commands that need no lease."""
        match message:
            case m.NewHead(policy_version, path):
                self.add_head(policy_version, Path(path))
                self.report()
            case m.Serving(_, drafter_version):
                if self.rank == 0:
                    self.trainer.on_serving(drafter_version)
            case _:
                raise TypeError(f"a rank does not take {type(message).__name__}")

    def add_head(self, policy_version: int, path: Path) -> None:
        """Learns a policy head; one that cannot be read is left out, its rows then count as stale."""
        try:
            head = load_policy_head(path, policy_version)
            shape, allowed = tuple(head.lm_head.shape), (self._target.vocab_size, self._target.hidden_size)
            if shape != allowed or tuple(head.embed_tokens.shape) != allowed:
                raise InvalidInput("a policy head of another shape", seen=shape, allowed=allowed)
            self.heads.add(head)
        except PacelineError as error:
            log.error("policy head cannot be used", policy_version=policy_version, error=str(error))

    def report(self) -> None:
        """Tells the parent where rank 0 stands."""
        if self.rank == 0:
            self.link.send(self.trainer.standing())

    def save_if_due(self) -> None:
        """A checkpoint at most every `checkpoint_interval_s`; all ranks agree because they count the same steps."""
        if self.link.world_size == 1 and time.monotonic() - self._saved_at < self._config.checkpoint_interval_s:
            return
        if self.learner.total_steps - self._saved_steps >= 1:
            self.save()

    def save(self, *, always: bool = False) -> None:
        """Starts a checkpoint of what was learned since the last one; a collective of all ranks."""
        if self.learner.total_steps == self._saved_steps and not always:
            return
        state = self.trainer.state()
        if self.rank == 0:
            self._writer.write(state)
        self._saved_steps, self._saved_at = self.learner.total_steps, time.monotonic()

    def _write_drafter(self, state: dict[str, Any], directory: Path) -> None:
        net = self._whole.twin()
        net.load_tensors(state["learner"]["model"])
        net.save(directory)


def main() -> None:
    """Takes the service's config from the environment, where the parent put it, and runs."""
    link = RankLink.from_environment()
    config = DrafterTrainerConfig.model_validate_json(os.environ[CONFIG_VARIABLE])
    telemetry.setup("drafter_trainer", config.telemetry)
    os.nice(config.niceness)
    torch.set_num_threads(config.threads_per_rank)
    torch.manual_seed(config.run.seed)
    dist.init_process_group("gloo", timeout=COLLECTIVE_DEADLINE)
    rank = Rank(config, link)
    signal.signal(signal.SIGTERM, lambda *_: setattr(rank.link, "stopping", True))
    link.ready()
    try:
        rank.run()
    finally:
        telemetry.shutdown()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
