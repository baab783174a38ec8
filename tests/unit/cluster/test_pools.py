"""What runs ask of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cluster.pools import CPU, GPU, Pool, check_room, pools_of
from paceline.errors import ConfigError

DEMO = Path(__file__).parents[3] / "examples/demo/demo.toml"
TRAINERS = ("policy_trainer", "drafter_trainer")


def pools(*overrides: str) -> list[Pool]:
    return pools_of([DEMO], ["gateway.engine.workers=2", *overrides])


def test_services_that_compute_in_turns_share_the_slots_of_the_engines() -> None:
    control, rollout = pools()
    assert (control.services, control.asks) == (("redis", "redis_features", "coordinator"), {})
    assert rollout.services == ("gateway", *TRAINERS)
    assert rollout.bundles == ({CPU: 1.0}, {CPU: 1.0})


def test_places_of_workers_that_are_added_later_are_reserved_from_the_start() -> None:
    _, rollout = pools("gateway.engine.most_workers=3")
    assert rollout.asks == {CPU: 3.0}


def test_a_learner_with_slots_of_its_own_is_a_pool_of_its_own() -> None:
    _, rollout, policy = pools("coordinator.placement=disaggregated", "coordinator.learner_slots=3")
    assert (rollout.services, rollout.asks) == (("gateway",), {CPU: 2.0})
    assert (policy.services, policy.asks) == (TRAINERS, {CPU: 3.0})


def test_slots_are_gpus_where_one_of_the_services_computes_there() -> None:
    _, rollout = pools(
        "gateway.engine.kind=sglang",
        "gateway.engine.sglang.tensor_parallel_size=4",
        "coordinator.slots_per_worker=4",
    )
    assert rollout.bundles == ({GPU: 4.0}, {GPU: 4.0})  # a tensor-parallel group each


@pytest.mark.parametrize("nodes", [[], [{CPU: 1.0}], [{CPU: 1.0}, {CPU: 1.0}], [{GPU: 8.0}]])
def test_a_pool_that_is_on_no_node_is_refused(nodes: list[dict[str, float]]) -> None:
    with pytest.raises(ConfigError, match=r"fewer slots.*seen: 2 CPU, 2 of them on one node"):
        check_room(pools(), nodes)


def test_pools_that_are_too_much_together_are_refused() -> None:
    apart = pools("coordinator.placement=disaggregated", "coordinator.learner_slots=2")
    check_room(apart, [{CPU: 2.0}, {CPU: 2.0}])
    with pytest.raises(ConfigError, match=r"seen: 4 CPU.*allowed: nodes with 3 CPU"):
        check_room(apart, [{CPU: 3.0}])


def test_ranks_on_other_hosts_have_pools_of_their_own() -> None:
    _, rollout, first, second = asked = pools("policy_trainer.hosts=[2,3,1]")
    assert rollout.services == ("gateway", *TRAINERS)
    assert (first.services, first.asks) == (("rank_host_1",), {CPU: 3.0})
    assert (second.services, second.asks) == (("rank_host_2",), {CPU: 1.0})
    check_room(asked, [{CPU: 3.0}, {CPU: 3.0}])
    with pytest.raises(ConfigError, match=r"seen: 6 CPU, 3 of them on one node"):
        check_room(asked, [{CPU: 2.0}, {CPU: 2.0}, {CPU: 2.0}])


def test_of_a_learners_own_slots_those_on_other_hosts_are_there() -> None:
    apart = "coordinator.placement=disaggregated", "policy_trainer.hosts=[1,2]"
    _, _, policy, other = pools(*apart, "coordinator.learner_slots=4")
    assert (policy.services, policy.asks) == (TRAINERS, {CPU: 2.0})
    assert (other.services, other.asks) == (("rank_host_1",), {CPU: 2.0})
    with pytest.raises(ConfigError, match=r"seen: 2, hosts=\[1, 2\]; allowed: at least 3"):
        pools(*apart, "coordinator.learner_slots=2")


def test_engine_workers_on_other_hosts_have_pools_of_their_own() -> None:
    own = "gateway.engine.workers=0", "coordinator.slots_per_worker=2"
    _, rollout, first, second = asked = pools(*own, "gateway.engine.hosts=[2,1,3]")
    assert (rollout.services, rollout.asks) == (("gateway", *TRAINERS), {CPU: 4.0})
    assert (first.name, first.services, first.asks) == ("rollout_1", ("worker_host_1",), {CPU: 2.0})
    assert (second.name, second.services) == ("rollout_2", ("worker_host_2",))
    assert second.bundles == ({CPU: 2.0},) * 3
    check_room(asked, [{CPU: 6.0}, {CPU: 4.0}, {CPU: 2.0}])
    with pytest.raises(ConfigError, match=r"seen: 12 CPU, 6 of them on one node"):
        check_room(asked, [{CPU: 5.0}, {CPU: 5.0}, {CPU: 5.0}])


def test_hosts_of_engine_workers_that_do_not_fit_their_number_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"gateway\.engine\.hosts.*allowed: at most 2 workers"):
        pools("gateway.engine.workers=3", "gateway.engine.hosts=[1,1]")
