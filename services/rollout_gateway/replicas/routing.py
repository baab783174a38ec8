"""Finds the replica of a request: by the key, the session or the completion that it names, by its
group, or by how its conversation begins; what names nothing goes to the next one.
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
    """Of one head."""

    def __init__(self, fleet: ReplicaFleet) -> None:
        self._fleet = fleet
        self._turns = itertools.count()

    def named(self, name: str) -> Replica:
        """Whose a name is, which a replica has drawn or a caller has given: a key, a session, a
        completion (also one of several), a group.
        """
        replicas = self._fleet.replicas
        return replicas[shard_of(name, len(replicas))]

    def key(self, api_key: str) -> Replica | None:
        """Whose the key of a session is; None for other keys."""
        return self.named(api_key) if api_key.startswith(KEY_PREFIX) else None

    def completion(self, completion_id: str) -> Replica:
        """Whose a completion is."""
        return self.named(completion_id.partition(":")[0])

    def session(self, session_id: str) -> list[Replica]:
        """Where a session may be: the name of one that answers a task of the run is the run's, and
        tells nothing.
        """
        if _DRAWN.fullmatch(session_id):
            return [self.named(session_id)]
        return self.in_turn()

    def group(self, group_id: str) -> Replica:
        """Where the siblings of a group are gathered; of a session without siblings the next."""
        return self.named(group_id) if group_id else self.next()

    def conversation(self, body: Mapping[str, Any]) -> Replica:
        """Where a conversation without a key goes on: the same for all of its turns, by what was
        said before the model first spoke.
        """
        if past := body.get("previous_response_id"):
            return self.named(str(past))
        said = body.get("messages", body.get("input"))
        if not said or not isinstance(said, list | str):
            return self.next()
        begin = [body.get("system"), body.get("instructions"), _before_model(said)]
        return self.named(orjson.dumps(begin).decode())

    def next(self) -> Replica:
        """The next one in turn that may be asked. Raises Unavailable when there is none."""
        return self.in_turn()[0]

    def in_turn(self) -> list[Replica]:
        """All that may be asked, another one first each time. Raises Unavailable."""
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
