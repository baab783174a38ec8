"""`python -m drafter_trainer.rank`: one rank of the trainer. Owns set-up and what a rank does between leases."""

from __future__ import annotations

import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from drafter_trainer import messages as m
from drafter_trainer import sharing
from drafter_trainer.checkpoint import CheckpointWriter, read_checkpoint
from drafter_trainer.config import DrafterTrainerConfig
from drafter_trainer.heads import PolicyHeads, load_policy_head
from drafter_trainer.learner import DrafterLearner
from drafter_trainer.link import TrainerLink, activation_span
from drafter_trainer.trainer import DrafterTrainer
from paceline import telemetry
from paceline.local.ranks import RankLink
from paceline.models.config import read_config
from paceline.speculators.eagle import EagleNet
from paceline.speculators.eagle_checkpoint import load_eagle, save_eagle
from paceline.streams import RedisStream, connect, run_key

IDLE_S = 1.0
COLLECTIVE_DEADLINE = timedelta(seconds=120)


class Rank:
    """One process of the group: rank 0 runs the loop, the others follow it row by row."""

    def __init__(self, config: DrafterTrainerConfig) -> None:
        self._config = config
        self._dtype = getattr(torch, config.serving_dtype)
        ranks = RankLink.from_environment()
        self.rank = ranks.rank
        stream = None
        if ranks.rank == 0:
            stream = RedisStream(connect(config.redis.features), run_key(config.run.id, "features"))
        self.link = TrainerLink(ranks, stream)
        self.heads = PolicyHeads()
        self.heads.add(load_policy_head(Path(config.model), 0, self._dtype))
        self.learner = DrafterLearner(
            self._initial_net(), config.optimizer, micro_batches=config.micro_batches_per_step
        )
        directory = Path(config.run.dir) / "checkpoints" / "drafter"
        self.directory = directory
        self.trainer = DrafterTrainer(
            config, self.learner, self.heads, self.link, directory.parent / "drafter-candidates"
        )
        self._writer = CheckpointWriter(directory)
        self._saved_steps, self._saved_at = 0, time.monotonic()
        if config.resume and (state := read_checkpoint(directory)) is not None:
            self.trainer.load_state(state)
            self._saved_steps = self.learner.total_steps
        self.link.on_command = self.obey
        self.link.open_stream()
        ranks.ready()

    def _initial_net(self) -> EagleNet:
        target = read_config(Path(self._config.model))
        if self._config.drafter == "eagle":
            return EagleNet(target, seed=self._config.run.seed)
        return load_eagle(Path(self._config.drafter), target)

    def run(self) -> None:
        """Until SIGTERM: wait for a lease, train under it, write a checkpoint when it is time."""
        while not self.link.stopping:
            command = self.link.wait_activation(IDLE_S)
            if command is None:
                continue
            with activation_span(command):
                if self.rank == 0:
                    self.link.send(self.trainer.run_activation(command))
                else:
                    self.follow()
            self.save_if_due()
        self.save()
        self._writer.wait()
        self.link.close()

    def follow(self) -> None:
        """Ranks beside rank 0: take part in every collective it announces."""
        while (row := sharing.receive(self.heads)) != "stop":
            if isinstance(row, str):
                self.learner.snapshot()
                continue
            head = self.heads.get(row.lm_head_hash)
            assert head is not None
            self.learner.micro_step(row, head)

    def obey(self, message: m.Message) -> None:
        """Commands that need no lease."""
        match message:
            case m.NewHead(policy_version, path):
                self.heads.add(load_policy_head(Path(path), policy_version, self._dtype))
            case m.Serving(_, drafter_version):
                self.trainer.on_serving(drafter_version)
            case m.Save():
                self.save()
                self._writer.wait()
                if self.rank == 0:
                    self.link.send(m.Saved(str(self.directory), self.learner.total_steps))
            case _:
                raise TypeError(f"a rank does not take {type(message).__name__}")

    def save_if_due(self) -> None:
        """A checkpoint at most every `checkpoint_interval_s`; all ranks agree because they count the same steps."""
        if self.link.world_size == 1 and time.monotonic() - self._saved_at < self._config.checkpoint_interval_s:
            return
        if self.learner.total_steps - self._saved_steps >= 1:
            self.save()

    def save(self) -> None:
        """Starts a checkpoint of what was learned; a collective of all ranks."""
        if self.learner.total_steps == self._saved_steps:
            return
        state = self.trainer.state()
        if self.rank == 0:
            self._writer.write(state)
            save_eagle(self.trainer.serving.net, self.directory.parent / "drafter-serving")
        self._saved_steps, self._saved_at = self.learner.total_steps, time.monotonic()


def main() -> None:
    """Takes the service's config as one JSON argument from the parent and runs."""
    config = DrafterTrainerConfig.model_validate_json(sys.argv[1])
    telemetry.setup("drafter_trainer", config.telemetry)
    torch.set_num_threads(config.threads_per_rank)
    torch.manual_seed(config.run.seed)
    dist.init_process_group("gloo", timeout=COLLECTIVE_DEADLINE)
    rank = Rank(config)
    signal.signal(signal.SIGTERM, lambda *_: setattr(rank.link, "stopping", True))
    try:
        rank.run()
    finally:
        telemetry.shutdown()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
