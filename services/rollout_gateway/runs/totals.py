"""Counts the outcomes of a RunTasks call: shares, totals and the sum of the workers' statistics."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from paceline.messages import merge_arms, stats_from_proto, stats_to_proto, versions_to_proto
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.services.rollout_gateway.workers.regret import regret
from paceline.trajectory import SpeculationStats, equal_rewards
from paceline.v1 import rollout_pb2 as rpb


class Totals:
    """Counts outcomes by worker and in total."""

    def __init__(
        self,
        shares: Iterable[int],
        groups: Iterable[str],
        workers: Iterable[int],
        started: float,
    ) -> None:
        """`shares`: the worker of each sample. `groups`: the group of each training sample.
        `workers`: all workers with a share, even an empty share. `started`: seconds of the event
        loop's clock.
        """
        self._left = Counter(shares)
        self._started = started
        self._shares = {index: rpb.ShareDone(worker_index=index) for index in workers}
        self._stats = SpeculationStats()
        self._siblings = Counter(groups)  # samples that have not ended, by group
        self._rewards = {group: list[float]() for group in self._siblings}  # of scored sessions
        self.finished = rpb.TasksFinished()

    def idle_shares(self) -> list[rpb.ShareDone]:
        """Shares of workers without a sample in this call."""
        return [share for index, share in self._shares.items() if not self._left[index]]

    def news(self, sample: rpb.SampleFinished, worker: int) -> Iterator[rpb.RunTasksResponse]:
        """Count a sample of a worker's share.

        Yields the sample, its group when that closes, and the share when it is complete.
        """
        self._add(sample, worker)
        yield rpb.RunTasksResponse(sample=sample)
        if sample.group_id in self._siblings:
            self._siblings[sample.group_id] -= 1
            if not self._siblings[sample.group_id]:
                yield rpb.RunTasksResponse(closed=self._closed(sample.group_id))
        self._left[worker] -= 1
        if not self._left[worker]:
            yield rpb.RunTasksResponse(share=self._share(worker))

    def group(
        self, group_id: str, samples: Sequence[rpb.SampleFinished]
    ) -> Iterator[rpb.RunTasksResponse]:
        """Count the sessions of another closed training group; a group without sessions is
        ignored.
        """
        if not samples:
            return
        self._rewards.setdefault(group_id, [])
        for sample in samples:
            self._add(sample, sample.worker_index)
            yield rpb.RunTasksResponse(sample=sample)
        yield rpb.RunTasksResponse(closed=self._closed(group_id))

    def _share(self, worker: int) -> rpb.ShareDone:
        return self._shares.setdefault(worker, rpb.ShareDone(worker_index=worker))

    def _add(self, sample: rpb.SampleFinished, worker: int) -> None:
        share, finished = self._share(worker), self.finished
        share.samples += 1
        share.response_tokens += sample.response_tokens
        finished.response_tokens += sample.response_tokens
        finished.scored += sample.HasField("reward")
        finished.unscored += not sample.HasField("reward")
        if sample.group_id in self._rewards and sample.HasField("reward"):
            self._rewards[sample.group_id].append(sample.reward.value)
        self._stats += stats_from_proto(sample.speculation)
        finished.rollout_s = share.elapsed_s = asyncio.get_running_loop().time() - self._started

    def _closed(self, group_id: str) -> rpb.ClosedGroup:
        rewards = self._rewards[group_id]
        return rpb.ClosedGroup(
            group_id=group_id,
            scored_sessions=len(rewards),
            equal_rewards=equal_rewards(rewards),
        )

    def share(self, worker: int) -> rpb.ShareDone:
        """The progress of a worker that is about to release its slot."""
        share = self._share(worker)
        share.elapsed_s = asyncio.get_running_loop().time() - self._started
        return share

    async def closing(self, gateway: Gateway) -> rpb.TasksFinished:
        """The last message of the call."""
        finished = self.finished
        finished.speculation.CopyFrom(stats_to_proto(self._stats))
        finished.versions.CopyFrom(versions_to_proto(gateway.weights.versions))
        healths = (await gateway.router.healths()).values()
        finished.arms.extend(merge_arms(arm for one in healths for arm in one.arms))
        finished.regret = regret(finished.arms)
        finished.closed_groups.extend(map(self._closed, self._rewards))
        return finished
