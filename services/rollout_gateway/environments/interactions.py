"""Simulated users: they reply to the model, score its turns and end the dialogue."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.errors import ConfigError, InvalidInput
from paceline.plugins import find_variant
from paceline.services.rollout_gateway.chat.messages import Message
from paceline.services.rollout_gateway.environments.base import EpisodeTask

METADATA = "interaction"
"""Key of a task's metadata with the name of its simulated user."""


@dataclass(frozen=True, slots=True)
class UserReply:
    """A user's reaction to the model's message."""

    text: str = ""
    """The user's next message; unused when the dialogue ends."""
    reward: float | None = None
    """Reward of the model's turn; None leaves it unscored."""
    ends: bool = False
    """Whether this was the last turn."""


class Interaction(Protocol):
    """The user of one dialogue. Its class is built with the task, once per sample."""

    def answer(self, messages: Sequence[Message]) -> Any:
        """A UserReply to the model's last message; may be a coroutine."""
        ...


class Interactions:
    """The configured simulated users, by name."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = paths

    def check(self, metadata: Mapping[str, str]) -> None:
        """Raises ConfigError for a class that cannot be imported, InvalidInput for an unlisted
        name.
        """
        self._class(metadata)

    def of(self, task: EpisodeTask) -> Interaction | None:
        """The user that the task's metadata selects, or the only configured user. None ends the
        dialogue at the model's first answer without a call. Raises InvalidInput for an unknown name
        or a failing class.
        """
        own = self._class(task.metadata)
        if own is None:
            return None
        try:
            user: Interaction = own(task)
        except Exception as error:  # a user's class may raise anything
            message = f"an interaction cannot begin: {type(error).__name__}: {error}"
            raise InvalidInput(message, seen=task.task_id) from error
        return user

    def _class(self, metadata: Mapping[str, str]) -> Callable[[EpisodeTask], Any] | None:
        only = next(iter(self._paths)) if len(self._paths) == 1 else ""
        name = metadata.get(METADATA, only)
        if not name:
            return None
        if name not in self._paths:
            allowed = f"{', '.join(self._paths) or 'none'}; gateway.interactions adds yours"
            raise InvalidInput(f'metadata["{METADATA}"]', seen=name, allowed=allowed)
        own: Any = find_variant(self._paths[name], {}, "interaction")
        if not callable(own):
            seen = self._paths[name]
            raise ConfigError("an interaction is no class", seen=seen, allowed="a class")
        return own  # type: ignore[no-any-return]


async def reply_of(user: Interaction, messages: Sequence[Message]) -> UserReply:
    """The user's reply. Raises InvalidInput when the user's code raises or returns no UserReply."""
    try:
        found = user.answer(messages)
        reply = await found if inspect.isawaitable(found) else found
    except Exception as error:  # a user's class may raise anything
        message = f"an interaction failed: {type(error).__name__}: {error}"
        raise InvalidInput(message, seen=type(user).__name__) from error
    if not isinstance(reply, UserReply) or not isinstance(reply.text, str):
        raise InvalidInput("an interaction answers with a UserReply", seen=repr(reply)[:80])
    return reply
