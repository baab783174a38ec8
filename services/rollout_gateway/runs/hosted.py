"""Environments of the package verifiers: each runs in a child process that leads offered samples.

A host claims the offers of its environment, as an agent does, and hands each session's key to the
child. The child generates under the key over HTTP and answers with the reward. So an attempt has a
session, a seed and a place of its own, and a fault is offered again as an agent's would be.
"""

import asyncio
import json
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError, PacelineError, ResourceExhausted, Unavailable
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
GROUPS_REMEMBERED = 4096
"""Groups whose failed samples are counted, the newest."""
MAX_BYTES = 64 << 20
"""Maximum bytes of one message of a child."""
log = get_logger(__name__)


class Hosts:
    """The hosts of one gateway, by the names of their environments."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._hosts: dict[str, HostedEnvironment] = {}

    async def prepare(self, name: str) -> None:
        """Start an environment, if it does not run. Raises ConfigError when it cannot be loaded."""
        if name not in self._hosts:
            self._hosts[name] = HostedEnvironment(self._gateway, name)
        await self._hosts[name].prepare()

    async def stop(self) -> None:
        """End all children."""
        await asyncio.gather(*(host.stop() for host in self._hosts.values()))


class HostedEnvironment:
    """One environment: its child, and the samples that the child leads."""

    def __init__(self, gateway: Gateway, name: str) -> None:
        self._gateway, self._name = gateway, name
        self._child: Child | None = None
        self._turn = asyncio.Lock()
        self._places = asyncio.Semaphore(PARALLEL)
        # by session key: the child that leads the sample, and its answer
        self._answers: dict[str, tuple[Child, asyncio.Future[Mapping[str, Any]]]] = {}
        self._rolling: set[str] = set()  # session keys that hold a place
        self._grouped = False  # siblings are scored together
        self._lost: Counter[str] = Counter()  # finally failed samples, by group
        self._claims: asyncio.Task[None] | None = None
        self._stopping = False
        self._samples: set[asyncio.Task[None]] = set()

    async def prepare(self) -> None:
        """Start the child and the claims. Raises ConfigError, Unavailable."""
        await self._running()
        if self._claims is None or self._claims.done():
            self._claims = background(self._claim(), f"samples of {self._name}")

    async def stop(self) -> None:
        """End the claims, the samples and the child."""
        self._stopping = True
        await cancel(self._claims, *self._samples)
        if self._child is not None:
            await self._child.stop()

    async def _claim(self) -> None:
        while True:
            await self._places.acquire()
            try:
                claimed = await self._gateway.agents.claim(None, environment=self._name)
            except Unavailable:  # the gateway stops
                return
            except ResourceExhausted as error:  # too many sessions are open
                log.warning("a sample of an environment waits", error=str(error))
                self._places.release()
                await asyncio.sleep(FULL_S)
                continue
            assert claimed is not None
            session, task = claimed
            self._rolling.add(session.api_key)
            sample = background(self._lead(session, task), f"sample {session.session_id}")
            self._samples.add(sample)
            sample.add_done_callback(self._samples.discard)

    def _free(self, key: str) -> None:
        if key in self._rolling:
            self._rolling.discard(key)
            self._places.release()

    async def _lead(self, session: Session, task: EpisodeTask) -> None:
        """Lead one attempt to its end, whatever happens in the child."""
        outcome, fault = "scored", ""
        metrics.ENVIRONMENT_RUNNING.record(1)
        try:
            answer = await self._answered(session, task)
            fault, outcome = answer.get("fault", ""), "infra" if answer.get("infra") else "data"
            if not fault and answer.get("reward") is None:
                fault = "the environment returned no reward"
            elif not fault and not session.tree.turns:
                fault = "the environment ended without a turn of the model"
            elif not fault:
                session.score(Grant(float(answer["reward"]), parts=answer["parts"]))
                outcome = "scored"
                await self._gateway.agents.complete(session)
        except PacelineError as error:  # of the child, or of a reward that is no number
            outcome = "infra" if isinstance(error, Unavailable | ConfigError) else "data"
            fault = str(error)
        finally:
            self._answers.pop(session.api_key, None)
            self._free(session.api_key)
            metrics.ENVIRONMENT_RUNNING.record(-1)
        if fault and not session.ended.is_set():
            message = f"{self._name}: {fault}"
            self._gateway.agents.finish(session, fail=FailReason(outcome), message=message)
        elif session.ended.is_set() and outcome != "scored":
            outcome = "silent"
        metrics.ENVIRONMENT_ATTEMPTS.record(environment=self._name, outcome=outcome)
        await self._report_loss(session)

    async def _answered(self, session: Session, task: EpisodeTask) -> Mapping[str, Any]:
        """The child's answer; a fault if the session ends before. Raises Unavailable when the child
        is lost, ConfigError when it cannot be started again.
        """
        child, key, about = await self._running(), session.api_key, session.assignment
        answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[key] = child, answer
        size = about.group_size - self._lost[about.group_id]
        row = json.loads(task.metadata.get(verifiers.ROW, "null"))
        if row is None:
            return {"fault": f"the task is no row of {self._name}; set coordinator.tasks_path"}
        told = {"key": key, "row": row, "sampling": about.sampling}
        await _send(child, told | {"group": about.group_id, "size": size})
        ended = asyncio.ensure_future(session.ended.wait())
        try:
            await asyncio.wait((answer, ended), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                await _send(child, {"cancel": key})
                await asyncio.wait((answer,), timeout=patient(CANCEL_S))
            if not answer.done():
                child.kill(", because the environment blocked its event loop")
                return {"fault": "the environment blocked its event loop"}
            return answer.result()
        finally:
            await cancel(ended)

    async def _report_loss(self, session: Session) -> None:
        """Let siblings that wait to be scored together no longer wait for a failed sample."""
        about = session.assignment
        failed = session.fail_reason is not None and self._grouped
        if not failed or self._gateway.agents.offers.has_attempts(session.session_id):
            return
        self._lost[about.group_id] += 1
        size = about.group_size - self._lost[about.group_id]
        if len(self._lost) > GROUPS_REMEMBERED:
            del self._lost[next(iter(self._lost))]
        if self._child is not None and not self._child.ended.done():
            await _send(self._child, {"group": about.group_id, "size": size})

    async def _running(self) -> Child:
        """The child that lives, or a new one. Raises ConfigError, Unavailable."""
        async with self._turn:
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
        try:
            child = await Child.execute(*command, stdin=PIPE, stdout=PIPE, limit=MAX_BYTES)
        except OSError as error:
            raise _refused(f"{error.strerror}: {command[0]}", self._name, missing=True) from error
        try:
            async with asyncio.timeout(patient(verifiers.LOAD_S)):
                first = await _receive(child)
        except BaseException as error:
            await child.stop()
            if isinstance(error, TimeoutError):
                late = f"it was not loaded in {verifiers.LOAD_S:g} s"
                raise _refused(late, self._name, missing=False) from error
            raise
        if first is None or "refused" in first:
            await child.wait()
            told = first or {"refused": f"its process ended: {child.returncode}", "missing": False}
            raise _refused(told["refused"], self._name, missing=told["missing"])
        self._grouped = bool(first.get("grouped"))
        background(self._read(child), f"answers of {self._name}")
        return child

    async def _read(self, child: Child) -> None:
        """Deliver the child's answers until it ends; then the samples that it led are lost."""
        try:
            while (message := await _receive(child)) is not None:
                key = message["key"]
                if "rolled" in message:
                    self._free(key)
                elif key in self._answers and not self._answers[key][1].done():
                    self._answers[key][1].set_result(message)
        finally:
            await child.stop()
            seen = f"exit code {child.returncode}{child.verdict}"
            if not self._stopping:
                log.warning("a child of an environment was lost", environment=self._name, end=seen)
            fault = "the process of the environment was lost"
            for leader, answer in self._answers.values():
                if leader is child and not answer.done():
                    answer.set_exception(Unavailable(fault, seen=seen))


async def _send(child: Child, message: Mapping[str, Any]) -> None:
    """Send a message; to a lost child it is dropped."""
    writer = child.program.stdin
    assert writer is not None
    try:
        writer.write(json.dumps(message).encode() + b"\n")
        await writer.drain()
    except ConnectionError:  # the reader of the answers reports the loss
        log.info("a message to a child that has ended", pid=child.pid)


async def _receive(child: Child) -> dict[str, Any] | None:
    """The next message of a child; None at its end, or when a message is too long or no JSON."""
    reader = child.program.stdout
    assert reader is not None
    try:
        found = json.loads(await reader.readuntil(b"\n"))
        return found if isinstance(found, dict) else None
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        if isinstance(error, ValueError):
            log.warning("a child of an environment sent no JSON", error=str(error)[:200])
        return None


def _refused(text: str, name: str, *, missing: bool) -> ConfigError:
    error = verifiers.refused(text, name, missing=missing)
    return ConfigError(error.message, seen=error.seen, allowed=error.allowed)
