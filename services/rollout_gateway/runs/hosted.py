"""Environments of the package verifiers: each runs in a child process that leads offered samples.

A host claims the offers of its environment, as an agent does, and hands each session's key to the
child. The child generates under the key over HTTP and answers with the reward. So an attempt has a
session, a seed and a place of its own, and a fault is offered again as an agent's would be.
"""

import asyncio
import json
from asyncio import FIRST_COMPLETED
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from paceline import errors
from paceline.local.child import Child
from paceline.local.patience import patient
from paceline.services.rollout_gateway import metrics
from paceline.services.rollout_gateway.background import background, cancel
from paceline.services.rollout_gateway.environments import EpisodeTask
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.services.rollout_gateway.sessions import FailReason
from paceline.services.rollout_gateway.sessions.session import Grant, Session
from paceline.tasks import verifiers
from paceline.telemetry import get_logger

PARALLEL = 256
"""Samples of one environment whose model has turns left, at once; further samples wait."""
CANCEL_S = 10.0
"""Seconds in which a child ends a sample; a child that is late is killed."""
FULL_S = 1.0
"""Pause before another claim while too many sessions are open."""
MAX_BYTES = 64 << 20
"""Maximum bytes of one message of a child."""
_ENDED = b'{"refused": "its process ended"}'
log = get_logger(__name__)


