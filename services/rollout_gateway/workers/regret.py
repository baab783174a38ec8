"""Estimates the cost of the bandit's choices of arms."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.v1 import engine_pb2 as pb


def regret(arms: Iterable[pb.ArmStats]) -> float:
    """Share of tokens per second lost to arms other than the best arm in hindsight; 0 to 1, 0
    without rounds.

    Of group g with arms a, n_a rounds and mean m_a tokens/s: sum_a n_a (max m - m_a) / max m,
    summed over the groups and divided by all their rounds.

    This is an estimate. Each arm is judged by the mean of its own rounds, although their batch
    sizes and contexts differ from other arms'. The mean covers the window, while rounds count since
    the start. An arm without a round in the window is left out.
    """
    groups: dict[int, list[pb.ArmStats]] = {}
    for one in arms:
        if one.pulls and one.mean_tokens_per_s > 0:
            groups.setdefault(one.batch_group, []).append(one)
    lost, rounds = 0.0, 0
    for group in groups.values():
        best = max(one.mean_tokens_per_s for one in group)
        lost += sum(one.pulls * (best - one.mean_tokens_per_s) / best for one in group)
        rounds += sum(one.pulls for one in group)

    return lost / rounds if rounds else 0.0
