"""Holds the channels and stubs of the services that the coordinator commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

from paceline.config import AddressesConfig, SecurityConfig
from paceline.rpc import channel, rpc_errors, wait_healthy
from paceline.rpc.progress import while_moving
from paceline.services.coordinator.machine.state import Service
from paceline.v1.drafter_pb2_grpc import DrafterServiceStub
from paceline.v1.policy_pb2 import SavePolicyCheckpointRequest, SavePolicyCheckpointResponse
from paceline.v1.policy_pb2_grpc import PolicyServiceStub
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub

STILL_S = 300.0
"""Seconds without progress of the policy trainer after which the wait for its checkpoint ends."""


@dataclass(frozen=True, slots=True)
class Peers:
    """One channel per service. Stubs of generated code have no types."""

    addresses: dict[Service, str]
    security: SecurityConfig
    channels: dict[Service, grpc.aio.Channel]
    rollout: Any
    policy: Any
    drafter: Any

    @classmethod
    def open(cls, addresses: AddressesConfig, security: SecurityConfig) -> Peers:
        """Creates lazy channels; call it on the running event loop. Raises ConfigError for an
        insecure address.
        """
        by_service = {service: str(getattr(addresses, service.value)) for service in Service}
        channels = {service: channel(address, security) for service, address in by_service.items()}
        return cls(
            by_service,
            security,
            channels,
            RolloutServiceStub(channels[Service.GATEWAY]),  # type: ignore[no-untyped-call]
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
        """Waits until the service serves. Raises Unavailable after `deadline_s` seconds."""
        await wait_healthy(self.addresses[service], self.security, deadline_s)

    async def close(self) -> None:
        """Closes all channels; running calls are cancelled."""
        for each in self.channels.values():
            await each.close()
