"""Steps of open traffic: a step takes the closed groups that agents opened themselves.

A repeated call for a step returns the same groups. No sample starts here; agents open sessions at
any time. In a run with several gateways, the coordinator assigns each gateway's groups to the step.
"""

import asyncio
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from paceline.errors import StaleEpoch
from paceline.messages import merge_arms, stats_from_proto, stats_to_proto, versions_to_proto
from paceline.services.rollout_gateway.background import background, cancel, first_of
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.services.rollout_gateway.runs.sample import AGENT, recorded_sample, sample_finished
from paceline.services.rollout_gateway.sessions.groups import OpenGroup
from paceline.services.rollout_gateway.workers.metrics import regret
from paceline.services.rollout_gateway.workers.router import Router
from paceline.telemetry import get_logger
from paceline.trajectory import SpeculationStats, equal_rewards
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1.trajectory_pb2 import CommandContext


@asynccontextmanager
async def idle_workers(
    router: Router, after_s: float
) -> AsyncIterator[tuple[deque[int], asyncio.Event]]:
    """Inside the block, a worker without a request for `after_s` seconds is released and reported
    once. A worker that another step has released is reported too. Yields the released workers,
    which the caller removes, and an event that is set when another worker is released.

    The last serving worker is never released. At the start, released workers get requests again
    unless a trainer holds them.
    """
    router.lending.keep_spare()
    found, news = deque[int](), asyncio.Event()

    async def watch(index: int) -> None:
        # idle time before the block does not count
        await asyncio.sleep(after_s)
        await router.seats[index].idle_for(after_s)
        released = [seat.released for seat in router.seats]
        if released[index] or released.count(False) > 1:
            if not released[index]:
                router.lending.spare(index)
            found.append(index)
            news.set()

    places = range(len(router.seats))
    watchers = [background(watch(index), f"idle worker {index}") for index in places]
    try:
        yield found, news
    finally:
        await cancel(*watchers)


