"""Tests a new version set on one worker, the canary, before the other workers load it.

The canary answers a few probes with the newest prompts of the gateway. Their log-probs have to be
finite. A new drafter also needs enough accepted drafts, compared with the serving drafter. The
canary's other chunks are withheld meanwhile. They are delivered when the set passes, and drawn
again under the former set when it fails.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

from paceline.arm_names import OFF, speculator_of
from paceline.errors import DeadlineExceeded, PacelineError, Unavailable, WeightsError
from paceline.local.patience import WorkClock
from paceline.services.rollout_gateway import metrics
from paceline.services.rollout_gateway.config import CanaryConfig
from paceline.services.rollout_gateway.workers.placement import Seat
from paceline.services.rollout_gateway.workers.process import WorkerProcess
from paceline.services.rollout_gateway.workers.router import Router
from paceline.telemetry import get_logger, names, span
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.weights import Spool

REFUSED = "CANARY"
"""Error reason of a set that a canary refused."""
LOST = "CANARY_LOST"
"""Error reason of a set when every worker that tried it was lost."""
FINITE_TOKENS = 4
"""Tokens of one probe for the check of finite log-probs."""
LEAST_ACCEPTED = 8
"""Accepted drafts of the serving drafter that the comparison needs. With fewer, a good drafter may
by chance have almost none.
"""
_MADE_UP = list(range(2, 18))  # token ids of a prompt before the first request
_UNTRAINED = ("", "ngram")

Commit = Callable[[WorkerProcess], Awaitable[None]]
"""Has one worker serve a set."""

log = get_logger(__name__)


class Drafted(NamedTuple):
    """The accepted drafts of a probe, and their mean per round."""

    accepted: int
    per_round: float


class Canary:
    """Chooses the canary worker and probes it."""

    def __init__(self, router: Router, spool: Spool, config: CanaryConfig) -> None:
        self._router = router
        self._spool = spool
        self._config = config
        self._numbers = itertools.count(1 << 62)  # requests of agents are counted from 1

    async def test_set(
        self, able: list[WorkerProcess], served: VersionSet, versions: VersionSet, commit: Commit
    ) -> WorkerProcess | None:
        """Commit the set on a canary and judge it there.

        Returns the canary, which now serves the set; None without a candidate, or when canaries are
        disabled. `able`: candidates without a lease. Raises WeightsError with the check and
        the value when the set is refused, or when all workers died under it. Raises the error of
        `commit` when it failed on all.
        """
        if not self._config.enabled or not able:
            return None
        failures: list[PacelineError] = []
        for process in self._order(able):
            number = self._router.seats[process.index].number
            about = {names.WORKER: number, names.SET_SEQ: versions.seq}
            try:
                with span(names.WEIGHTS_CANARY, about):
                    await self._judge(process, served, versions, commit)
                return process
            except PacelineError as error:
                if error.reason == REFUSED:
                    raise
                log.warning("no verdict of a canary", worker=process.index, error=str(error))
                failures.append(error)
        if all(isinstance(one, Unavailable | DeadlineExceeded) for one in failures):
            message = f"every engine worker that tried set {versions.seq} was lost"
            raise WeightsError(message, seen=str(failures[0]), reason=LOST)
        raise failures[0]

    def _order(self, processes: Sequence[WorkerProcess]) -> list[WorkerProcess]:
        """Candidates with the fewest requests first. Released workers only count when all are
        released, and lent workers go last, since a lent worker has to take its memory for the
        trial.
        """
        seats = self._router.seats
        there = [one for one in processes if not seats[one.index].released] or processes
        return sorted(there, key=lambda one: (seats[one.index].lent, len(seats[one.index].live)))

    async def _judge(
        self, process: WorkerProcess, served: VersionSet, versions: VersionSet, commit: Commit
    ) -> None:
        """Raises WeightsError with the reason REFUSED when the set fails a check on this worker. A
        worker that failed is replaced by a worker with the former set.
        """
        seat = self._router.seats[process.index]
        arm = self._arm(process, versions.drafter) if versions.drafter > served.drafter else ""
        async with self._awake(seat, process):
            former = arm and (self._arm(process, served.drafter) or arm)
            before = await self._drafted(seat, former) if former else None
            seat.withheld = []
            try:
                await commit(process)
                await self._check_set(seat, process, versions, before)
            except PacelineError as error:
                if error.reason == REFUSED or isinstance(error, DeadlineExceeded):
                    await process.replace()
                raise
            finally:
                if not process.lost.done():  # else the router places its requests again
                    self._router.deliver_withheld(seat)

    async def _check_set(
        self, seat: Seat, process: WorkerProcess, versions: VersionSet, before: Drafted | None
    ) -> None:
        refusal = partial(_refusal, process, versions)
        try:
            (answer,) = await self._probe(seat, OFF, FINITE_TOKENS, 1)
        except DeadlineExceeded as error:
            raise refusal("an answer to the probe", str(error), "one in time") from error
        process.require_alive()  # a lost worker gives no verdict
        if answer.error:
            raise refusal("finite log-probs", answer.error, "finite numbers")
        # a worker leaves out a damaged drafter
        taken = process.versions.drafter == versions.drafter
        if before is None or before.accepted < LEAST_ACCEPTED or not taken:
            return
        after = await self._drafted(seat, self._arm(process, versions.drafter))
        process.require_alive()
        least = self._config.accepted * before.per_round
        if after is not None and after.per_round >= least:
            return
        seen = "no drafts" if after is None else f"{after.per_round:.3f} accepted drafts a round"
        share = f"{self._config.accepted:g} of the serving drafter's {before.per_round:.3f}"
        raise refusal("acceptance", seen, f">= {least:.3f}, {share}")

    async def _drafted(self, seat: Seat, arm: str) -> Drafted | None:
        """Draft counts of an arm on the probes; None when the arm cannot draft."""
        prompts = max(len(self._router.prompts), 1)
        answers = await self._probe(seat, arm, self._config.tokens, prompts)
        if any(answer.error for answer in answers):
            return None
        stats = [answer.speculation for answer in answers]
        rounds = sum(one.drafted_rounds for one in stats)
        accepted = sum(one.accepted_tokens for one in stats)
        return Drafted(accepted, accepted / rounds) if rounds else None

    async def _probe(self, seat: Seat, arm: str, tokens: int, count: int) -> list[pb.TokenChunk]:
        """Answers to the newest prompts. Raises DeadlineExceeded."""
        ready = self._router.ready
        room = max(1, min(256, ready.max_sequence_tokens - tokens))
        prompts = [*self._router.prompts][-count:] or [_MADE_UP]
        sampling = tpb.SamplingParams(temperature=1, max_tokens=tokens, seed=1, ignore_eos=True)
        forced, requests = arm if arm in ready.arms else "", []
        for prompt in prompts:
            request = pb.EngineRequest(request_id=next(self._numbers), sampling=sampling)
            request.prompt_token_ids.extend(token % ready.vocab_size for token in prompt[-room:])
            request.forced_arm, request.probe = forced, True
            requests.append(request)
        process, seconds = seat.process, self._config.deadline_s
        clock = WorkClock(lambda: [process.pid] if process and process.pid else [])
        answers = asyncio.ensure_future(self._router.probe(seat, requests))
        try:
            if await clock.wait((answers,), seconds):
                return answers.result()
        finally:
            answers.cancel()
        message = f"engine worker {seat.index} does not answer the canary's probe"
        raise DeadlineExceeded(message, seen=f"{seconds:g} s")

    def _arm(self, process: WorkerProcess, drafter: int) -> str:
        """An arm that drafts with this drafter version; empty without any."""
        kind, target = "", pb.WEIGHT_TARGET_DRAFTER
        if self._spool.has(target, drafter) and (found := self._spool.manifest(target, drafter)):
            kind = found.metadata["speculator"]
        speculators = {arm: speculator_of(arm) for arm in process.ready.arms}
        trained = (arm for arm, one in speculators.items() if one not in _UNTRAINED)
        own = (arm for arm, one in speculators.items() if one == kind)
        return next(own if kind else trained, "")

    @asynccontextmanager
    async def _awake(self, seat: Seat, process: WorkerProcess) -> AsyncIterator[None]:
        """Inside the block a lent worker has its memory."""
        if not seat.lent:
            yield
            return
        await process.restore_memory()
        try:
            yield
        finally:
            if seat.lent and not process.lost.done():
                try:
                    await process.release_memory()
                except PacelineError as error:
                    log.error("a canary keeps a lent slot's memory", error=str(error))
                    await process.replace()


def _refusal(
    process: WorkerProcess, versions: VersionSet, check: str, seen: str, allowed: str
) -> WeightsError:
    """The error for a set that failed a check; counts it."""
    metrics.SETS_REFUSED.record(check=check)
    about = {"check": check, "seen": seen, "allowed": allowed}
    log.error("set_refused", worker=process.index, seq=versions.seq, **about)
    worker = f"{process.name}, the canary"
    message = f"{worker}, refused set {versions.seq} ({versions}): {check}"
    return WeightsError(message, seen=seen, allowed=allowed, reason=REFUSED)
