"""Tasks are split, answers of several replicas made one, and names found again."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.place import ReplicaPlace, places, read_place, write_place
from paceline.services.rollout_gateway.replicas.merge import finished, progress, split_tasks, status
from paceline.services.rollout_gateway.replicas.pages import merged_metrics
from paceline.services.rollout_gateway.sessions.shard import Shard, shard_of
from paceline.v1 import progress_pb2 as ppb
from paceline.v1 import rollout_pb2 as rpb


def of(replicas: int, workers: int) -> list[ReplicaPlace]:
    config = GatewayConfig.model_validate({"replicas": replicas, "engine": {"workers": workers}})
    return places(config, Path("spool"), Path("sockets"))


@given(st.integers(1, 8), st.integers(1, 16), st.integers(1, 64))
def test_every_task_goes_to_one_replica_in_its_order_and_shares_are_even(
    replicas: int, workers: int, tasks: int
) -> None:
    found = of(replicas, max(workers, replicas))
    request = rpb.RunTasksRequest(samples_per_task=4, run_seed=3)
    for number in range(tasks):
        request.tasks.add(task_id=f"t{number}")
    parts = split_tasks(request, found)
    told = [task.task_id for number in sorted(parts) for task in parts[number].tasks]
    assert told == [task.task_id for task in request.tasks]
    assert all((part.samples_per_task, part.run_seed) == (4, 3) for part in parts.values())
    per_worker = tasks / sum(place.workers for place in found)
    for number, part in parts.items():
        assert abs(len(part.tasks) - per_worker * found[number].workers) <= 1


def test_a_name_is_drawn_until_it_is_the_replicas_own() -> None:
    for count in (1, 2, 5):
        for index in range(count):
            names = iter(f"n{number}" for number in range(1000))
            drawn = Shard(index, count).draw(lambda names=names: next(names))  # type: ignore[misc]
            assert shard_of(drawn, count) == index


def test_a_replica_starts_from_what_its_head_has_written(tmp_path: Path) -> None:
    config = GatewayConfig.model_validate(
        {
            "replicas": 2,
            "engine": {"workers": 5},
            "sessions": {"limit": 7},
            "rewards": {"remote": {"url": "http://r", "token": "secret"}},
        }
    )
    place = places(config, tmp_path / "spool", tmp_path)[1]
    file = tmp_path / "gateway-1.json"
    write_place(file, place, config, tmp_path / "spool")
    assert file.stat().st_mode & 0o77 == 0, "it holds secrets"
    found, own = read_place(file)
    assert found == place
    assert (own.replicas, own.engine.workers, own.sessions.limit) == (1, 3, 4)
    assert (own.spool, own.rewards.remote.token) == (tmp_path / "spool", "secret")


def test_totals_add_up_and_the_longest_rollout_counts() -> None:
    parts = [
        rpb.TasksFinished(scored=3, unscored=1, response_tokens=10, rollout_s=2.0),
        rpb.TasksFinished(scored=1, unscored=0, response_tokens=5, rollout_s=3.0),
    ]
    for number, part in enumerate(parts):
        part.closed_groups.add(group_id=f"g{number}", scored_sessions=1)
        part.arms.add(arm="off", batch_group=1, pulls=number + 1, mean_tokens_per_s=10.0 * number)
    whole = finished(parts)
    assert (whole.scored, whole.unscored, whole.response_tokens) == (4, 1, 15)
    assert whole.rollout_s == 3.0
    assert [group.group_id for group in whole.closed_groups] == ["g0", "g1"]
    assert (whole.arms[0].pulls, whole.arms[0].mean_tokens_per_s) == (3, 20 / 3)


def test_workers_of_a_replica_that_is_away_are_there_and_not_ready() -> None:
    first, second = of(2, 3)
    answer = rpb.GetStatusResponse(open_sessions=2, model="m")
    answer.workers.add(worker_index=0, pid=7, ready=True)
    whole = status([(first, answer), (second, None)])
    assert [(one.worker_index, one.ready) for one in whole.workers] == [
        (0, True),
        (1, False),
        (2, False),
    ]
    assert (whole.open_sessions, whole.model) == (2, "m")


def test_whom_the_gateway_waits_for_is_named_by_the_workers_number_in_the_run() -> None:
    first, second = of(2, 4)
    idle = ppb.GetProgressResponse(parts=[ppb.Part(name="gateway", counts={"open_sessions": 1})])
    busy = ppb.GetProgressResponse()
    busy.parts.add(name="gateway", doing="runs", waits_for="worker 1", counts={"open_sessions": 2})
    busy.parts.add(name="worker 0")
    busy.parts.add(name="worker 1", doing="decodes")
    whole = progress([(first, idle), (second, busy)])
    gateway, *workers = whole.parts
    assert (gateway.doing, gateway.waits_for) == ("runs", "worker 3")
    assert gateway.counts["open_sessions"] == 3
    assert [worker.name for worker in workers] == ["worker 2", "worker 3"]
    assert (
        "gateway-1 is being started" in progress([(first, idle), (second, None)]).parts[0].trouble
    )


def test_a_page_of_metrics_describes_each_family_once_and_labels_every_sample() -> None:
    page = b'# HELP a_total words here\n# TYPE a_total counter\na_total{x="1}"} 2.0\na_total 1e3\n'
    other = b"# HELP a_total words here\n# TYPE a_total counter\na_total 4\n# TYPE b gauge\nb 5\n"
    assert merged_metrics({"0": page, "1": other}).splitlines() == [
        "# HELP a_total words here",
        "# TYPE a_total counter",
        'a_total{x="1}",replica="0"} 2.0',
        'a_total{replica="0"} 1e3',
        'a_total{replica="1"} 4',
        "# TYPE b gauge",
        'b{replica="1"} 5',
    ]
