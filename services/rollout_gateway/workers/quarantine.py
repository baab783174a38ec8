"""Disables paths that an audit found inexact, on all workers and on later starts."""

from collections.abc import Iterable

from paceline.arm_names import OFF
from paceline.errors import InvalidInput, PacelineError, Unavailable
from paceline.models.profiles import ROUNDED
from paceline.services.rollout_gateway import metrics
from paceline.services.rollout_gateway.engines.nouns import Capability
from paceline.services.rollout_gateway.workers.process import WorkerProcess
from paceline.services.rollout_gateway.workers.router import Router
from paceline.telemetry import get_logger
from paceline.trajectory import (
    ARM_PATH,
    DRAFTED_PATH,
    NUMBERS_PATH,
    PLAIN_PATH,
    REUSED_PATH,
    SWAPPED_PATH,
)
from paceline.v1 import engine_pb2 as pb

_ALONE = (PLAIN_PATH, DRAFTED_PATH, REUSED_PATH, SWAPPED_PATH)


class Quarantined:
    """Paths that no worker uses; the set only grows."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.paths: tuple[str, ...] = ()

    async def add(self, paths: Iterable[str]) -> list[str]:
        """Disable paths on every worker; returns the paths that the engine cannot disable. Raises
        InvalidInput for an invalid path name, and the workers' errors.
        """
        wanted = list(dict.fromkeys(paths))
        for path in wanted:
            _check(path)
        new = [path for path in wanted if path not in self.paths]
        if new:
            self.paths += tuple(new)
            for path in new:
                get_logger(__name__).error("path_quarantined", path=path)
                metrics.QUARANTINED.record(1, path=path)
            for answer in await self._router.ask_all(self._command()):
                # A lost worker gets the command when it restarts.
                if isinstance(answer, PacelineError) and not isinstance(answer, Unavailable):
                    raise answer
        return [path for path in wanted if self._unmet(path)]

    async def send_paths(self, process: WorkerProcess) -> None:
        """Send the disabled paths to a starting worker, before its first request."""
        if self.paths:
            await self._router.ask(process, self._command())

    def _unmet(self, path: str) -> bool:
        """Whether the engine cannot disable the path. The coordinator handles a commit's own paths:
        a swap and a profile.
        """
        profiles = ROUNDED if Capability.PROFILES in self._router.ready.capabilities else ()
        rounding = path.startswith(NUMBERS_PATH)
        return path == PLAIN_PATH or (rounding and path.removeprefix(NUMBERS_PATH) not in profiles)

    def _command(self) -> pb.WorkerCommand:
        arms = [path.removeprefix(ARM_PATH) for path in self.paths if path.startswith(ARM_PATH)]
        if DRAFTED_PATH in self.paths:
            arms = [arm for arm in self._router.ready.arms if arm != OFF]
        return pb.WorkerCommand(
            quarantine=pb.Quarantine(arms=arms, reuse=REUSED_PATH in self.paths)
        )


def _check(path: str) -> None:
    named = any(path.startswith(kind) and path != kind for kind in (ARM_PATH, NUMBERS_PATH))
    if path not in _ALONE and not named:
        allowed = f"{', '.join(_ALONE)}, {ARM_PATH}<name> or {NUMBERS_PATH}<format>"
        raise InvalidInput("an audit knows no such path", seen=path, allowed=allowed)
