"""Implements `paceline drafter rollback`, `pin` and `unpin`, and `paceline use-profile`."""

from __future__ import annotations

from rich.console import Console

from paceline.cli.access import Coordinator, asked
from paceline.v1 import coordinator_pb2 as pb

Request = pb.RollBackRequest | pb.PinDrafterRequest | pb.UnpinDrafterRequest
_METHODS = {
    pb.RollBackRequest: "RollBack",
    pb.PinDrafterRequest: "PinDrafter",
    pb.UnpinDrafterRequest: "UnpinDrafter",
}


async def choose_drafter(coordinator: Coordinator, request: Request, console: Console) -> int:
    """Sends a drafter choice and prints the drafter from the next commit; returns 0.

    Raises Unavailable if no coordinator responds. Raises FailedPrecondition with the reason: no
    active run, a version that is not stored, or another pinned version.
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
    """Sends a profile choice and prints the policy's rounding and its first version; returns 0.

    Raises as `choose_drafter`, and for a profile that the run does not allow.
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
    """One line: the serving drafter, the chosen drafter, and a promoted drafter that waits."""
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
