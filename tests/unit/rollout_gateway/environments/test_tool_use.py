"""Conversations with tools by a scripted model; the sandbox is real."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidInput, NotFound
from paceline.services.rollout_gateway.chat.messages import Message, ToolCall
from paceline.services.rollout_gateway.config import SandboxConfig
from paceline.services.rollout_gateway.environments import ChatTurn, Episode, EpisodeTask, TextTurn
from paceline.services.rollout_gateway.environments.kinds import (
    DEFAULT_TURNS,
    MAX_CALLS,
    SingleTurn,
    ToolUse,
)
from paceline.services.rollout_gateway.environments.table import Equipment, environment
from paceline.services.rollout_gateway.environments.toolbox import Toolbox
from paceline.services.rollout_gateway.environments.tools import MAX_ANSWER_CHARACTERS
from paceline.services.rollout_gateway.sandbox import Sandbox

CALCULATOR = Path(__file__).parents[4] / "examples/tools/calculator.py"


def equipped(sandbox: Sandbox | None) -> Toolbox:
    """The built-in tool and the calculator of the examples."""
    return Toolbox(sandbox, {"calculator": f"{CALCULATOR}:calculator"})


class Script:
    """Returns the scripted turns in order and records its inputs."""

    def __init__(self, *turns: ChatTurn) -> None:
        self._turns = list(turns)
        self.seen: list[tuple[Message, ...]] = []
        self.rewards: list[float] = []
        self.tools: Sequence[Mapping[str, Any]] = ()

    def encode(self, text: str) -> tuple[int, ...]:
        raise NotImplementedError

    async def generate(self, prompt: tuple[int, ...]) -> TextTurn:
        raise NotImplementedError

    def score(self, reward: float) -> None:
        self.rewards.append(reward)

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> ChatTurn:
        self.seen.append(tuple(messages))
        self.tools = tools
        return self._turns.pop(0)


LIMITS = SandboxConfig(wall_s=60, cpu_s=1, output_bytes=20_000)
"""On a busy machine a second of CPU time takes many seconds."""


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    made = Sandbox(LIMITS)
    asyncio.run(made.layers())
    return made


def calls(*wished: tuple[str, str], content: str = "") -> ChatTurn:
    wishes = tuple(
        ToolCall(f"call-{index}", name, arguments) for index, (name, arguments) in enumerate(wished)
    )
    return ChatTurn(Message("assistant", content, tool_calls=wishes), "tool_calls")


def python(code: str) -> tuple[str, str]:
    return ("python", json.dumps({"code": code}))


def says(text: str, finish: str = "stop") -> ChatTurn:
    return ChatTurn(Message("assistant", text), finish)


def task(**metadata: str) -> EpisodeTask:
    return EpisodeTask("t", "how much?", "", metadata)


async def told(sandbox: Sandbox, *wished: tuple[str, str], **metadata: str) -> list[str]:
    """Return the tools' answers to one message with these calls."""
    episode = await ToolUse(equipped(sandbox)).run(
        task(**metadata), Script(calls(*wished), says("done"))
    )
    answers = [message for message in episode.messages if message.role == "tool"]
    assert [message.tool_call_id for message in answers] == [
        f"call-{index}" for index in range(len(wished))
    ]
    assert [message.name for message in answers] == [name for name, _ in wished]
    return [message.content for message in answers]


async def test_the_model_is_asked_again_until_it_answers_without_a_call(sandbox: Sandbox) -> None:
    first = calls(
        ("calculator", '{"expression": "6 * 7"}'), python("print(6 * 7)"), content="let me see"
    )
    second = calls(python("import math\nprint(math.pi)"))
    model = Script(first, second, says("42"))
    episode = await ToolUse(equipped(sandbox)).run(task(system="be brief"), model)
    opening = (Message("system", "be brief"), Message("user", "how much?"))
    one = Message("tool", "42", tool_call_id="call-0", name="calculator")
    two = Message("tool", "42", tool_call_id="call-1", name="python")
    three = Message("tool", "3.141592653589793", tool_call_id="call-0", name="python")
    whole = (*opening, first.message, one, two, second.message, three, Message("assistant", "42"))
    assert episode == Episode(task(system="be brief"), "42", "stop", whole)
    assert model.seen == [whole[:2], whole[:5], whole[:7]]
    assert [tool["function"]["name"] for tool in model.tools] == ["python", "calculator"]
    assert model.tools[0]["function"]["parameters"]["required"] == ["code"]


