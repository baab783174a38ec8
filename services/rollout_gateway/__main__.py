"""`python -m paceline.services.rollout_gateway`: the gateway process."""

from __future__ import annotations

from paceline.local.entry import run_service
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.replicas.serving import serve

if __name__ == "__main__":
    run_service("gateway", GatewayConfig, serve)
