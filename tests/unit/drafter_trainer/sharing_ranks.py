"""One rank of the hand-out test: rank 0 hands rows out, rank 1 writes the received rows."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from unit.drafter_trainer.samples import sample

from paceline.services.drafter_trainer.learn.membership import announce, hand_out, on_cpu, receive
from paceline.services.drafter_trainer.rows.sample import pack


def main(out: Path) -> None:
    """Two hand-outs with a snapshot between them."""
    dist.init_process_group("gloo")
    members = on_cpu(2)
    if dist.get_rank() == 0:
        own = pack([sample(9, 0)], window=512)
        for row in (
            pack([sample(12, 1), sample(7, 2)], window=512),
            pack([sample(5, 3)], window=512),
        ):
            assert hand_out([own, row], members) is own
            announce("snapshot", members)
        announce("stop", members)
    else:
        received = []
        while (told := receive(members)) != "stop":
            received.append(told)
        torch.save(received, out)
    dist.barrier()
    dist.destroy_process_group()