async def test_an_answer_at_once_is_one_turn(sandbox: Sandbox) -> None:
    episode = await ToolUse(equipped(sandbox)).run(task(), Script(says("6")))
    assert (episode.text, episode.finish) == ("6", "stop")
    assert episode.messages == (Message("user", "how much?"), Message("assistant", "6"))


async def test_a_task_may_bring_its_own_messages_and_tools(sandbox: Sandbox) -> None:
    before = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    model = Script(calls(python("print(1)")), says("x"))
    episode = await ToolUse(equipped(sandbox)).run(
        task(messages=json.dumps(before), tools='["calculator"]'), model
    )
    assert model.seen[0] == (
        Message("system", "s"),
        Message("user", "u"),
        Message("assistant", "a"),
    )
    assert [tool["function"]["name"] for tool in model.tools] == ["calculator"]
    assert episode.messages[4].content == "error: there is no tool 'python'; there are: calculator"
    none = Script(says("x"))
    await ToolUse(equipped(sandbox)).run(task(tools="[]"), none)
    assert list(none.tools) == []


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (("search", "{}"), "error: there is no tool 'search'; there are: python, calculator"),
        (("python", "{"), "error: the arguments are not JSON"),
        (("python", "[" * 100_000), "error: the arguments are not JSON"),
        (
            ("python", '{"code": "print(\'\\ud83d\')"}'),
            "error: the arguments hold half of a surrogate",
        ),
        (("python", '["code"]'), "error: the arguments must be a JSON object with the text 'code'"),
        (
            ("python", '{"code": 3}'),
            "error: the arguments must be a JSON object with the text 'code'",
        ),
        (
            ("calculator", '{"code": "1"}'),
            "error: expression: Field required",
        ),
        (("calculator", '{"expression": "1 / 0"}'), "error: CalculationError: division by zero"),
        (
            ("calculator", '{"expression": "9**9**9"}'),
            "error: CalculationError: the result has more than 4096 bits",
        ),
        (python("pass"), "[no output]"),
        (python("import sys\nprint(1)\nprint(2, file=sys.stderr)\nexit(3)"), "1\n2\n[exit code 3]"),
        (python("while True: pass"), "[stopped: it used too much CPU time]"),
        (python("import os\nos.kill(os.getpid(), 9)"), "[ended by signal 9]"),
    ],
)
async def test_what_goes_wrong_is_told_to_the_model(
    sandbox: Sandbox, call: tuple[str, str], answer: str
) -> None:
    [told_it] = await told(sandbox, call)
    assert told_it.startswith(answer)


async def test_what_runs_too_long_is_told_to_the_model_with_what_it_had_printed() -> None:
    code = python("print(1, flush=True)\nimport time\ntime.sleep(99)")
    for wall_s in (2, 20, 80):  # on a busy machine it may be stopped before it has printed
        quick = Sandbox(LIMITS.model_copy(update={"wall_s": wall_s}))
        await quick.layers()
        [text] = await told(quick, code)
        assert text.endswith(f"[stopped: it ran longer than {wall_s} s]")
        if text.startswith("1\n"):
            break
    assert text == f"1\n[stopped: it ran longer than {wall_s} s]"


async def test_too_much_memory_is_told_to_the_model(sandbox: Sandbox) -> None:
    [text] = await told(sandbox, python("x = bytearray(10 << 30)"))
    assert text.endswith("MemoryError\n[stopped: it used too much memory]")


