"""Reports paths that the audit found inexact, and stops the gateway from using them."""

from paceline.errors import PacelineError
from paceline.local.news import tell_supervisor
from paceline.services.coordinator.calls import base, gateways
from paceline.services.coordinator.machine import commands, events
from paceline.telemetry import get_logger
from paceline.trajectory import PLAIN_PATH
from paceline.v1.policy_pb2 import PolicyStepped
from paceline.v1.rollout_pb2 import QuarantineRequest
from paceline.v1.trajectory_pb2 import CommandContext

_DEADLINE_S = 30.0


def found(calls: base.Calls, epoch: int, stepped: PolicyStepped) -> None:
    """Logs and reports the paths beyond their bounds, if any, and emits PathsBeyondBound."""
    if not stepped.beyond:
        return
    details: dict[str, events.Figure] = {}
    for one in stepped.beyond:
        figures = {
            "tokens": one.tokens,
            "mean": one.mean,
            "upper": one.upper,
            "mean_bound": one.mean_bound,
            "upper_bound": one.upper_bound,
        }
        details[one.path] = figures
        get_logger("coordinator").error("inexact_path", path=one.path, **figures)
        follows = "nothing is left to turn off" if one.path == PLAIN_PATH else "it is quarantined"
        tell_supervisor(
            "impaired",
            f"the audit found {one.path} inexact: mean gap {one.mean:.2g} nats (bound "
            f"{one.mean_bound:.2g}), 99th percentile {one.upper:.2g} (bound {one.upper_bound:.2g}) "
            f"over {one.tokens} tokens; {follows}, the run goes on",
        )
    paths = tuple(one.path for one in stepped.beyond)
    calls.emit(events.PathsBeyondBound(calls.now(), epoch, paths, details))


async def quarantine(calls: base.Calls, command: commands.Quarantine) -> None:
    """Applies the quarantine at once if the gateway answers; otherwise the next rollouts start with
    it.
    """
    try:
        await withhold(calls, calls.context(command))
    except PacelineError as error:
        log = get_logger("coordinator")
        log.error("the quarantine waits for the next rollouts", error=str(error))


async def withhold(calls: base.Calls, context: CommandContext) -> None:
    """Stops all gateways from using the quarantined paths. Raises errors of the call."""
    paths = calls.state().quarantined
    if not paths:
        return
    request = QuarantineRequest(context=context, paths=paths)
    answers = await gateways.ask_all(calls, "Quarantine", request, _DEADLINE_S)
    if unmet := sorted({path for answer in answers for path in answer.unmet}):
        get_logger("coordinator").error("paths_stay", paths=unmet)
