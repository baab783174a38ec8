"""Tools and simulated users of one's own in conversations of the built-in environment."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from unit.rollout_gateway.environments.test_tool_use import Script, calls, says, task

from paceline.errors import ConfigError, InvalidInput
from paceline.services.rollout_gateway.config import SandboxConfig
from paceline.services.rollout_gateway.environments import Episode, EpisodeTask
from paceline.services.rollout_gateway.environments.kinds import ToolUse
from paceline.services.rollout_gateway.environments.toolbox import Toolbox
from paceline.services.rollout_gateway.sandbox import Sandbox

OWN = '''
import asyncio
from typing import Annotated

from paceline.services.rollout_gateway.environments.kinds import UserReply


async def price(item: str, pieces: int = 1) -> float:
    """What some pieces of an item cost."""
    await asyncio.sleep(0)
    return {"bolt": 0.5}[item] * pieces


def half(exits: bool = False) -> str:
    """Says half of a character, or exits."""
    if exits:
        raise SystemExit(3)
    return "\\ud83d is half"


def untold(item):
    """Its parameter has no type."""


def any_number(*items: str):
    """Takes what it gets."""


class Teacher:
    """Wants a number, twice at most."""

    def __init__(self, task):
        self.task, self.asked = task, 0

    async def answer(self, messages):
        said = messages[-1].content
        if self.task.answer in said:
            return UserReply(reward=1.0, ends=True)
        self.asked += 1
        return UserReply("Try again.", reward=0.0, ends=self.asked == 2)


class Broken:
    def __init__(self, task):
        if task.prompt == "never":
            raise ValueError("not this one")

    def answer(self, messages):
        return {"never": None}[messages[-1].content]


class Silent:
    def __init__(self, task):
        pass

    def answer(self, messages):
        return "a text"


NUMBER = 3
'''


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], str]:
    """The import path of a name in the file above."""
    (file := tmp_path / "own.py").write_text(OWN)
    return lambda name: f"{file}:{name}"


def answers(episode: Episode) -> list[str]:
    return [message.content for message in episode.messages if message.role == "tool"]


async def test_a_function_is_a_tool_by_its_annotations_and_docstring(
    own: Callable[[str], str],
) -> None:
    wished = [
        {"item": "bolt", "pieces": 4},
        {"item": "bolt"},
        {"item": "nut"},
        {"piece": "bolt"},
        {"item": "bolt", "pieces": "many"},
        {"item": "bolt", "more": 1},
        ["bolt"],
    ]
    model = Script(calls(*(("price", json.dumps(one)) for one in wished)), says("done"))
    environment = ToolUse(Toolbox(own={"price": own("price")}))
    await environment.prepare([{}])
    told = answers(await environment.run(task(), model))
    assert told[:3] == ["2.0", "0.5", "error: KeyError: 'nut'"]
    assert told[3].startswith("error: item: Field required")
    assert told[4].startswith("error: pieces: Input should be a valid integer")
    assert told[5].startswith("error: more: Extra inputs")
    assert told[6].startswith("error: the arguments: Input should be")
    (shown,) = [tool for tool in model.tools if tool["function"]["name"] == "price"]
    assert shown["function"]["description"] == "What some pieces of an item cost."
    assert shown["function"]["parameters"]["required"] == ["item"]
    assert shown["function"]["parameters"]["properties"]["pieces"]["type"] == "integer"


async def test_a_tool_that_says_half_a_character_or_exits_answers_the_model(
    own: Callable[[str], str],
) -> None:
    wished = [("half", "{}"), ("half", '{"exits": true}')]
    environment = ToolUse(Toolbox(own={"half": own("half")}))
    told = answers(await environment.run(task(), Script(calls(*wished), says("done"))))
    assert told == ["\ufffd is half", "error: SystemExit: 3"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("absent", "a tool cannot be imported: AttributeError"),
        ("NUMBER", "a tool is no function"),
        ("Teacher", "a tool is no function"),
        ("untold", "the parameters of a tool cannot be read: KeyError: 'item'"),
        ("any_number", r"cannot be read: TypeError: \*items"),
    ],
)
async def test_what_is_no_tool_is_refused_before_the_run(
    own: Callable[[str], str], name: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        await ToolUse(Toolbox(own={"mine": own(name)})).prepare([{}])


async def test_a_tool_with_the_name_of_another_is_refused(own: Callable[[str], str]) -> None:
    toolbox = Toolbox(Sandbox(SandboxConfig()), own={"python": own("price")})
    with pytest.raises(ConfigError, match="two tools have the same name; seen: python"):
        await ToolUse(toolbox).prepare([{}])


def dialogue(own: Callable[[str], str], **names: str) -> ToolUse:
    return ToolUse(Toolbox(), {name: own(cls) for name, cls in names.items()})


async def test_a_user_answers_scores_turns_and_ends_the_dialogue(
    own: Callable[[str], str],
) -> None:
    asked = EpisodeTask("t", "6*7?", "42")
    model = Script(says("41"), calls(("price", "{}")), says("It is 42."))
    episode = await dialogue(own, teacher="Teacher").run(asked, model)
    assert (episode.text, episode.finish, model.rewards) == ("It is 42.", "stop", [0.0, 1.0])
    roles = [message.role for message in episode.messages]
    assert roles == ["user", "assistant", "user", "assistant", "tool", "assistant"]
    assert episode.messages[2].content == "Try again."
    stubborn = Script(says("1"), says("2"))
    episode = await dialogue(own, teacher="Teacher").run(asked, stubborn)
    assert (episode.text, stubborn.rewards) == ("2", [0.0, 0.0])


async def test_a_dialogue_ends_with_its_turns(own: Callable[[str], str]) -> None:
    asked = EpisodeTask("t", "6*7?", "42", {"max_turns": "1"})
    model = Script(says("41"))
    episode = await dialogue(own, teacher="Teacher").run(asked, model)
    assert (episode.finish, episode.text, model.rewards) == ("length", "41", [0.0])


async def test_a_task_names_its_user_where_there_are_several(own: Callable[[str], str]) -> None:
    environment = dialogue(own, teacher="Teacher", broken="Broken")
    model = Script(says("x"))
    assert (await environment.run(task(), model)).messages[-1].content == "x"  # nobody answers
    with pytest.raises(InvalidInput, match=r"seen: nobody; allowed: teacher, broken"):
        await environment.prepare([{"interaction": "nobody"}])
    with pytest.raises(InvalidInput, match="an interaction failed: KeyError"):
        await environment.run(task(interaction="broken"), Script(says("x")))
    with pytest.raises(InvalidInput, match="cannot begin: ValueError: not this one"):
        await dialogue(own, broken="Broken").run(EpisodeTask("t", "never", ""), Script(says("x")))


@pytest.mark.parametrize(
    ("name", "says"),
    [("NUMBER", "an interaction is no class"), ("absent", "cannot be imported")],
)
async def test_what_is_no_user_is_refused_before_the_run(
    own: Callable[[str], str], name: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        await dialogue(own, mine=name).prepare([{}])


async def test_an_answer_that_is_no_reply_fails_the_sample(own: Callable[[str], str]) -> None:
    with pytest.raises(InvalidInput, match="answers with a UserReply; seen: 'a text'"):
        await dialogue(own, silent="Silent").run(task(), Script(says("x")))