async def test_a_long_answer_keeps_its_beginning_and_its_end(sandbox: Sandbox) -> None:
    [text] = await told(sandbox, python("print('a' * 9000 + 'b' * 9000)"))
    assert len(text) < MAX_ANSWER_CHARACTERS + 50
    assert (text[:4000], text[-4000:]) == ("a" * 4000, "b" * 4000)
    assert "[10000 characters left out]" in text
    [cut] = await told(sandbox, python("print('a' * 30_000)"))
    assert cut.endswith("[output was cut]")
    [unknown] = await told(sandbox, ("x" * 20_000, ""))
    assert len(unknown) < MAX_ANSWER_CHARACTERS + 50


async def test_calls_beyond_the_limit_of_one_message_are_refused(sandbox: Sandbox) -> None:
    texts = await told(sandbox, *[("calculator", '{"expression": "1"}')] * (MAX_CALLS + 2))
    assert texts == ["1"] * MAX_CALLS + [f"error: at most {MAX_CALLS} calls in one message"] * 2


async def test_turns_used_up_end_the_episode_as_cut(sandbox: Sandbox) -> None:
    again = calls(("calculator", '{"expression": "1"}'), content="once more")
    for metadata, turns in (({}, DEFAULT_TURNS), ({"max_turns": "2"}, 2), ({"max_turns": "1"}, 1)):
        model = Script(*[again] * (turns + 1))
        episode = await ToolUse(equipped(sandbox)).run(task(**metadata), model)
        assert (episode.finish, episode.text, len(model.seen)) == ("length", "once more", turns)
        # no turn is left to read the tools' answers
        assert episode.messages[-1].role == "assistant"


@pytest.mark.parametrize("finish", ["length", "abort", "error"])
async def test_a_turn_that_did_not_end_by_itself_ends_the_episode(
    sandbox: Sandbox, finish: str
) -> None:
    half = ChatTurn(
        Message("assistant", "so", tool_calls=(ToolCall("1", "python", '{"code'),)), finish
    )
    episode = await ToolUse(equipped(sandbox)).run(task(), Script(half))
    assert (episode.finish, episode.text, len(episode.messages)) == (finish, "so", 2)


async def test_a_sandbox_that_fails_is_not_an_answer_but_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    model = Script(
        calls(("calculator", '{"expression": "1"}'), python("print(1)")), says("never said")
    )
    episode = await ToolUse(equipped(Sandbox(SandboxConfig()))).run(task(), model)
    assert (episode.finish, len(model.seen)) == ("error", 1)
    assert [message.name for message in episode.messages] == ["", "", "calculator"]


@pytest.mark.parametrize(
    "metadata",
    [
        {"messages": "nonsense"},
        {"messages": "[]"},
        {"messages": '{"role": "user"}'},
        {"messages": '[{"role": "tool", "content": "x"}]'},
        {"messages": '[{"role": "user", "content": null}]'},
        {"tools": '["search"]'},
        {"tools": '"python"'},
        {"tools": "python"},
        {"max_turns": "0"},
        {"max_turns": "-1"},
        {"max_turns": "many"},
        {"max_turns": "9" * 5000},
    ],
)
async def test_a_task_that_says_nonsense_is_refused(
    sandbox: Sandbox, metadata: dict[str, str]
) -> None:
    with pytest.raises(InvalidInput, match=f'metadata."{next(iter(metadata))}"'):
        await ToolUse(equipped(sandbox)).run(task(**metadata), Script(says("x")))


async def test_without_a_sandbox_there_is_no_python() -> None:
    model = Script(says("x"))
    await ToolUse(equipped(None)).run(task(), model)
    assert [tool["function"]["name"] for tool in model.tools] == ["calculator"]


def test_environments_are_built_by_name_with_what_the_gateway_has(sandbox: Sandbox) -> None:
    assert isinstance(environment("single_turn"), SingleTurn)
    assert isinstance(
        environment("tool_use", Equipment(sandbox, toolbox=Toolbox(sandbox))), ToolUse
    )
    with pytest.raises(NotFound, match="single_turn, tool_use"):
        environment("chess")