class HostedEnvironment:
    """One environment: its child, and the samples that the child leads."""

    def __init__(self, gateway: Gateway, name: str) -> None:
        self._gateway, self._name = gateway, name
        self._child: Child | None = None
        self._starting = asyncio.Lock()
        self._grouped = False  # siblings are scored together
        self._places = asyncio.Semaphore(PARALLEL)
        self._rolling: set[str] = set()  # session keys that hold a place
        self._answers: dict[str, asyncio.Future[Mapping[str, Any]]] = {}  # by session key
        self._claims: asyncio.Task[None] | None = None
        self._samples: set[asyncio.Task[None]] = set()

    async def prepare(self) -> None:
        """Start the child and the claims. Raises ConfigError when it cannot be loaded."""
        await self._running()
        if self._claims is None or self._claims.done():
            self._claims = background(self._claim(), f"samples of {self._name}")

    async def stop(self) -> None:
        """End the claims, the samples and the child."""
        await cancel(self._claims, *self._samples)
        if self._child is not None:
            await self._child.stop()

    async def _claim(self) -> None:
        while True:
            await self._places.acquire()
            try:
                claimed = await self._gateway.agents.claim(None, environment=self._name)
            except errors.Unavailable:  # the gateway stops
                return
            except errors.ResourceExhausted as error:  # too many sessions are open
                log.warning("a sample of an environment waits", error=str(error))
                self._places.release()
                await asyncio.sleep(FULL_S)
                continue
            assert claimed is not None
            self._rolling.add(claimed[0].api_key)
            sample = background(self._lead(*claimed), f"sample {claimed[0].session_id}")
            self._samples.add(sample)
            sample.add_done_callback(self._samples.discard)

    def _free(self, key: str) -> None:
        if key in self._rolling:
            self._rolling.discard(key)
            self._places.release()

    async def _lead(self, session: Session, task: EpisodeTask) -> None:
        """Lead one attempt to its end, whatever happens in the child."""
        agents, outcome = self._gateway.agents, "scored"
        try:
            answer = await self._answered(session, task)
            if "fault" in answer:
                kind = errors.Unavailable if answer["infra"] else errors.InvalidInput
                raise kind(answer["fault"])
            if answer["reward"] is None:
                raise errors.InvalidInput("the environment returned no reward")
            if not session.tree.turns:
                raise errors.InvalidInput("the environment ended without a turn of the model")
            session.score(Grant(float(answer["reward"]), parts=answer["parts"]))
            await agents.complete(session)
        except errors.PacelineError as error:
            infra = isinstance(error, errors.Unavailable | errors.ConfigError)
            fail = FailReason.INFRA if infra else FailReason.DATA
            outcome = "silent" if session.ended.is_set() else fail
            agents.finish(session, fail=fail, message=f"{self._name}: {error}")
            if self._child is not None:  # siblings may wait for this sample
                _send(self._child, self._siblings(session))
        finally:
            self._answers.pop(session.api_key, None)
            self._free(session.api_key)
        metrics.ENVIRONMENT_ATTEMPTS.record(environment=self._name, outcome=outcome)

    async def _answered(self, session: Session, task: EpisodeTask) -> Mapping[str, Any]:
        """The child's answer. Raises Unavailable when the child is lost, ConfigError when it cannot
        be started again, InvalidInput for a task of another origin.
        """
        child, key = await self._running(), session.api_key
        if verifiers.ROW not in task.metadata:
            message = f"the task is no row of {self._name}; set coordinator.tasks_path"
            raise errors.InvalidInput(message)
        answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[key] = answer
        row, sampling = json.loads(task.metadata[verifiers.ROW]), session.assignment.sampling
        _send(child, {"key": key, "row": row, "sampling": sampling} | self._siblings(session))
        ended = asyncio.ensure_future(session.ended.wait())
        try:
            await asyncio.wait((answer, ended, child.ended), return_when=FIRST_COMPLETED)
            if ended.done() and not answer.done():
                _send(child, {"cancel": key})
                await asyncio.wait((answer,), timeout=patient(CANCEL_S))
                if not answer.done():
                    child.kill(", because the environment blocked its event loop")
        finally:
            await cancel(ended)
        if not answer.done():
            seen = f"exit code {child.returncode}{child.verdict}"
            raise errors.Unavailable("the process of the environment was lost", seen=seen)
        return answer.result()

    def _siblings(self, session: Session) -> dict[str, Any]:
        """The sample's group, and the number of its samples that may still be scored together."""
        group = session.assignment.group_id
        size = self._gateway.agents.offers.siblings(group) if self._grouped else 1
        return {"group": group, "size": size}

    async def _running(self) -> Child:
        """The child that lives, or a new one. Raises ConfigError."""
        async with self._starting:
            if self._child is None or self._child.ended.done():
                self._child = await self._started()
            return self._child

    async def _started(self) -> Child:
        config, gateway = self._gateway.config, self._gateway
        scheme = "https" if config.security.tls_cert else "http"
        order = verifiers.order_of(self._name) | {
            "base_url": f"{scheme}://{gateway.http_address}/v1",
            "model": gateway.model,
            "authority": config.security.tls_ca,
        }
        command = verifiers.command(config.run.verifiers_python, order)
        async with AsyncExitStack() as failed:
            try:
                child = await Child.execute(*command, stdin=PIPE, stdout=PIPE, limit=MAX_BYTES)
                failed.push_async_callback(child.stop)
                output = child.program.stdout
                assert output is not None
                async with asyncio.timeout(patient(verifiers.LOAD_S)):
                    first = json.loads(await output.readline() or _ENDED)
            except (OSError, ValueError) as error:  # also a timeout
                raise verifiers.refused(repr(error), self._name) from error
            if "refused" in first:
                raise verifiers.refused(first["refused"], self._name)
            failed.pop_all()
        self._grouped = first["grouped"]
        background(self._read(child, output), f"answers of {self._name}")
        return child

    async def _read(self, child: Child, output: asyncio.StreamReader) -> None:
        """Deliver the child's answers until it ends."""
        try:
            async for line in output:
                message = json.loads(line)
                answer = self._answers.get(message["key"])
                if "rolled" in message:
                    self._free(message["key"])
                elif answer is not None and not answer.done():
                    answer.set_result(message)
        finally:
            await child.stop()


def _send(child: Child, message: Mapping[str, Any]) -> None:
    """Send a message; a lost child receives none."""
    requests = child.program.stdin
    if requests is not None and not requests.is_closing():
        requests.write(json.dumps(message).encode() + b"\n")
