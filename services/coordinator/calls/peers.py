"""Holds the channels and stubs of the services that the coordinator commands."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from paceline.config import AddressesConfig, SecurityConfig
from paceline.errors import PacelineError
from paceline.rpc import channel, rpc_errors, wait_healthy
from paceline.rpc.progress import while_moving
from paceline.services.coordinator.machine.state import Service
from paceline.v1.drafter_pb2_grpc import DrafterServiceStub
from paceline.v1.policy_pb2 import SavePolicyCheckpointRequest, SavePolicyCheckpointResponse
from paceline.v1.policy_pb2_grpc import PolicyServiceStub
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub

T = TypeVar("T")
STILL_S = 300.0
"""Seconds without progress of the policy trainer after which the wait for its checkpoint ends."""


@dataclass(frozen=True, slots=True)
class Peers:
    """One channel per service, and one per gateway. Stubs of generated code have no types."""

    addresses: dict[Service, tuple[str, ...]]
    security: SecurityConfig
    channels: dict[Service, grpc.aio.Channel]
    gateways: tuple[grpc.aio.Channel, ...]  # by number; the first is also in `channels`
    rollouts: tuple[Any, ...]
    policy: Any
    drafter: Any

    @classmethod
    def open(cls, addresses: AddressesConfig, security: SecurityConfig) -> Peers:
        """Creates lazy channels; call it on the running event loop. Raises ConfigError for an
        insecure address.
        """
        by_service: dict[Service, tuple[str, ...]] = {
            service: (addresses.of(service.value),) for service in Service
        }
        by_service[Service.GATEWAY] = addresses.gateways
        gateways = tuple(channel(address, security) for address in addresses.gateways)
        channels = {
            service: gateways[0] if service is Service.GATEWAY else channel(first, security)
            for service, (first, *_) in by_service.items()
        }
        return cls(
            by_service,
            security,
            channels,
            gateways,
            tuple(RolloutServiceStub(one) for one in gateways),  # type: ignore[no-untyped-call]
            PolicyServiceStub(channels[Service.POLICY_TRAINER]),  # type: ignore[no-untyped-call]
            DrafterServiceStub(channels[Service.DRAFTER_TRAINER]),  # type: ignore[no-untyped-call]
        )

    async def save_policy(
        self, request: SavePolicyCheckpointRequest, still_s: float
    ) -> SavePolicyCheckpointResponse:
        """Saves a policy checkpoint and returns the policy trainer's answer.

        The trainer first finishes a running step; the wait lasts as long as the trainer makes
        progress. Raises DeadlineExceeded after `still_s` seconds without progress, and errors of
        the call.
        """
        with rpc_errors():
            async with while_moving(self.channels[Service.POLICY_TRAINER], still_s) as timeout:
                saved: SavePolicyCheckpointResponse = await self.policy.SavePolicyCheckpoint(
                    request, timeout=timeout
                )
            return saved

    async def wait_healthy(self, service: Service, deadline_s: float) -> None:
        """Waits until the service serves, every process of it. Raises Unavailable after
        `deadline_s` seconds.
        """
        for error in (await self.unhealthy(service, deadline_s)).values():
            raise error

    async def unhealthy(self, service: Service, deadline_s: float) -> dict[int, PacelineError]:
        """Waits likewise. Returns the errors of processes that do not serve, by number."""

        async def health(address: str) -> PacelineError | None:
            try:
                await wait_healthy(address, self.security, deadline_s)
            except PacelineError as error:
                return error
            return None

        found = await each(map(health, self.addresses[service]))
        return {number: error for number, error in enumerate(found) if error is not None}

    def all_channels(self, service: Service) -> tuple[grpc.aio.Channel, ...]:
        """The channels to all processes of a service."""
        return self.gateways if service is Service.GATEWAY else (self.channels[service],)

    async def close(self) -> None:
        """Closes all channels; running calls are cancelled."""
        for one in {*self.channels.values(), *self.gateways}:
            await one.close()


async def each(calls: Iterable[Awaitable[T]]) -> list[T]:
    """All answers, in order, after all calls have ended. Raises the first failure."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    for answer in found:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in found if not isinstance(answer, BaseException)]
