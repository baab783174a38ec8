"""The ledger of finished branches: final, trained, dropped, open or lost.

It is kept in Redis, by branch until the branch's step is compacted, and as totals for ever. The
trainer decides and reports the fate of a branch.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import redis.asyncio

from paceline.streams import connection, redis_stream, scripts
from paceline.trajectory import Trajectory, tokens_hash

NOTED = ("step", "task_id", "group_id", "group_size", "task_index", "sample_index")
"""Fields that the ledger keeps of a branch besides its tokens, and of a lost session."""
PAGE = 1000
"""Branches per script; Redis serves no other client meanwhile."""


@dataclass(frozen=True, slots=True)
class LedgerCount:
    """Branches by fate: final = trained + dropped + open + lost."""

    final: int
    trained: int
    dropped: dict[str, int]  # reason -> branches
    open: int  # entry is still in the stream
    lost: int  # final without fate and without entry: 0 in a healthy run
    # reason -> branches that never became final
    unpublished: dict[str, int] = field(default_factory=dict)


class Ledger:
    """Ledger of one run on the durable Redis. Branches are named by str(BranchKey).

    Keys: `ledger` (hash, branch -> record), `ledger:steps` (sorted set of the same branches by
    step), `ledger:undecided` (hash, final branch -> its entry), `ledger:fates` (hash, branch ->
    "trained:<step>" or "dropped:<reason>"), `ledger:totals` (hash: `final`, `trained`,
    `dropped:<reason>`, `unpublished:<reason>`, and `compacted`, the last compacted step).
    """

    def __init__(self, client: redis.asyncio.Redis, run_id: str) -> None:
        self._client: Any = client
        self._stream = connection.run_key(run_id, "trajectories")
        self._ledger = connection.run_key(run_id, "ledger")
        self._undecided, self._fates, self._totals, self._steps = (
            f"{self._ledger}:{name}" for name in ("undecided", "fates", "totals", "steps")
        )
        self._append_final = client.register_script(scripts.script("add", "append_final"))
        self._note = client.register_script(scripts.script("note", "record_unpublished"))
        self._mark = client.register_script(scripts.script("mark"))
        self._compact = client.register_script(scripts.script("compact"))
        self._count = client.register_script(scripts.script("count"))

    async def append_final(
        self, trajectory: Trajectory, fields: Mapping[str, str], payload: bytes
    ) -> bool:
        """Appends a finished branch once and enters it in the ledger, in one script.

        Returns False if the branch is already there, or if its step is compacted; it then counts as
        dropped, reason "late".
        """
        branch = str(trajectory.key)
        record = json.dumps({**_record(trajectory), "final": True})
        keys = [self._stream, f"{self._stream}:sizes", self._ledger, self._undecided, self._fates]
        size = redis_stream.entry_bytes(fields, payload)
        args = [branch, record, trajectory.step, size, *redis_stream.flat(fields, payload)]
        with connection.redis_errors(self._client, f"append branch {branch}"):
            return bool(
                await self._append_final(keys=[*keys, self._totals, self._steps], args=args)
            )

    async def record_unpublished(self, trajectory: Trajectory, reason: str) -> None:
        """Records a branch that never enters the stream ("unscored", "aborted", ...). A final
        branch stays final.
        """
        record = json.dumps({**_record(trajectory), "final": False, "reason": reason})
        args: list[Any] = [str(trajectory.key), record, trajectory.step, reason]
        with connection.redis_errors(self._client, f"record branch {trajectory.key}"):
            await self._note(keys=[self._ledger, self._totals, self._steps], args=args)

    async def mark_trained(self, keys: Sequence[str], step: int) -> None:
        """Records that the optimiser step `step` used these branches.

        Call it before their entries are deleted.
        """
        await self._give_fates(dict.fromkeys(keys, f"trained:{step}"))

    async def mark_dropped(self, reasons: Mapping[str, str]) -> None:
        """Records the reasons of untrained branches: branch -> reason.

        Call it before their entries are deleted.
        """
        await self._give_fates({key: f"dropped:{reason}" for key, reason in reasons.items()})

    async def compact(self, through_step: int) -> None:
        """Removes the branches of steps up to `through_step` that have a fate or never became
        final. Their totals stay.

        Call it when no restart can train these steps again: a branch of such a step is no longer
        appended.
        """
        stay, found = 0, PAGE
        keys = [self._ledger, self._undecided, self._fates, self._totals, self._steps]
        with connection.redis_errors(
            self._client, f"compact the ledger through step {through_step}"
        ):
            while through_step >= 0 and found == PAGE:
                found, more = await self._compact(keys=keys, args=[through_step, stay, PAGE])
                stay += more

    async def count(self) -> LedgerCount:
        """Counts branches by fate at one instant, from Redis alone. The time grows with the number
        of branches without a fate.
        """
        with connection.redis_errors(self._client, "count the ledger"):
            still_open, lost, *reply = await self._count(
                keys=[self._stream, self._undecided, self._totals]
            )
        totals = {reply[i].decode(): int(reply[i + 1]) for i in range(0, len(reply), 2)}
        dropped, unpublished = (
            {
                name.removeprefix(kind): count
                for name, count in totals.items()
                if name.startswith(kind) and count
            }
            for kind in ("dropped:", "unpublished:")
        )
        final, trained = totals.get("final", 0), totals.get("trained", 0)
        return LedgerCount(final, trained, dropped, int(still_open), int(lost), unpublished)

    async def finals(self, step: int) -> list[dict[str, Any]]:
        """Records of the final branches of one RL step, sorted by (task_index, sample_index)."""
        with connection.redis_errors(self._client, f"read finals of step {step}"):
            branches = await self._client.zrangebyscore(self._steps, step, step)
            raw = await self._client.hmget(self._ledger, branches) if branches else []
        records = [json.loads(value) for value in raw if value is not None]
        finals = [record for record in records if record["final"]]
        return sorted(finals, key=lambda record: (record["task_index"], record["sample_index"]))

    async def _give_fates(self, fates: Mapping[str, str]) -> None:
        pairs = [part for pair in fates.items() for part in pair]
        with connection.redis_errors(self._client, "mark branches"):
            for first in range(0, len(pairs), 2 * PAGE):
                await self._mark(
                    keys=[self._undecided, self._fates, self._totals],
                    args=pairs[first : first + 2 * PAGE],
                )


def _record(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "key": str(trajectory.key),
        **{name: getattr(trajectory, name) for name in NOTED},
        "branch_count": trajectory.branch_count,
        "reward": trajectory.reward,
        "reward_parts": dict(trajectory.reward_parts),
        "tokens": len(trajectory.token_ids),
        "trained_tokens": trajectory.trained_tokens,
        "tokens_hash": tokens_hash(trajectory.token_ids),
        "response_hash": tokens_hash([*compress(trajectory.token_ids, trajectory.loss_mask)]),
        "finish_reason": trajectory.finish_reason,
        "policy_versions": sorted({span.policy_version for span in trajectory.version_spans}),
        "at_s": time.time(),
    }
