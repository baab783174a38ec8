"""Environments of the package verifiers: each runs in a child process that leads offered samples.

A host claims the offers of its environment, as an agent does, and hands each session's key to the
child, which is an agent: it generates, posts rewards and ends the session over HTTP. So an attempt
has a session, a seed and a place of its own, and a fault is offered again as an agent's would be.
"""

import asyncio
import json
from contextlib import ExitStack
from typing import Any

from paceline import errors
from paceline.local.child import Child
from paceline.local.patience import patient
from paceline.services.rollout_gateway import metrics
from paceline.services.rollout_gateway.background import background, cancel
from paceline.services.rollout_gateway.environments import EpisodeTask
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.services.rollout_gateway.sessions import FailReason
from paceline.services.rollout_gateway.sessions.session import Session
from paceline.tasks import verifiers
from paceline.telemetry import get_logger

PARALLEL = 256
"""Samples of one environment whose model has turns left, at once; further samples wait."""
CANCEL_S = 10.0
"""Seconds in which a child leaves a silent sample; a child that is late is killed."""
FULL_S = 1.0
"""Pause before another claim while too many sessions are open."""
log = get_logger(__name__)


class HostedEnvironment:
    """One environment: its child, and the samples that the child leads."""

    def __init__(self, gateway: Gateway, name: str) -> None:
        self._gateway, self._name = gateway, name
        self._child: Child | None = None
        self._led: dict[str, tuple[Session, ExitStack]] = {}  # with their places, by session key
        self._starting, self._places = asyncio.Lock(), asyncio.Semaphore(PARALLEL)
        self._claims = background(self._claim(), f"samples of {self._name}")

    async def prepare(self) -> None:
        """Start a child unless one lives. Raises ConfigError when it cannot be loaded."""
        async with self._starting:
            if self._child is not None and not self._child.ended.done():
                return
            config, gateway = self._gateway.config, self._gateway
            scheme = "https" if config.security.tls_cert else "http"
            order = {"base_url": f"{scheme}://{gateway.http_address}", "model": gateway.model}
            order["authority"] = config.security.tls_ca
            command = verifiers.command(self._name, config.run.verifiers_python, **order)
            try:
                child = await Child.piped(*command)
                first = await child.ask(b"", patient(verifiers.LOAD_S))
                verifiers.read_answer(first, self._name)
            except OSError as error:  # also a timeout
                raise verifiers.refused(repr(error), self._name) from error
            self._child, self._led = child, {}
            background(self._read(child), f"answers of {self._name}")

    async def stop(self) -> None:
        """End the claims and the child."""
        await cancel(self._claims)
        if self._child is not None:
            await self._child.stop()

    async def _claim(self) -> None:
        while True:
            await self._places.acquire()
            claimed = None
            while claimed is None:
                try:
                    claimed = await self._gateway.agents.claim(None, environment=self._name)
                except errors.PacelineError as error:  # too many sessions, or the gateway stops
                    log.warning("a sample of an environment waits", error=str(error))
                    await asyncio.sleep(FULL_S)
            background(self._lead(*claimed), f"sample {claimed[0].session_id}")

    async def _lead(self, session: Session, task: EpisodeTask) -> None:
        """Lead one attempt to its end, whatever happens in the child."""
        key, about = session.api_key, session.assignment
        with ExitStack() as place:
            place.callback(self._places.release)
            try:
                await self.prepare()
                self._led[key] = session, place
                row = json.loads(task.metadata.get(verifiers.ROW, "null"))
                self._send(key=key, group=about.group_id, row=row, sampling=about.sampling)
            except errors.ConfigError as error:
                self._gateway.agents.finish(session, fail=FailReason.INFRA, message=str(error))
            await session.ended.wait()
        outcome = "silent" if key in self._led else session.fail_reason or "scored"
        metrics.ENVIRONMENT_ATTEMPTS.record(environment=self._name, outcome=outcome)
        if session.fail_reason:
            self._send_size(session)
        if key in self._led:
            self._send(cancel=key)
            await asyncio.sleep(patient(CANCEL_S))
            if key in self._led and self._child is not None:
                self._child.kill(", because the environment blocked its event loop")

    def _send_size(self, session: Session) -> None:
        """Send the number of siblings that are left, all of which are scored together."""
        group = session.assignment.group_id
        self._send(group=group, size=self._gateway.agents.offers.siblings(group))

    def _send(self, **message: Any) -> None:
        """Send a message to the child; a lost child receives none."""
        if self._child is not None:
            self._child.send(json.dumps(message).encode() + b"\n")

    async def _read(self, child: Child) -> None:
        """Follow the child's samples until it ends."""
        led = self._led
        try:
            async for line in child.output:
                key, told = json.loads(line)
                session, place = led.pop(key) if told == "left" else led[key]
                place.close()
                if told == "waits":
                    self._send_size(session)
        finally:
            await child.stop()
            lost = f"the process of {self._name}: exit code {child.returncode}{child.verdict}"
            while led:
                session, _ = led.popitem()[1]
                self._gateway.agents.finish(session, fail=FailReason.INFRA, message=lost)
