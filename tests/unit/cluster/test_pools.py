"""Resources that runs request from a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cluster.nodes import CPU, GPU, Pool, addresses, check_room, pools_of
from paceline.config import ServiceConfig
from paceline.config.load import load_config
from paceline.errors import ConfigError

DEMO = Path(__file__).parents[3] / "examples/demo/demo.toml"
TRAINERS = ("policy_trainer", "drafter_trainer")


def pools(*overrides: str) -> list[Pool]:
    return pools_of([DEMO], ["gateway.engine.workers=2", *overrides])


def test_services_that_compute_in_turns_share_the_slots_of_the_engines() -> None:
    control, rollout = pools()
    assert (control.services, control.asks) == (("redis", "redis_features", "coordinator"), {})
    assert rollout.services == ("gateway", *TRAINERS)
    assert rollout.asks == {CPU: 2.0}


def test_a_learner_with_slots_of_its_own_is_a_pool_of_its_own() -> None:
    _, rollout, policy = pools("coordinator.placement=disaggregated", "coordinator.learner_slots=3")
    assert (rollout.services, rollout.asks) == (("gateway",), {CPU: 2.0})
    assert (policy.services, policy.asks) == (TRAINERS, {CPU: 3.0})


def test_each_further_node_of_the_policy_is_a_pool_that_is_stopped_after_the_trainer() -> None:
    apart = ("coordinator.placement=disaggregated", "coordinator.learner_slots=6")
    found = pools(*apart, "run.policy_nodes=3")
    names, services = [pool.name for pool in found], [pool.services for pool in found]
    assert names == ["control", "rollout", "policy-1", "policy-2", "policy"]
    assert services[2:] == [("policy_trainer-1",), ("policy_trainer-2",), TRAINERS]
    assert [pool.asks for pool in found[2:]] == [{CPU: 2.0}] * 3
    check_room(found, [{CPU: 2.0}] * 4)
    with pytest.raises(ConfigError, match=r"set gateway.engine.workers.*8 CPU"):
        check_room(found, [{CPU: 2.0}] * 3)


TWO = (
    'addresses.more_gateways=["127.0.0.1:8001"]',
    'addresses.more_gateways_http=["127.0.0.1:8002"]',
)


def test_each_further_gateway_is_a_pool_of_its_own_on_any_node() -> None:
    found = pools(*TWO)
    _, first, second = found
    assert (first.services, second.services) == (("gateway", *TRAINERS), ("gateway-1",))
    assert first.asks == second.asks
    check_room(found, [{CPU: 2.0}, {CPU: 2.0}])
    config = load_config(ServiceConfig, "local", [DEMO], TWO)
    hosts = {"control": "10.0.0.1", first.name: "10.0.0.1", second.name: "10.0.0.2"}
    words = addresses(config.addresses, found, hosts)
    assert 'addresses.more_gateways=["10.0.0.2:8001"]' in words
    moved = load_config(ServiceConfig, "local", [DEMO], [*TWO, *words]).addresses
    assert moved.gateways == ("10.0.0.1:7401", "10.0.0.2:8001")
    assert moved.gateways_http == ("10.0.0.1:7408", "10.0.0.2:8002")


def test_slots_are_gpus_where_one_of_the_services_computes_there() -> None:
    _, rollout = pools(
        "gateway.engine.kind=sglang",
        "gateway.engine.sglang.tensor_parallel_size=4",
        "coordinator.slots_per_worker=4",
    )
    assert rollout.asks == {GPU: 8.0}  # two tensor-parallel groups


@pytest.mark.parametrize("nodes", [[], [{CPU: 1.0}], [{CPU: 1.0}, {CPU: 1.0}], [{GPU: 8.0}]])
def test_a_pool_that_is_on_no_node_is_refused(nodes: list[dict[str, float]]) -> None:
    with pytest.raises(
        ConfigError, match=r"fewer slots.*engine.workers.*seen: 2 CPU, 2 of them on one node"
    ):
        check_room(pools(), nodes)


def test_the_ranks_of_a_trainer_are_limited_by_the_largest_node() -> None:
    apart = pools("coordinator.placement=disaggregated", "coordinator.learner_slots=4")
    with pytest.raises(ConfigError, match=r"set run.policy_nodes.*4 of them on one node"):
        check_room(apart, [{CPU: 3.0}, {CPU: 3.0}])


def test_pools_that_are_too_much_together_are_refused() -> None:
    apart = pools("coordinator.placement=disaggregated", "coordinator.learner_slots=2")
    check_room(apart, [{CPU: 2.0}, {CPU: 2.0}])
    with pytest.raises(ConfigError, match=r"seen: 4 CPU.*allowed: nodes with 3 CPU"):
        check_room(apart, [{CPU: 3.0}])
