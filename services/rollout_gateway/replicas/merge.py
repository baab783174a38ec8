"""Merges the answers of replicas into one: numbers workers over all replicas and adds counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from paceline.errors import InvalidInput
from paceline.messages import merge_arms, stats_from_proto, stats_to_proto
from paceline.services.rollout_gateway.place import ReplicaPlace
from paceline.services.rollout_gateway.workers.regret import regret
from paceline.trajectory import SpeculationStats
from paceline.v1 import progress_pb2 as ppb
from paceline.v1 import rollout_pb2 as rpb

GATEWAY = "gateway"


def split_tasks(
    request: rpb.RunTasksRequest, places: Sequence[ReplicaPlace]
) -> dict[int, rpb.RunTasksRequest]:
    """The tasks of each replica with a share, by its number. Neighbouring tasks stay whole, in
    proportion to its workers. A repeated call gets the same split.
    """
    workers, tasks = sum(place.workers for place in places), request.tasks
    parts: dict[int, rpb.RunTasksRequest] = {}
    for index, task in enumerate(tasks):
        worker = index * workers // len(tasks)
        number = next(number for number, place in enumerate(places) if place.holds(worker))
        if number not in parts:
            parts[number] = rpb.RunTasksRequest()
            parts[number].CopyFrom(request)
            del parts[number].tasks[:]
        parts[number].tasks.append(task)
    return parts


def check_workers(workers: Iterable[int], places: Sequence[ReplicaPlace]) -> None:
    """Raises InvalidInput for a worker that no replica has."""
    for worker in workers:
        if not any(place.holds(worker) for place in places):
            last = places[-1].first_worker + places[-1].workers - 1
            raise InvalidInput("there is no such worker", seen=worker, allowed=f"0..{last}")


def renumbered(news: rpb.RunTasksResponse, place: ReplicaPlace) -> rpb.RunTasksResponse:
    """The message of a replica, with the worker's number in the run."""
    match news.WhichOneof("event"):
        case "sample":
            news.sample.worker_index += place.first_worker
        case "share":
            news.share.worker_index += place.first_worker
    return news


def finished(parts: Iterable[rpb.TasksFinished]) -> rpb.TasksFinished:
    """The totals of all parts, in the order of their tasks."""
    parts = list(parts)
    stats = sum((stats_from_proto(part.speculation) for part in parts), SpeculationStats())
    arms = merge_arms(arm for part in parts for arm in part.arms)
    return rpb.TasksFinished(
        scored=sum(part.scored for part in parts),
        unscored=sum(part.unscored for part in parts),
        response_tokens=sum(part.response_tokens for part in parts),
        rollout_s=max((part.rollout_s for part in parts), default=0.0),
        speculation=stats_to_proto(stats),
        arms=arms,
        versions=parts[0].versions if parts else None,
        regret=regret(arms),
        closed_groups=[group for part in parts for group in part.closed_groups],
    )


def status(
    answers: Sequence[tuple[ReplicaPlace, rpb.GetStatusResponse | None]],
) -> rpb.GetStatusResponse:
    """Status of all replicas; the workers of an unavailable replica are not ready."""
    there = [answer for _, answer in answers if answer is not None]
    workers: list[rpb.WorkerStatus] = []
    for place, answer in answers:
        known = answer.workers if answer is not None else [rpb.WorkerStatus()] * place.workers
        for index, worker in enumerate(known):
            one = rpb.WorkerStatus()
            one.CopyFrom(worker)
            one.worker_index = place.first_worker + index
            workers.append(one)
    return rpb.GetStatusResponse(
        workers=workers,
        open_sessions=sum(one.open_sessions for one in there),
        unsent_bytes=sum(one.unsent_bytes for one in there),
        feature_batches=sum(one.feature_batches for one in there),
        feature_rows_dropped=sum(one.feature_rows_dropped for one in there),
        model=next((one.model for one in there), ""),
    )


def progress(
    answers: Sequence[tuple[ReplicaPlace, ppb.GetProgressResponse | None]],
) -> ppb.GetProgressResponse:
    """Progress of the gateway, then of its workers."""
    fronts: list[ppb.Part] = []
    workers: list[ppb.Part] = []
    away: list[str] = []
    for place, answer in answers:
        if answer is None:
            away.append(place.name)
            continue
        names = {f"worker {i}": f"worker {place.first_worker + i}" for i in range(place.workers)}
        for part in answer.parts:
            part.name = names.get(part.name, part.name)
            part.waits_for = names.get(part.waits_for, part.waits_for)
        fronts.append(answer.parts[0])
        workers += answer.parts[1:]
    part = ppb.Part(name=GATEWAY)
    if fronts:
        part.CopyFrom(min(fronts, key=_idle_s))
        counts: Counter[str] = Counter()
        for front in fronts:
            counts.update(front.counts)
        part.counts.update(counts)
    if away:
        part.trouble = f"{', '.join(away)} is being started"
    return ppb.GetProgressResponse(parts=[part, *workers])


def _idle_s(front: ppb.Part) -> tuple[bool, float]:
    """Sorts busy parts first, and among them the part with the latest progress."""
    return not front.doing, front.still_s
