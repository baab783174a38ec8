"""Tools and simulated users of one's own, and tools of servers, in conversations of the built-in
environment.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from unit.rollout_gateway.environments.test_tool_use import Script, calls, says, task

from paceline.errors import ConfigError, InvalidInput, Unavailable
from paceline.services.rollout_gateway.config import ToolServerConfig
from paceline.services.rollout_gateway.environments.base import Episode, EpisodeTask
from paceline.services.rollout_gateway.environments.interactions import Interactions
from paceline.services.rollout_gateway.environments.tool_use import ToolUse
from paceline.services.rollout_gateway.environments.toolbox import Toolbox

OWN = '''
import asyncio
from typing import Annotated

from paceline.services.rollout_gateway.environments.interactions import UserReply


async def price(item: str, pieces: int = 1) -> float:
    """What some pieces of an item cost."""
    await asyncio.sleep(0)
    return {"bolt": 0.5}[item] * pieces


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
    environment = ToolUse(None, Toolbox(own={"price": own("price")}))
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
        await ToolUse(None, Toolbox(own={"mine": own(name)})).prepare([{}])


async def test_a_tool_with_the_name_of_another_is_refused(own: Callable[[str], str]) -> None:
    with pytest.raises(ConfigError, match="two tools have the same name; seen: calculator"):
        await ToolUse(None, Toolbox(own={"calculator": own("price")})).prepare([{}])


def dialogue(own: Callable[[str], str], **names: str) -> ToolUse:
    return ToolUse(None, None, Interactions({name: own(cls) for name, cls in names.items()}))


async def test_a_user_answers_scores_turns_and_ends_the_dialogue(
    own: Callable[[str], str],
) -> None:
    asked = EpisodeTask("t", "6*7?", "42")
    model = Script(says("41"), calls(("calculator", '{"expression": "6*7"}')), says("It is 42."))
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


SERVER = """
import os

from mcp.server import MCPServer

server = MCPServer("shop")


@server.tool()
def price(item: str) -> str:
    "What an item costs."
    return {"bolt": "0.50"}[item]


@server.tool()
def leave() -> str:
    "Ends this server."
    os._exit(3)


server.run()
"""


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Callable[..., Toolbox]]:
    """A toolbox over a server of this test's own, with these settings."""
    pytest.importorskip("mcp", reason="the extra mcp is not installed")
    (file := tmp_path / "server.py").write_text(SERVER)
    opened: list[Toolbox] = []

    def made(**settings: Any) -> Toolbox:
        given = {"command": (sys.executable, str(file)), **settings}
        server = ToolServerConfig.model_validate(given)
        opened.append(Toolbox(servers={"shop": server}))
        return opened[-1]

    yield made
    for one in opened:
        await one.stop()


async def test_tools_of_a_server_are_called(shop: Callable[..., Toolbox]) -> None:
    environment = ToolUse(None, shop(tools=["price"]))
    await environment.prepare([{}])
    wished = [("price", '{"item": "bolt"}'), ("price", '{"item": "nut"}'), ("price", "[]")]
    model = Script(calls(*wished), says("done"))
    told = answers(await environment.run(task(), model))
    assert told[0] == "0.50"
    assert told[1].startswith("error: ")
    assert "price" in told[1]
    assert told[2] == "error: the arguments must be a JSON object"
    names = [tool["function"]["name"] for tool in model.tools]
    assert names == ["calculator", "price"]
    assert model.tools[1]["function"]["description"] == "What an item costs."
    assert model.tools[1]["function"]["parameters"]["required"] == ["item"]


async def test_a_server_that_was_lost_is_a_machines_fault_and_starts_again(
    shop: Callable[..., Toolbox],
) -> None:
    environment = ToolUse(None, shop(deadline_s=20))
    await environment.prepare([{}])
    lost = await environment.run(task(), Script(calls(("leave", "{}")), says("done")))
    assert lost.finish == "error"
    again = Script(calls(("price", '{"item": "bolt"}')), says("done"))
    assert answers(await environment.run(task(), again)) == ["0.50"]


async def test_a_server_that_cannot_be_used_is_refused_before_the_run(
    shop: Callable[..., Toolbox],
) -> None:
    with pytest.raises(ConfigError, match=r"tools; seen: weigh; allowed: price, leave"):
        await shop(tools=["weigh"]).tools()
    with pytest.raises(ConfigError, match="the tool server shop cannot be used"):
        await shop(command=["/nowhere/server"]).tools()
    with pytest.raises((ConfigError, Unavailable)):
        await shop(command=[sys.executable, "-c", "pass"], deadline_s=5).tools()


async def test_a_server_that_does_not_start_in_time_is_late_each_time_it_is_asked() -> None:
    silent = (sys.executable, "-c", "import time; time.sleep(60)")
    settings = ToolServerConfig(command=silent, deadline_s=0.3)
    toolbox = Toolbox(servers={"shop": settings})
    for _ in range(2):
        with pytest.raises(Unavailable, match="the tool server shop does not start in time"):
            await toolbox.tools()
    await toolbox.stop()


@pytest.mark.parametrize("settings", [{}, {"command": ["a"], "url": "http://127.0.0.1:1/mcp"}])
def test_a_server_is_a_command_or_a_url(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a command or a url"):
        ToolServerConfig.model_validate(settings)


async def test_without_the_library_a_server_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    servers = {"shop": ToolServerConfig(command=("shop",))}
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[mcp\]'"):
        await Toolbox(servers=servers).tools()
