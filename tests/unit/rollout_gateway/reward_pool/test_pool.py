"""Where a gateway has its rewards scored."""

from __future__ import annotations

import pytest

from paceline.cluster.actor import ADDRESS_VARIABLE
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.reward_pool.pool import reward_pool


@pytest.mark.parametrize(
    ("address", "cpus", "slots"), [("127.0.0.1:1", 2, 2), ("127.0.0.1:1", 0, 0), ("", 2, 0)]
)
def test_a_gateway_has_a_pool_where_its_settings_ask_for_it_and_a_cluster_runs_it(
    address: str, cpus: int, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, address)
    pool = reward_pool(GatewayConfig.model_validate({"rewards": {"ray_cpus": cpus}}))
    assert len(pool.slots if pool else ()) == slots
