"""Runs one rank of the policy trainer as a child process of the service."""

import contextlib
import signal
import sys

import torch
import torch.distributed as dist

from paceline import telemetry
from paceline.errors import InternalError
from paceline.ranks import group, messages
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn.build import build_learner, form_mesh
from paceline.services.policy_trainer.messages import MESSAGES, Command, Learn
from paceline.services.policy_trainer.orders import Orders
from paceline.services.policy_trainer.rank_zero import RankZero
from paceline.services.policy_trainer.trainer import PolicyTrainer

_COMMAND_WAIT_S = 3600.0
_WRITTEN_POLL_S = 0.05  # while a checkpoint is being written


def build(config: PolicyTrainerConfig, link: group.RankLink) -> PolicyTrainer:
    """Builds this rank's trainer and resumes it. Results are reproducible: equal batch, weights,
    and number of ranks and threads give equal bits. Collective.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling fresh memory only helps to find reads of uninitialised memory, and costs a pass over
    # every buffer.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    progress = messages.ProgressReport(lambda doing: link.send(MESSAGES.encode(doing)))

    def loads(read: int, of: int) -> None:
        progress.goes_on(f"loads the model, {read / 1e6:.0f} of {of / 1e6:.0f} MB")

    progress.begins("joins the other ranks")
    learner = build_learner(config, form_mesh(config), loads)
    zero = RankZero(config, link) if dist.get_rank() == 0 else None
    trainer = PolicyTrainer(config, learner, zero, progress)
    trainer.resume()
    return trainer


def main() -> None:
    """Builds the trainer, reports that the rank is ready, and handles commands until the parent's
    SIGTERM. At the end, writes the queued spans within the deadline of telemetry.shutdown. Raises
    InternalError for a message that is no command.
    """
    link = group.RankLink.from_environment()
    config = link.config(PolicyTrainerConfig)
    telemetry.setup("policy_trainer", config.telemetry)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        trainer = build(config, link)
        link.ready()
        trainer.started()
        orders = Orders(trainer)
        with contextlib.closing(link):
            while True:
                busy = trainer.settle_when_written()
                data = link.receive(_WRITTEN_POLL_S if busy else _COMMAND_WAIT_S)
                command = None if data is None else MESSAGES.decode(data)
                if isinstance(command, Learn):
                    orders.handle(command)
                elif isinstance(command, Command):
                    trainer.handle(command)
                elif command is not None:
                    seen = type(command).__name__
                    raise InternalError("a rank takes commands only", seen=seen)
    finally:
        telemetry.shutdown()


if __name__ == "__main__":
    main()
