"""Refuses commands of another run, of leases replaced by a newer one, and of leases that the
coordinator never granted.
"""

import hmac
import json
import re
from collections import OrderedDict
from enum import StrEnum
from pathlib import Path

from paceline.config import RUN_ID, SecurityConfig
from paceline.errors import DataLoss, InvalidInput, StaleEpoch
from paceline.rpc.status import NOT_ALLOWED
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.whole_files import write_whole

_KEPT = 256
EPOCHS = "epochs.json"
"""Name of a guard's file, beside the guarded data."""


class Track(StrEnum):
    """A sequence of leases. Leases of different tracks are independent of each other."""

    ROLLOUTS = "rollouts"
    LEARNER = "learner"  # policy steps, their pushes and commits
    DRAFTER = "drafter"
    SLOTS = "slots"  # which pass from one to another


def leased(security: SecurityConfig, run_id: str, step: int, epoch: int) -> CommandContext:
    """The context of a command under a lease of this epoch. The coordinator alone makes these."""
    proof = _proof(security.token, run_id, epoch)
    return CommandContext(run_id=run_id, step=step, epoch=epoch, lease_proof=proof)


def check_run(context: CommandContext, run_id: str) -> None:
    """Raises InvalidInput when a command belongs to another run than this service."""
    if context.run_id != run_id:
        raise InvalidInput("this trainer serves another run", seen=context.run_id, allowed=run_id)


class EpochGuard:
    """Refuses commands of leases that a newer one of their track has replaced, or that the
    coordinator never granted.

    For use on one event loop.
    """

    def __init__(self, security: SecurityConfig, file: Path | None = None) -> None:
        """`file`: keeps the epochs over a restart; None loses them with this process.

        Raises DataLoss when the file's content is not epochs.
        """
        self._security = security
        self._file = file
        self._highest: OrderedDict[str, int] = OrderedDict(_read(file) if file else {})

    def check(self, context: CommandContext, track: Track) -> None:
        """Records the command's epoch.

        Raises StaleEpoch when the run's track has already used a higher epoch. Raises InvalidInput
        when the command names no run, and (NOT_ALLOWED) when its epoch is new without proof of a
        lease: one wrong large epoch would shut out all honest commands. Raises ResourceExhausted
        when a new epoch cannot be saved.
        """
        run, epoch = context.run_id, context.epoch
        if not re.fullmatch(RUN_ID, run):
            message = "a command names its run"
            raise InvalidInput(message, reason="RUN_ID", seen=repr(run), allowed=RUN_ID)

        highest = self.highest(run, track)
        if epoch < highest:
            message = f"a newer lease of run {run} is in force"
            raise StaleEpoch(message, seen=epoch, allowed=f"at least {highest}")
        self.check_proof(context, track)
        if epoch > highest:
            self._keep(_key(run, track), epoch)

    def _keep(self, key: str, epoch: int) -> None:
        """Saves on disk before in memory: a command may only run after older commands are
        shut out.
        """
        kept = OrderedDict(self._highest)
        kept[key] = epoch
        kept.move_to_end(key)
        if len(kept) > _KEPT:
            kept.popitem(last=False)
        if self._file is not None:
            # Not synced, since a sync may stop the event loop for seconds while weights are
            # written. A loss of power also ends every sender of an old epoch.
            write_whole(self._file, json.dumps(kept))
        self._highest = kept

    def check_proof(self, context: CommandContext, track: Track) -> None:
        """Raises InvalidInput (NOT_ALLOWED) for a new epoch without the proof of a lease.

        Without a token no proof is possible, and every epoch is accepted.
        """
        token, highest = self._security.token, self.highest(context.run_id, track)
        if not token or context.epoch <= highest:
            return
        expected = _proof(token, context.run_id, context.epoch)
        if not hmac.compare_digest(context.lease_proof.encode(), expected.encode()):
            message = f"no lease of run {context.run_id} has this epoch"
            allowed = f"{highest}, or a lease of the coordinator"
            raise InvalidInput(message, reason=NOT_ALLOWED, seen=context.epoch, allowed=allowed)

    def highest(self, run_id: str, track: Track) -> int:
        """Highest epoch received in a track of a run; 0 without any."""
        return self._highest.get(_key(run_id, track), 0)


def _key(run: str, track: Track) -> str:
    return f"{run}/{track}"


def _read(file: Path) -> dict[str, int]:
    if not file.exists():
        return {}
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return {str(key): int(epoch) for key, epoch in kept.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        message = f"{file} holds no epochs; without it commands of old leases would be obeyed"
        allowed = "remove it when nothing of the run is alive"
        raise DataLoss(message, seen=str(error)[:120], allowed=allowed) from error


def _proof(token: str, run_id: str, epoch: int) -> str:
    if not token:
        return ""
    return hmac.digest(token.encode(), f"lease {epoch} of {run_id}".encode(), "sha256").hex()
