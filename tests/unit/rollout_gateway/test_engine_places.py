"""Which workers are a replica's, and on which hosts they are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.services.rollout_gateway.engine_places import by_host, shares_of


@given(hosts=st.lists(st.integers(1, 9), min_size=1, max_size=6), replicas=st.integers(1, 8))
def test_every_worker_is_of_one_replica_and_on_its_host(hosts: list[int], replicas: int) -> None:
    workers = sum(hosts)
    shares = shares_of(workers, replicas)
    assert [worker for share in shares for worker in share] == list(range(workers))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    spread = [by_host(share, hosts) for share in shares]
    assert [sum(counts) for counts in zip(*spread, strict=True)] == hosts
    host_of = [host for host, count in enumerate(hosts) for _ in range(count)]
    for share, counts in zip(shares, spread, strict=True):
        assert [host_of[worker] for worker in share] == [
            host for host, count in enumerate(counts) for _ in range(count)
        ]
