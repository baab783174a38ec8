"""Reports the current work of the gateway and its engine workers, and the service that remaining
work waits for.
"""

from __future__ import annotations

from paceline.local.processes import stopped
from paceline.rpc.progress import AGENTS, REDIS, Activity
from paceline.services.rollout_gateway.gateway import Gateway
from paceline.services.rollout_gateway.workers.placement import Seat
from paceline.v1.progress_pb2 import GetProgressResponse, Part


async def progress(gateway: Gateway, weights: Activity | None = None) -> GetProgressResponse:
    """Progress of the gateway, then of its workers. Sends no command to a worker, because a worker
    may be silent. `weights`: the activity of receiving weights, if this process does.
    """
    seats = gateway.router.seats
    workers = [_worker(seat) for seat in seats]
    agents, queue = gateway.agents, gateway.queue
    counts = {
        "requests_running": queue.running,
        "requests_waiting": queue.waiting,
        "samples_left": gateway.samples_left,
        "open_sessions": len(agents.sessions),
        "offers": agents.offers.waiting,
        "open_groups": agents.groups.gathering,
        "unsent_bytes": gateway.outbox.unsent_bytes,
    }
    busy = [worker for worker in workers if worker.doing]
    part = gateway.activity.part(counts)
    if weights is not None:
        weights.show_on(part)
    part.still_s = min([part.still_s, *(one.still_s for one in workers)])
    if busy:
        part.waits_for = max(busy, key=lambda one: one.still_s).name
    elif counts["unsent_bytes"]:
        part.waits_for = REDIS
    elif part.doing and (counts["offers"] or counts["open_sessions"] or not counts["samples_left"]):
        part.waits_for = AGENTS
    return GetProgressResponse(parts=[part, *workers])


def _worker(seat: Seat) -> Part:
    process = seat.process
    if process is None:
        part = seat.activity.part(trouble="it is being started")
    else:
        part = seat.activity.part({"requests": len(seat.live)}, trouble=stopped([process.pid]))
    part.ClearField("last_span")  # it belongs to this process, not to the worker
    if process is not None and process.unanswered:
        part.doing = part.doing or "takes a command"
        part.still_s = min(part.still_s, process.still_s)
    return part
