"""The single-turn environment sends a task's text or its conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.chat.messages import Message
from paceline.services.rollout_gateway.environments import ChatTurn, Episode, EpisodeTask, TextTurn
from paceline.services.rollout_gateway.environments.kinds import SingleTurn


class Says:
    """A model that answers 42 and records its requests."""

    asked: list[Message]

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    async def generate(self, prompt: tuple[int, ...]) -> TextTurn:
        return TextTurn((), "".join(map(chr, prompt)) + "42", "stop")

    def score(self, reward: float) -> None:
        raise NotImplementedError

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> ChatTurn:
        self.asked = list(messages)
        return ChatTurn(Message("assistant", "42"), "stop")


async def test_a_task_with_messages_is_asked_as_a_conversation() -> None:
    told = '[{"role": "system", "content": "Be short."}, {"role": "user", "content": "6*7?"}]'
    task = EpisodeTask("t", "6*7?", "42", {"messages": told})
    model = Says()
    episode = await SingleTurn().run(task, model)
    assert model.asked == [Message("system", "Be short."), Message("user", "6*7?")]
    answered = (*model.asked, Message("assistant", "42"))
    assert episode == Episode(task, "42", "stop", answered)


async def test_a_task_without_messages_is_asked_as_its_text() -> None:
    task = EpisodeTask("t", "6*7=", "42")
    assert await SingleTurn().run(task, Says()) == Episode(task, "6*7=42", "stop")


@pytest.mark.parametrize("text", ["{", "3", '["x"]', '[{"role": "user"}]'])
async def test_messages_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match='"messages"'):
        await SingleTurn().run(EpisodeTask("t", "p", "", {"messages": text}), Says())
