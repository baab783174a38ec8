"""Finds the replica of a request: by its key, session, completion or group, or by the beginning of
its conversation. Other requests go to the replicas in turn.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from paceline.errors import Unavailable
from paceline.services.rollout_gateway.replicas.fleet import Replica, ReplicaFleet
from paceline.services.rollout_gateway.sessions.registry import KEY_PREFIX
from paceline.services.rollout_gateway.sessions.shard import shard_of

_DRAWN = re.compile(r"[0-9a-f]{32}")
_SPOKEN = ("assistant", "function_call", "reasoning")


class SessionRouting:
    """Routing of one head."""

    def __init__(self, fleet: ReplicaFleet) -> None:
        self._fleet = fleet
        self._turns = itertools.count()

    def named(self, name: str) -> Replica:
        """The replica of a name. A replica draws keys, sessions and completions; a caller gives
        groups.
        """
        replicas = self._fleet.replicas
        return replicas[shard_of(name, len(replicas))]

    def key(self, api_key: str) -> Replica | None:
        """The replica of a session's key; None for other keys."""
        return self.named(api_key) if api_key.startswith(KEY_PREFIX) else None

    def completion(self, completion_id: str) -> Replica:
        """The replica of a completion, also of one choice among several."""
        return self.named(completion_id.partition(":")[0])

    def session(self, session_id: str) -> list[Replica]:
        """Possible replicas of a session. The run chooses the id of a session for its task, so this
        id does not name a replica.
        """
        if _DRAWN.fullmatch(session_id):
            return [self.named(session_id)]
        return self.in_turn()

    def group(self, group_id: str) -> Replica:
        """The replica with the siblings of a group; the next replica for a session without
        siblings.
        """
        return self.named(group_id) if group_id else self.next()

    def conversation(self, body: Mapping[str, Any]) -> Replica:
        """The replica of a conversation without a key, by the messages before the model's first
        answer. It is the same for all turns.
        """
        if past := body.get("previous_response_id"):
            return self.named(str(past))
        said = body.get("messages", body.get("input"))
        if not said or not isinstance(said, list | str):
            return self.next()
        begin = [body.get("system"), body.get("instructions"), _before_model(said)]
        return self.named(orjson.dumps(begin).decode())

    def next(self) -> Replica:
        """The next available replica, in turn. Raises Unavailable if there is none."""
        return self.in_turn()[0]

    def in_turn(self) -> list[Replica]:
        """All available replicas, each time with another first one. Raises Unavailable if there is
        none.
        """
        if not (ready := self._fleet.ready):
            raise Unavailable("every replica of the gateway is starting again")
        first = next(self._turns) % len(ready)
        return [*ready[first:], *ready[:first]]


def _before_model(said: Sequence[Any] | str) -> Any:
    if isinstance(said, str):
        return said
    return list(itertools.takewhile(lambda one: not _by_model(one), said))


def _by_model(message: Any) -> bool:
    if not isinstance(message, Mapping):
        return False
    return message.get("role") in _SPOKEN or message.get("type") in _SPOKEN
