"""A rank for tests that computes with the other ranks: answers a number with the sum over all
ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from paceline.local.patience import patient
from paceline.ranks.group import RankLink
from paceline.training.process import join_ranks


def main() -> None:
    link = RankLink.from_environment()
    join_ranks("cpu", patient(30), threads=1, seed=0)
    group = dist.new_group()
    link.ready()
    while True:
        message = link.receive(60.0)
        if message is not None:
            number = torch.tensor(float(message) + link.rank)
            dist.all_reduce(number, group=group)
            link.send(str(number.item()).encode())


if __name__ == "__main__":
    main()
