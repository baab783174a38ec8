"""One rank of the equality test: activations with different numbers of ranks; rank 0 writes the
results.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from unit.drafter_trainer.samples import TARGET, sample, toy_policy
from whole_tensors import whole_of

from paceline.services.drafter_trainer.config import DrafterOptimizerConfig
from paceline.services.drafter_trainer.learn.learner import DrafterLearner
from paceline.services.drafter_trainer.learn.membership import (
    Membership,
    announce,
    hand_out,
    receive,
)
from paceline.services.drafter_trainer.rows.sample import PolicyHead, pack
from paceline.speculators.eagle import EagleNet
from paceline.speculators.packed import PackedRow
from paceline.training.checkpoints import CheckpointWriter
from paceline.training.process import from_rank_zero

ROWS = 6  # of an optimiser step


def activate(
    learner: DrafterLearner,
    membership: Membership,
    pieces: list[tuple[int, list[PackedRow]]],
    head: PolicyHead,
) -> float:
    """Learn rows on some ranks, then the next rows on the ranks that join, and leave.

    Returns the loss summed over this rank's positions.
    """
    loss = 0.0
    for place, (ranks, rows) in enumerate(pieces):
        assert from_rank_zero(dist.get_rank() == 0)
        members = membership.join(range(ranks))
        learner.attach(members)
        last = place == len(pieces) - 1
        loss += learn(learner, ranks, rows, head, then="stop" if last else "join")
    learner.offload()
    learner.members.meet()
    return loss


def learn(
    learner: DrafterLearner, ranks: int, rows: list[PackedRow], head: PolicyHead, *, then: str
) -> float:
    """Learn the rows until rank 0 announces `then`; return this rank's summed loss."""
    members, loss = learner.members, 0.0
    if dist.get_rank() == 0:
        for first in range(0, len(rows), ranks):
            result = learner.micro_step(hand_out(rows[first : first + ranks], members), head)
            loss += result.loss * result.positions
        announce(then, members)
    elif members.takes_part:
        while not isinstance(row := receive(members), str):
            assert row.lm_head_hash == head.hash
            result = learner.micro_step(row, head)
            loss += result.loss * result.positions
        assert row == then
    return loss


def figures(learner: DrafterLearner, loss: float, prefix: str) -> dict[str, Tensor]:
    """Weights, averaged and last, first moments, steps and summed loss; empty where this rank has
    none.
    """
    whole = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(whole)
    if not learner.members.takes_part:
        return {}
    state = learner.state()
    moments, live = (
        {f"{name}.{key}": whole_of(value) for key, value in part_of(state, part).items()}
        for name, part in (("exp_avg", "exp_avg/"), ("live", "model/"))
    )
    counters = torch.tensor(
        [learner.total_steps, float(whole), learner.total_tokens], dtype=torch.float64
    )
    found = {**learner.snapshot().state_dict(), **live, **moments, "figures": counters}
    return {f"{prefix}.{name}": value for name, value in found.items()}


def part_of(state: dict[str, Any], part: str) -> dict[str, Any]:
    """Return the tensors with names that begin with `part`, under the rest of the name."""
    return {key.removeprefix(part): one for key, one in state.items() if key.startswith(part)}


def write_beside_a_collective(writer: CheckpointWriter, learner: DrafterLearner) -> None:
    """Rank 0 begins to write before it trains, other ranks after: groups must not be mixed up."""
    members, state = learner.members, learner.state()
    assert members.size == 1 or members.writing is not members.group
    if dist.get_rank() != 0:
        members.meet()
        writer.write(state, 1, members.writing)
    else:
        begun, gather = threading.Event(), dist.all_gather

        def announced(*args: Any, **kwargs: Any) -> None:
            begun.set()
            gather(*args, **kwargs)

        dist.all_gather = announced
        writer.write(state, 1, members.writing)
        assert members.size == 1 or begun.wait(30)
        members.meet()
        dist.all_gather = gather
    writer.wait()


def begins_again(out: Path) -> None:
    """Two ranks learn, continue from the weights of rank 0's drafter, and learn one step."""
    dist.init_process_group("gloo")
    membership, head = Membership("cpu"), toy_policy().policy_head()
    config = DrafterOptimizerConfig(lr=1e-2, warmup_steps=0, clip_norm=1e9)
    learner = DrafterLearner(
        EagleNet(TARGET, seed=1), config, micro_batches=ROWS, members=membership.members
    )
    learner.attach(membership.join(range(2)))
    rows = [pack([sample(12, seed)], window=512) for seed in range(2 * ROWS)]
    learn(learner, 2, rows[: ROWS + 2], head, then="again")
    learner.begin_again(EagleNet(TARGET, seed=2) if dist.get_rank() == 0 else None)
    begun = learner.snapshot().state_dict()
    learn(learner, 2, rows[:ROWS], head, then="stop")
    live = part_of(learner.state(), "model/")
    found = {f"begun.{name}": value for name, value in begun.items()}
    found |= {f"learned.{name}": whole_of(value) for name, value in live.items()}
    if dist.get_rank() == 0:
        save_file(found, out)
    dist.barrier()
    dist.destroy_process_group()


def main(out: Path, plan: list[list[tuple[int, int]]]) -> None:
    """Run a plan: for each activation its ranks and rows, followed by every join's ranks and rows.

    A checkpoint is written after the first activation, beside `out`.
    """
    dist.init_process_group("gloo")
    membership, head = Membership("cpu"), toy_policy().policy_head()
    config = DrafterOptimizerConfig(lr=1e-2, warmup_steps=0, clip_norm=1e9)
    learner = DrafterLearner(
        EagleNet(TARGET, seed=1), config, micro_batches=ROWS, members=membership.members
    )
    writer = CheckpointWriter(out.with_suffix(".checkpoints"), lambda state, directory: None)
    rows = [
        pack([sample(9 + 3 * (r % 4) + s, 4 * r + s) for s in range(4)], window=512)
        for r in range(3 * ROWS)
    ]
    found: dict[str, Tensor] = {}
    loss, given = 0.0, 0
    for number, activation in enumerate(plan):
        pieces = []
        for ranks, count in activation:
            pieces.append((ranks, rows[given : given + count]))
            given += count
        loss += activate(learner, membership, pieces, head)
        if number == 0:
            found |= figures(learner, loss, "first")
            write_beside_a_collective(writer, learner)
    found |= figures(learner, loss, "last")
    if dist.get_rank() == 0:
        save_file(found, out)
    dist.barrier()
    dist.destroy_process_group()