class Totals:
    """Counts outcomes by worker and in total."""

    def __init__(
        self, shares: Iterable[int], groups: Iterable[str], workers: Iterable[int], started: float
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
            yield rpb.RunTasksResponse(share=self.share(worker))

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

    def _add(self, sample: rpb.SampleFinished, worker: int) -> None:
        share, finished, scored = self.share(worker), self.finished, sample.HasField("reward")
        share.samples += 1
        share.response_tokens += sample.response_tokens
        finished.response_tokens += sample.response_tokens
        finished.scored += scored
        finished.unscored += not scored
        if sample.group_id in self._rewards and scored:
            self._rewards[sample.group_id].append(sample.reward.value)
        self._stats += stats_from_proto(sample.speculation)
        finished.rollout_s = share.elapsed_s

    def _closed(self, group_id: str) -> rpb.ClosedGroup:
        rewards = self._rewards[group_id]
        count, equal = len(rewards), equal_rewards(rewards)
        return rpb.ClosedGroup(group_id=group_id, scored_sessions=count, equal_rewards=equal)

    def share(self, worker: int) -> rpb.ShareDone:
        """The progress of a worker."""
        share = self._shares.setdefault(worker, rpb.ShareDone(worker_index=worker))
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


STEPS_REMEMBERED = 4
log = get_logger(__name__)


@dataclass(eq=False)
class _Taken:
    """Groups of one step, with the outcomes of their sessions."""

    groups: dict[str, list[rpb.SampleFinished]] = field(default_factory=dict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    whole: bool = False  # all groups of the step are assigned
    given: asyncio.Event = field(default_factory=asyncio.Event)  # set when groups are assigned
    epoch: int = 0  # of the last assignment


class OpenRuns:
    """The open steps of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._steps: OrderedDict[tuple[str, int], _Taken] = OrderedDict()
        self._collecting: set[int] = set()  # steps that collect groups themselves
        self._step_left = asyncio.Event()

    async def run(self, request: rpb.RunTasksRequest) -> AsyncGenerator[rpb.RunTasksResponse]:
        """Yield closed groups with their sessions as the step takes them, then the totals."""
        gateway, step = self._gateway, request.context.step
        agents = gateway.agents
        agents.open_step, agents.captures = step, gateway.captures if request.capture else None
        assigned = request.assigned
        totals = Totals((), (), (), asyncio.get_running_loop().time())
        taken, told = await self._taken(request.context), 0
        async with (
            taken.turn,  # a repeated call waits until the previous call has ended
            idle_workers(gateway.router, gateway.config.release_after_s) as (idle, idle_news),
            self._collect(step),
        ):
            while True:
                taken.given.clear()
                whole = taken.whole
                while told < len(taken.groups):
                    group_id, samples = [*taken.groups.items()][told]
                    told += 1
                    for news in totals.group(group_id, samples):
                        yield news
                if whole or (not assigned and told >= request.open_groups):
                    break
                comes = self._group_comes(step, taken if assigned else None)
                await first_of(comes, idle_news.wait(), gateway.weights.damaged())
                idle_news.clear()
                while idle:
                    yield rpb.RunTasksResponse(share=totals.share(idle.popleft()))
                if not assigned and step == min(self._collecting):
                    self._take(taken, agents.groups.pop(), step)

        yield rpb.RunTasksResponse(finished=await totals.closing(gateway))

    @asynccontextmanager
    async def _collect(self, step: int) -> AsyncIterator[None]:
        self._collecting.add(step)
        try:
            yield
        finally:
            self._collecting.discard(step)
            self._step_left.set()

    async def _group_comes(self, step: int, taken: _Taken | None) -> None:
        """Return once groups are assigned, or a group is closed and no earlier step collects
        groups.

        `taken`: of a step whose groups are assigned.
        """
        if taken is not None:
            await taken.given.wait()
            return
        while True:
            await self._gateway.agents.groups.closed()
            if step == min(self._collecting):
                return
            self._step_left.clear()
            await self._step_left.wait()

    async def assign(self, context: CommandContext, most: int, *, last: bool) -> int:
        """Assign at most `most` closed groups to the step; `last` marks the final assignment.

        Returns the number of this gateway's groups in the step. Raises StaleEpoch if a later call
        for the step has assigned groups.
        """
        taken, groups = await self._taken(context), self._gateway.agents.groups
        if context.epoch < taken.epoch:
            message = f"a later call assigns the groups of step {context.step}"
            raise StaleEpoch(message, seen=context.epoch, allowed=f"at least {taken.epoch}")
        taken.epoch = context.epoch
        wanted = len(taken.groups) + most
        while len(taken.groups) < wanted and (group := groups.pop()) is not None:
            self._take(taken, group, context.step)
        taken.whole = last
        taken.given.set()
        return len(taken.groups)

    def _take(self, taken: _Taken, group: OpenGroup | None, step: int) -> None:
        """Send the group's samples to the stream with this step's number, and add the group to the
        step, unless it has no reward.
        """
        if group is None:
            return
        for session in group.members:
            samples = [replace(one, step=step) for one in session.trajectories()]
            self._gateway.agents.put(session, samples)
        if group.scored:
            about = [(one, one.worker_index or 0, AGENT, "stop") for one in group.members]
            taken.groups[group.group_id] = [sample_finished(*one) for one in about]
        else:
            count = len(group.members)
            log.info("a group closed without a reward", group=group.group_id, sessions=count)

    async def _taken(self, context: CommandContext) -> _Taken:
        key = (context.run_id, context.step)
        if key not in self._steps:
            before: dict[str, list[rpb.SampleFinished]] = defaultdict(list)
            for _, branches in sorted((await self._gateway.outbox.finals(*key)).items()):
                sample = recorded_sample(branches, AGENT, finish="stop")
                if self._gateway.names.owns(sample.session_id):
                    before[sample.group_id].append(sample)
            self._steps.setdefault(key, _Taken(before))
            if len(self._steps) > STEPS_REMEMBERED:
                self._steps.popitem(last=False)
        return self._steps[key]
