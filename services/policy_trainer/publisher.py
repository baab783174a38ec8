"""Pushes versions to the gateway and the drafter trainer; every rank sends its own rows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from paceline.errors import PacelineError
from paceline.local.patience import patient
from paceline.ranks.messages import Failed
from paceline.rpc import channel, rpc_errors, wait_ready
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.metrics import HEADS_LEFT_OUT
from paceline.services.policy_trainer.publish import CONNECT_S, Publication, senders_of_ranks
from paceline.telemetry import get_logger
from paceline.v1.engine_pb2 import WEIGHT_TARGET_POLICY_HEAD
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.weights_pb2 import GetVersionsRequest
from paceline.v1.weights_pb2_grpc import WeightServiceStub
from paceline.weights import Delivery, Parcel, PushReport, WeightSender
from paceline.weights.handover import remove_scratch
from paceline.weights.push import push_deadline_s

_log = get_logger(__name__)


class Publisher:
    """The publisher of one rank, for all versions. It keeps this rank's rows of a version until the
    next push. Pushes are collective.
    """

    def __init__(self, config: PolicyTrainerConfig, runner: asyncio.Runner) -> None:
        self._config = config
        self._runner = runner
        self._senders = senders_of_ranks()
        self._sender = WeightSender(config.publish_deltas, self._senders)
        if self._senders.rank == 0:  # no rank has published yet
            remove_scratch(config.checkpoints_dir)

    def forget(self) -> None:
        """Frees the space of the last pushed version; the next push sends whole weights."""
        self._sender.forget()

    def push(self, publication: Publication, context: CommandContext) -> PushReport:
        """Prepares the version at the gateway and, at the same time, its head at the drafter
        trainer if that service answers. Without the head the drafter cannot learn from this
        version's rows. Collective.

        Returns the gateway's report; its push_s covers the slower push of the two. Raises the
        gateway's PacelineErrors on all ranks.
        """
        started_s = time.monotonic()
        policy: Parcel | PushReport = self._sender.plan(publication.policy)
        head = self._sender.plan(publication.head) if self._config.push_head else None
        while isinstance(policy, Parcel) or head is not None:
            going = policy if isinstance(policy, Parcel) else None
            policies, heads = self._delivered(going, head, context)
            head = self._settled_head(head, heads)  # before the gateway's error is raised
            if isinstance(policy, Parcel):
                policy = self._sender.settle(policy, policies)
        return replace(policy, push_s=time.monotonic() - started_s)

    def _settled_head(self, head: Parcel | None, deliveries: list[Delivery]) -> Parcel | None:
        """The part of the head that is still to be delivered. It is None if the drafter trainer
        does not answer: a step never fails because of it.
        """
        if head is None:
            return None
        try:
            left = self._sender.settle(head, deliveries)
        except PacelineError as error:
            # it would keep a version that no other service needs
            self._sender.forget(WEIGHT_TARGET_POLICY_HEAD)
            if self._senders.rank == 0:
                HEADS_LEFT_OUT.record()
                version = head.manifest.version
                _log.warning("head_not_pushed", version=version, error=str(error))
            return None
        return left if isinstance(left, Parcel) else None

    def _delivered(
        self, policy: Parcel | None, head: Parcel | None, context: CommandContext
    ) -> tuple[list[Delivery], list[Delivery]]:
        """The deliveries of both parcels from each rank, by rank. Collective."""
        own = self._runner.run(self._deliver(policy, head, context))
        of_ranks = self._senders.exchange([_to_object(one) for one in own])
        policies, heads = zip(*of_ranks, strict=True)
        return [*map(_from_object, policies)], [*map(_from_object, heads)]

    async def _deliver(
        self, policy: Parcel | None, head: Parcel | None, context: CommandContext
    ) -> tuple[Delivery, Delivery]:
        addresses = self._config.addresses
        policy_sent, head_sent = await asyncio.gather(
            self._deliver_to(addresses.gateway, policy, context),
            self._deliver_to(addresses.drafter_trainer, head, context),
        )
        return policy_sent, head_sent

    async def _deliver_to(
        self, address: str, parcel: Parcel | None, context: CommandContext
    ) -> Delivery:
        if parcel is None:
            return Delivery(PushReport(0, 0.0))
        deadline_s = patient(push_deadline_s(parcel.whole.manifest.total_bytes))
        try:
            async with channel(address, self._config.security) as peer:
                if parcel.manifest.target == WEIGHT_TARGET_POLICY_HEAD:
                    stub: Any = WeightServiceStub(peer)
                    with rpc_errors():  # a hanging peer costs only this deadline
                        await stub.GetVersions(GetVersionsRequest(), timeout=patient(CONNECT_S))
                else:
                    await wait_ready(peer, patient(CONNECT_S))
                return await self._sender.deliver(peer, parcel, context, deadline_s)
        except PacelineError as error:
            return Delivery(PushReport(0, 0.0), error)


def _to_object(delivery: Delivery) -> dict[str, Any]:
    failed = Failed.of(0, delivery.error) if delivery.error is not None else None
    return {"report": asdict(delivery.report), "failed": failed and asdict(failed)}


def _from_object(told: Mapping[str, Any]) -> Delivery:
    failed = told["failed"]
    return Delivery(PushReport(**told["report"]), Failed(**failed).error() if failed else None)
