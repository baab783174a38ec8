"""Declares what an environment is: it leads one session from a task to an episode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.chat.messages import Message
from paceline.trajectory import REWARD_RANGE, is_reward
from paceline.whole_text import whole_text

FINISHES = ("stop", "length", "tool_calls", "abort", "error")
"""How an episode may end."""


@dataclass(frozen=True, slots=True)
class EpisodeTask:
    """What is asked."""

    task_id: str
    prompt: str
    answer: str
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextTurn:
    """What the model said to one prompt."""

    token_ids: tuple[int, ...]
    text: str
    finish: str  # "stop" | "length" | "abort" | "error"


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """What the model said in a conversation."""

    message: Message
    finish: str  # "stop" | "length" | "tool_calls" | "abort" | "error"


@dataclass(frozen=True, slots=True)
class Episode:
    """What came of a task; the reward rule sees this."""

    task: EpisodeTask
    text: str  # of the last turn
    finish: str  # of the last turn
    messages: tuple[Message, ...] = ()  # the whole conversation, where there was one
    # given by the agent that led the session; a rule does not score such an episode
    reward: float | None = None


def checked_episode(found: object) -> Episode:
    """The episode that an environment has returned, its text mended by `whole_text`.

    Raises InvalidInput for anything else.
    """
    if not isinstance(found, Episode):
        raise InvalidInput(
            "an environment returned no Episode", seen=repr(found)[:80], allowed="an Episode"
        )
    messages = found.messages
    wrong = {
        "finish": (found.finish in FINISHES, ", ".join(FINISHES)),
        "text": (isinstance(found.text, str), "text"),
        "task": (isinstance(found.task, EpisodeTask), "an EpisodeTask"),
        "messages": (
            isinstance(messages, tuple) and all(isinstance(one, Message) for one in messages),
            "a tuple of Message",
        ),
        "reward": (found.reward is None or is_reward(found.reward), f"{REWARD_RANGE} or None"),
    }
    for name, (right, allowed) in wrong.items():
        if not right:
            raise InvalidInput(
                f"an environment returned an Episode with another {name}",
                seen=repr(getattr(found, name))[:80],
                allowed=allowed,
            )
    return replace(found, text=whole_text(found.text))


class Model(Protocol):
    """The model as one session sees it; every generation is recorded in the session."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Prompt ids of a text."""
        ...

    async def generate(self, prompt: tuple[int, ...]) -> TextTurn:
        """One generation; `prompt` extends what the model saw before, or begins a branch."""
        ...

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> ChatTurn:
        """The next message of a conversation; a known history keeps the exact tokens the model
        produced.
        """
        ...

    def score(self, reward: float) -> None:
        """The reward of what the model said last. No rule then scores the episode.

        Raises InvalidInput for a number that is no reward.
        """
        ...


class Environment(Protocol):
    """Leads one session."""

    async def run(self, task: EpisodeTask, model: Model) -> Episode:
        """From task to episode. An episode whose finish is "abort" or "error" is not scored."""
        ...


@runtime_checkable
class PreparesTasks(Protocol):
    """An environment that can say beforehand whether it will work."""

    async def prepare(self, metadata: Iterable[Mapping[str, str]]) -> None:
        """Load what tasks of this metadata need.

        Raises ConfigError for what can never work, Unavailable.
        """
        ...
