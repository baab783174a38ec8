"""The ledger of finished branches: what became final, was trained, dropped, lies open or is lost.
All of it in Redis.

It does not decide what is trained or dropped; the trainer reports that.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import redis.asyncio

from paceline.streams import scripts
from paceline.streams.base import entry_bytes
from paceline.streams.connection import redis_errors, run_key
from paceline.streams.redis_stream import flat
from paceline.trajectory import Trajectory, tokens_hash

NOTED = ("step", "task_id", "group_id", "group_size", "task_index", "sample_index")
"""What the ledger says of a branch besides its tokens, and of a session that was lost."""


@dataclass(frozen=True, slots=True)
class LedgerCount:
    """Where the final branches are: final = trained + dropped + open + lost."""

    final: int
    trained: int
    dropped: dict[str, int]  # reason -> branches
    open: int  # their entries still lie in the stream
    lost: int  # neither trained nor dropped, and no entry: 0 in a healthy run


class Ledger:
    """Ledger of one run on the durable Redis. Branches are named by str(BranchKey)."""

    def __init__(self, client: redis.asyncio.Redis, run_id: str) -> None:
        self._client: Any = client
        self._run_id = run_id
        self._stream = run_key(run_id, "trajectories")
        self._ledger = run_key(run_id, "ledger")
        self._finals = run_key(run_id, "finals")
        self._trained = run_key(run_id, "trained")
        self._dropped = run_key(run_id, "dropped")
        self._append_final = client.register_script(scripts.APPEND_FINAL)
        self._count = client.register_script(scripts.COUNT)

    async def append_final(
        self, trajectory: Trajectory, fields: Mapping[str, str], payload: bytes
    ) -> bool:
        """Append a finished branch once and enter it in the ledger, in one script; False when it
        was there already.
        """
        branch = str(trajectory.key)
        record = json.dumps({**_record(trajectory), "final": True})
        keys = [self._stream, f"{self._stream}:once:{branch}", f"{self._stream}:sizes"]
        keys += [self._ledger, self._finals, self._step_key(trajectory.step)]
        args = [
            uuid.uuid4().hex,
            branch,
            record,
            entry_bytes(fields, payload),
            *flat(fields, payload),
        ]
        with redis_errors(self._client, f"append branch {branch}"):
            return bool(await self._append_final(keys=keys, args=args))

    async def record_unpublished(self, trajectory: Trajectory, reason: str) -> None:
        """Note a branch that never enters the stream ("unscored", "aborted", ...); a final one
        stays final.
        """
        record = json.dumps({**_record(trajectory), "final": False, "reason": reason})
        with redis_errors(self._client, f"record branch {trajectory.key}"):
            await self._client.hsetnx(self._ledger, str(trajectory.key), record)

    async def mark_trained(self, keys: Sequence[str], step: int) -> None:
        """Note that the optimiser step `step` used these branches.

        Call it before their entries are deleted.
        """
        if keys:
            with redis_errors(self._client, "mark branches trained"):
                await self._client.hset(self._trained, mapping=dict.fromkeys(keys, step))

    async def mark_dropped(self, reasons: Mapping[str, str]) -> None:
        """Note why branches are not trained: branch -> reason.

        Call it before their entries are deleted.
        """
        if reasons:
            with redis_errors(self._client, "mark branches dropped"):
                await self._client.hset(self._dropped, mapping=dict(reasons))

    async def count(self) -> LedgerCount:
        """Count the final branches by fate, at one instant, from Redis alone."""
        with redis_errors(self._client, "count the ledger"):
            reply = await self._count(
                keys=[self._stream, self._finals, self._trained, self._dropped]
            )
        final, trained, still_open, lost = (int(value) for value in reply[:4])
        dropped = {reply[i].decode(): int(reply[i + 1]) for i in range(4, len(reply), 2)}
        return LedgerCount(final, trained, dropped, still_open, lost)

    async def get(self, key: str) -> dict[str, Any] | None:
        """The record of one branch; None when the ledger does not know it."""
        with redis_errors(self._client, f"read branch {key}"):
            raw = await self._client.hget(self._ledger, key)
        return None if raw is None else json.loads(raw)

    async def finals(self, step: int) -> list[dict[str, Any]]:
        """Records of the final branches of one RL step, sorted by (task_index, sample_index)."""
        with redis_errors(self._client, f"read finals of step {step}"):
            branches = await self._client.smembers(self._step_key(step))
            raw = await self._client.hmget(self._ledger, list(branches)) if branches else []
        records = [json.loads(value) for value in raw if value is not None]
        return sorted(records, key=lambda record: (record["task_index"], record["sample_index"]))

    def _step_key(self, step: int) -> str:
        return run_key(self._run_id, f"finals:{step}")


def _record(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "key": str(trajectory.key),
        **{name: getattr(trajectory, name) for name in NOTED},
        "branch_count": trajectory.branch_count,
        "reward": trajectory.reward,
        "tokens": len(trajectory.token_ids),
        "trained_tokens": trajectory.trained_tokens,
        "tokens_hash": tokens_hash(trajectory.token_ids),
        "response_hash": tokens_hash([*compress(trajectory.token_ids, trajectory.loss_mask)]),
        "finish_reason": trajectory.finish_reason,
        "policy_versions": sorted({span.policy_version for span in trajectory.version_spans}),
        "at_s": time.time(),
    }
