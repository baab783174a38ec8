"""Requests of an operator to a run: stop, pause, resume, and the choice of what serves next."""

from __future__ import annotations

from rich.console import Console

from paceline.cli.access import Coordinator, asked
from paceline.cli.awaited import over, wait_until
from paceline.v1 import coordinator_pb2 as pb

Request = pb.RollBackRequest | pb.PinDrafterRequest | pb.UnpinDrafterRequest
_METHODS = {
    pb.RollBackRequest: "RollBack",
    pb.PinDrafterRequest: "PinDrafter",
    pb.UnpinDrafterRequest: "UnpinDrafter",
}


async def choose_drafter(coordinator: Coordinator, request: Request, console: Console) -> int:
    """Prints what serves from the next commit on; 0.

    Raises Unavailable when no coordinator answers, FailedPrecondition naming what speaks against
    it: no run goes on, the version is not kept, another one is pinned.
    """
    async with asked(coordinator, _METHODS[type(request)], request) as (_, answer):
        console.print(drafter_line(answer.drafters), highlight=False, soft_wrap=True)
    if answer.drafters.HasField("chosen") and not answer.drafters.pinned:
        console.print(
            f"to keep it beyond the next step: paceline drafter pin {answer.drafters.chosen}",
            highlight=False,
        )
    return 0


async def choose_profile(coordinator: Coordinator, profile: str, console: Console) -> int:
    """Prints what the policy is rounded to, and from when on; 0. Raises as `choose_drafter` does,
    also for a profile that the run may not change to.
    """
    request = pb.ChooseProfileRequest(profile=profile)
    async with asked(coordinator, "ChooseProfile", request) as (_, answer):
        serving, following = (one or "no profile" for one in (answer.serving.profile, answer.next))
        line = f"p{answer.serving.policy} serves under {serving}"
        if following != serving:
            line += f"; {following} from p{answer.serving.policy + 1} on"
        console.print(line, highlight=False, soft_wrap=True)
    return 0


def drafter_line(drafters: pb.DrafterChoice) -> str:
    """Which drafter serves, what was chosen, and what waits for it."""
    parts = [f"drafter d{drafters.serving} serves"]
    chosen = drafters.chosen if drafters.HasField("chosen") else None
    if chosen is not None and chosen != drafters.serving:
        parts.append(f"d{chosen} from the next commit on{', pinned' if drafters.pinned else ''}")
    elif drafters.pinned:
        parts[0] += ", pinned"
    if drafters.HasField("promoted"):
        waits = "its own commit" if chosen is None else "unpin" if drafters.pinned else "a step"
        parts.append(f"d{drafters.promoted} was promoted and waits for {waits}")
    return "; ".join(parts)


async def pause_run(coordinator: Coordinator, console: Console) -> int:
    """Prints the remaining work until the run is paused. Returns 0, or 1 if the run does not pause.

    Raises Unavailable when no coordinator answers, FailedPrecondition when no run is active or all
    its steps have begun. A cancelled caller stops waiting; the run pauses nevertheless.
    """
    async with asked(coordinator, "PauseRun", pb.PauseRunRequest()) as (stub, answer):
        console.print(f"the run pauses after {answer.steps} steps", highlight=False)
        left = "the coordinator has left; the next one of the run pauses it", 1
        return await wait_until(stub, console, _rests, left, "the run still pauses")


async def resume_run(coordinator: Coordinator, console: Console) -> int:
    """Prints whether the run had been paused; 0. Raises as `pause_run` does."""
    async with asked(coordinator, "ResumeRun", pb.ResumeRunRequest()) as (_, answer):
        told = "the run goes on" if answer.was_paused else "the run goes on: it was not paused"
        console.print(told, highlight=False)
        return 0


def _rests(snapshot: pb.GetSnapshotResponse) -> tuple[str, int] | None:
    if snapshot.phase == "paused":
        told = f"the run is paused after {snapshot.step} steps, of {snapshot.total_steps}"
        return f"{told}; to go on: paceline resume", 0
    if (ended := over(snapshot)) is not None:
        return ended[0], 1
    return None if snapshot.paused else ("the run is not paused any more", 1)


async def stop_run(coordinator: Coordinator, console: Console) -> int:
    """Prints the remaining work until the run has ended. Returns 0, or 1 if the run failed.

    Raises Unavailable when no coordinator answers, FailedPrecondition when its run has not begun or
    is over. A cancelled caller stops waiting; the run ends nevertheless.
    """
    async with asked(coordinator, "StopRun", pb.StopRunRequest()) as (stub, answer):
        console.print(f"the run ends with {answer.total_steps} steps", highlight=False)
        left = "the coordinator has left", 0
        return await wait_until(stub, console, over, left, "the run still ends")
