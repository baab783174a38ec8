"""RunTasks of conversations with tools and of code: built-in environment and rule over real workers
and sandboxes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from integration.gateway.conversations import SPEAK, teach

from paceline.errors import ConfigError
from paceline.local.patience import patient
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb

CALCULATOR = Path(__file__).parents[3] / "examples/tools/calculator.py"
TOOLS = {"calculator": f"{CALCULATOR}:calculator"}


def call(name: str, key: str, value: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"{key}": "{value}"}}}}\n</tool_call>'


REPLIES = [
    {"pattern": rf"6 times 7{SPEAK}$", "texts": [call("calculator", "expression", "6 * 7")]},
    {"pattern": r"\[tool\] 42<eos>\n\[assistant\] $", "texts": ["It is #42"]},
    {"pattern": rf"sum to ten{SPEAK}$", "texts": [call("python", "code", "print(sum(range(11)))")]},
    {"pattern": r"\[tool\] 55\s*<eos>\n\[assistant\] $", "texts": ["It is #55"]},
    {"pattern": r"increment", "texts": ["Here:\n```python\ndef f(x):\n    return x + 1\n```\n"]},
]


async def ran(
    served: Any, tasks: list[rpb.TaskSpec], environment: str, reward: str
) -> dict[str, rpb.SampleFinished]:
    request = rpb.RunTasksRequest(
        context=tpb.CommandContext(run_id=served.config.run.id, epoch=1),
        purpose=tpb.PURPOSE_EVAL,
        tasks=tasks,
        samples_per_task=1,
        sampling=tpb.SamplingParams(temperature=1.0, max_tokens=200),
        environment=environment,
        reward=reward,
    )
    news = [one async for one in served.stub.RunTasks(request, timeout=patient(60))]
    return {one.sample.task_id: one.sample for one in news if one.HasField("sample")}


async def test_a_task_is_solved_with_the_calculator_and_with_python(
    serve_gateway: Any, model_dir: Any, script: dict[str, Any]
) -> None:
    teach(model_dir, script)
    script["replies"] = REPLIES
    script["max_sequence_tokens"] = 4096
    tasks = [
        rpb.TaskSpec(task_id="product", prompt="6 times 7", answer="42", group_id="p"),
        rpb.TaskSpec(task_id="sum", prompt="sum to ten", answer="55", group_id="s", task_index=1),
    ]
    async with serve_gateway(tools=TOOLS) as served:
        samples = await ran(served, tasks, "tool_use", "math_answer")
        codec = served.codec
    assert {name: sample.reward.value for name, sample in samples.items()} == {
        "product": 1.0,
        "sum": 1.0,
    }
    said = [REPLIES[0]["texts"][0], REPLIES[1]["texts"][0]]
    assert samples["product"].response_tokens == sum(
        len(codec.encode_piece(text)) + 1 for text in said
    )


AT_ONCE = """
import asyncio

from paceline.services.rollout_gateway.chat.messages import Message
from paceline.services.rollout_gateway.environments import Episode


class AtOnce:
    def __init__(self, equipment):
        pass

    async def run(self, task, model):
        async def talk(letter, reward):
            await model.chat([Message("user", letter * 5000)])
            model.score(reward)

        await asyncio.gather(talk("a", 1.0), talk("b", 0.0))
        return Episode(task, "", "stop")
