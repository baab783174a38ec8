"""Declares the interface of environments: each leads one session from a task to an episode."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from paceline.errors import InvalidInput, whole_text
from paceline.services.rollout_gateway.chat.messages import Message
from paceline.trajectory import REWARD_RANGE, is_reward

FINISHES = ("stop", "length", "tool_calls", "abort", "error")
"""Finish reasons of an episode."""


@dataclass(frozen=True, slots=True)
class EpisodeTask:
    """The task of a sample."""

    task_id: str
    prompt: str
    answer: str
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextTurn:
    """The model's response to one prompt."""

    token_ids: tuple[int, ...]
    text: str
    finish: str  # "stop" | "length" | "abort" | "error"


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """The model's message in a conversation."""

    message: Message
    finish: str  # "stop" | "length" | "tool_calls" | "abort" | "error"


@dataclass(frozen=True, slots=True)
class Episode:
    """The outcome of a task, and the input of the reward rule."""

    task: EpisodeTask
    text: str  # of the last turn
    finish: str  # of the last turn
    messages: tuple[Message, ...] = ()  # the whole conversation, if there was one
    # set by the agent or the environment that led the session; no rule scores such an episode
    reward: float | None = None


def checked_episode(found: object) -> Episode:
    """The episode that an environment has returned, its text repaired by `whole_text`.

    Raises InvalidInput for any other value.
    """
    if not isinstance(found, Episode):
        seen = repr(found)[:80]
        raise InvalidInput("an environment returned no Episode", seen=seen, allowed="an Episode")
    messages, reward = found.messages, found.reward
    whole = isinstance(messages, tuple) and all(isinstance(one, Message) for one in messages)
    checks = {
        "finish": (found.finish in FINISHES, ", ".join(FINISHES)),
        "text": (isinstance(found.text, str), "text"),
        "task": (isinstance(found.task, EpisodeTask), "an EpisodeTask"),
        "messages": (whole, "a tuple of Message"),
        "reward": (reward is None or is_reward(reward), f"{REWARD_RANGE} or None"),
    }
    for name, (right, allowed) in checks.items():
        if not right:
            message = f"an environment returned an Episode with an invalid {name}"
            raise InvalidInput(message, seen=repr(getattr(found, name))[:80], allowed=allowed)
    return replace(found, text=whole_text(found.text))


class Model(Protocol):
    """The model as one session sees it; the session records every generation."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Prompt ids of a text."""

    async def generate(self, prompt: tuple[int, ...]) -> TextTurn:
        """Run one generation. `prompt` extends an earlier prompt and response, or starts a
        branch.
        """

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> ChatTurn:
        """Return the next message of a conversation. A recorded history keeps the exact tokens of
        the model.
        """

    def score(self, reward: float) -> None:
        """Set the reward of the model's last message. No rule then scores the episode.

        Raises InvalidInput for a value outside the range of rewards.
        """


class Environment(Protocol):
    """Leads one session."""

    async def run(self, task: EpisodeTask, model: Model) -> Episode:
        """Run a task to an episode. An episode with finish "abort" or "error" is not scored."""


@runtime_checkable
class PreparesTasks(Protocol):
    """An environment that can check its requirements before a run."""

    async def prepare(self, metadata: Iterable[Mapping[str, str]]) -> None:
        """Load the requirements of tasks with this metadata.

        Raises ConfigError for a setting that can never work, Unavailable for a missing resource.
        """