"""


async def test_each_of_two_long_conversations_at_once_gets_its_own_reward(
    serve_gateway: Any, model_dir: Any, script: dict[str, Any], tmp_path: Path
) -> None:
    teach(model_dir, script)
    script["max_sequence_tokens"] = 8192
    file = tmp_path / "at_once.py"
    file.write_text(AT_ONCE, encoding="utf-8")
    tasks = [rpb.TaskSpec(task_id="two", prompt="two", answer="2", group_id="g")]
    async with serve_gateway(environments={"at_once": f"{file}:AtOnce"}) as served:
        samples = await ran(served, tasks, "at_once", "math_answer")
    assert samples["two"].reward.value == 0.5  # the mean of its two branches


async def test_the_messages_of_a_task_are_asked_as_a_conversation(
    serve_gateway: Any, model_dir: Any, script: dict[str, Any]
) -> None:
    teach(model_dir, script)
    script["replies"] = [{"pattern": rf"(?s)#41.*once more{SPEAK}$", "texts": ["It is #42"]}]
    script["max_sequence_tokens"] = 4096
    told = [("user", "6 times 7"), ("assistant", "It is #41"), ("user", "once more")]
    messages = json.dumps([{"role": role, "content": text} for role, text in told])
    task = rpb.TaskSpec(
        task_id="t", prompt="once more", answer="42", group_id="g", metadata={"messages": messages}
    )
    async with serve_gateway() as served:
        samples = await ran(served, [task], "single_turn", "math_answer")
    assert samples["t"].reward.value == 1.0


async def test_code_is_scored_by_the_share_of_its_tests(
    serve_gateway: Any, model_dir: Any, script: dict[str, Any]
) -> None:
    teach(model_dir, script)
    script["replies"] = REPLIES
    task = rpb.TaskSpec(
        task_id="f",
        prompt="increment",
        group_id="g",
        metadata={"tests": "assert f(1) == 2\nassert f(1) == 3\n"},
    )
    async with serve_gateway() as served:
        samples = await ran(served, [task], "single_turn", "code_tests")
    assert samples["f"].reward.value == 0.5


@pytest.fixture
def no_walls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox's interpreter cannot isolate code."""
    other = tmp_path / "python"
    other.write_text('#!/bin/sh\ncat >/dev/null; echo \'{"failed": "no namespaces here"}\'\n')
    other.chmod(0o755)
    monkeypatch.setattr(sys, "_base_executable", str(other))


@pytest.mark.parametrize(
    ("environment", "reward", "tools"),
    [
        ("single_turn", "code_tests", "[]"),
        ("tool_use", "math_answer", '["python"]'),
    ],
)
async def test_a_run_of_code_that_cannot_be_shut_in_is_refused_before_it_begins(
    serve_gateway: Any, no_walls: None, environment: str, reward: str, tools: str
) -> None:
    task = rpb.TaskSpec(task_id="f", prompt="increment", group_id="g", metadata={"tools": tools})
    async with serve_gateway() as served:
        with pytest.raises(grpc.aio.AioRpcError, match="is unavailable on this host") as caught:
            await ran(served, [task], environment, reward)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_task_without_python_needs_no_walls(
    serve_gateway: Any, no_walls: None, model_dir: Any, script: dict[str, Any]
) -> None:
    teach(model_dir, script)
    script["replies"] = REPLIES
    script["max_sequence_tokens"] = 4096
    task = rpb.TaskSpec(
        task_id="product",
        prompt="6 times 7",
        answer="42",
        group_id="p",
        metadata={"tools": '["calculator"]'},
    )
    async with serve_gateway(tools=TOOLS) as served:
        samples = await ran(served, [task], "tool_use", "math_answer")
    assert samples["product"].reward.value == 1.0


@pytest.mark.parametrize("isolation", ["namespaces", "landlock"])
async def test_a_gateway_does_not_start_without_the_walls_that_it_was_asked_for(
    serve_gateway: Any, no_walls: None, isolation: str
) -> None:
    with pytest.raises(ConfigError, match="no namespaces here"):
        async with serve_gateway(rewards={"sandbox": {"isolation": isolation}}):
            pass


TEACHER = """
from paceline.services.rollout_gateway.environments.kinds import UserReply


class Teacher:
    def __init__(self, task):
        self.answer_of_task = task.answer

    def answer(self, messages):
        if self.answer_of_task in messages[-1].content:
            return UserReply(reward=0.75, ends=True)
        return UserReply("Try again.", reward=0.0)
"""


async def test_a_simulated_user_scores_the_turns_of_a_run_and_no_rule_does(
    serve_gateway: Any, model_dir: Any, script: dict[str, Any], tmp_path: Path
) -> None:
    teach(model_dir, script)
    script["replies"] = [
        {"pattern": rf"Try again\.{SPEAK}$", "texts": ["It is 42"]},
        {"pattern": rf"6 times 7{SPEAK}$", "texts": ["It is 41"]},
    ]
    script["max_sequence_tokens"] = 4096
    (file := tmp_path / "teacher.py").write_text(TEACHER)
    task = rpb.TaskSpec(task_id="t", prompt="6 times 7", answer="42", group_id="g")
    async with serve_gateway(interactions={"teacher": f"{file}:Teacher"}) as served:
        samples = await ran(served, [task], "tool_use", "math_answer")
        codec = served.codec
    assert samples["t"].reward.value == 0.75
    said = sum(len(codec.encode_piece(text)) + 1 for text in ("It is 41", "It is 42"))
    assert samples["t"].response_tokens == said
