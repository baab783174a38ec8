"""A faulty task, environment or reward loses its samples, but never the call of RunTasks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from integration.gateway.conversations import teach

from paceline.local.patience import patient
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb

HALF = "\ud83d"
OWN = """
import asyncio

from paceline.services.rollout_gateway.environments import Episode
from paceline.services.rollout_gateway.environments.kinds import SingleTurn


class Odd:
    def __init__(self, equipment):
        pass

    async def prepare(self, metadata):
        if any(one.get("odd") == "refused" for one in metadata):
            raise RuntimeError("this task cannot be prepared")

    async def run(self, task, model):
        odd = task.metadata.get("odd", "")
        if odd in ("raises", "refused"):
            raise KeyError(task.metadata["missing"] if odd == "raises" else "refused")
        if odd == "exits":
            raise SystemExit(3)
        if odd == "hangs":
            await asyncio.Event().wait()
        if odd == "cancels":
            raise asyncio.CancelledError
        if odd == "scores before a turn":
            model.score(1.0)
        found = await SingleTurn().run(task, model)
        given = {
            "": found,
            "none": None,
            "text": "done",
            "finish": Episode(task, found.text, "finished"),
            "no text": Episode(task, None, "stop"),
            "messages": Episode(task, found.text, "stop", ("hello",)),
            "reward text": Episode(task, found.text, "stop", (), "high"),
            "reward nan": Episode(task, found.text, "stop", (), float("nan")),
            "half": Episode(task, "#2 \\ud83d", "stop"),
        }
        return given[odd]


class OddReward:
    def score(self, episode):
        odd = episode.task.metadata.get("reward", "")
        if odd == "raises":
            raise KeyError("\\ud83d")
        if odd == "exits":
            raise SystemExit(3)
        return {"": 1.0, "nan": float("nan"), "text": "1.0", "none": None, "large": 1e300}[odd]
"""


@pytest.fixture
def own(tmp_path: Path) -> dict[str, Any]:
    """Settings with an environment and a reward rule that follow the task's metadata."""
    file = tmp_path / "own_odd.py"
    file.write_text(OWN, encoding="utf-8")
    return {
        "environments": {"odd": f"{file}:Odd"},
        "rewards": {"own": {"odd": f"{file}:OddReward"}},
    }


async def ran(
    served: Any,
    metadata: list[dict[str, str]],
    environment: str,
    reward: str,
    prompt: str = "1+1=",
    within_s: float = 60,
    silence_s: float = 0,
) -> dict[str, rpb.SampleFinished]:
    """The finished sample of a task for each metadata, and of a task without metadata."""
    tasks = [
        rpb.TaskSpec(
            task_id=f"t{index}",
            prompt=prompt,
            answer="2",
            group_id=f"g{index}",
            task_index=index,
            metadata=one,
        )
        for index, one in enumerate(metadata)
    ]
    good = rpb.TaskSpec(task_id="good", prompt="1+1=", answer="2", group_id="g", task_index=99)
    request = rpb.RunTasksRequest(
        context=tpb.CommandContext(run_id=served.config.run.id, epoch=1),
        purpose=tpb.PURPOSE_TRAIN,
        tasks=[*tasks, good],
        samples_per_task=2,
        sampling=tpb.SamplingParams(temperature=1.0, max_tokens=8),
        environment=environment,
        reward=reward,
        silence_s=silence_s,
    )
    news = [one async for one in served.stub.RunTasks(request, timeout=patient(within_s))]
    finished = news[-1].finished
    samples = [one.sample for one in news if one.HasField("sample")]
    assert len(samples) == 2 * len(request.tasks) == finished.scored + finished.unscored
    return {one.task_id: one for one in samples}


def failed(samples: dict[str, rpb.SampleFinished]) -> set[str]:
    """Tasks with samples that ended by a fault, without a reward."""
    return {
        name
        for name, one in samples.items()
        if one.finish_reason == tpb.FINISH_REASON_ERROR and not one.HasField("reward")
    }


async def test_an_environment_that_raises_or_answers_garbage_costs_its_samples(
    serve_gateway: Any, own: dict[str, Any]
) -> None:
    odd = ["raises", "exits", "cancels", "scores before a turn", "none", "text", "finish",
           "no text", "messages", "reward text", "reward nan"]  # fmt: skip
    async with serve_gateway(**own) as served:
        samples = await ran(served, [{"odd": one} for one in odd], "odd", "odd")
        assert failed(samples) == {f"t{index}" for index in range(len(odd))}
        assert samples["good"].reward.value == 1.0
        assert (await ran(served, [{"odd": "half"}], "odd", "odd"))["t0"].reward.value == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sessions", "within_s", "silence_s"),
    [({"timeout_s": 0.5}, 60, 0), ({}, 8, 0), ({}, 86_400, 0.5)],
)
async def test_an_environment_that_hangs_costs_its_samples_before_the_call_ends(
    serve_gateway: Any,
    own: dict[str, Any],
    sessions: dict[str, Any],
    within_s: float,
    silence_s: float,
) -> None:
    async with serve_gateway(**own, sessions=sessions) as served, asyncio.timeout(patient(60)):
        hangs = [{"odd": "hangs"}]
        samples = await ran(served, hangs, "odd", "odd", within_s=within_s, silence_s=silence_s)
    assert failed(samples) == {"t0"}
    assert samples["good"].reward.value == 1.0


async def test_a_task_that_an_environment_cannot_prepare_costs_its_samples(
    serve_gateway: Any, own: dict[str, Any]
) -> None:
    async with serve_gateway(**own) as served:
        samples = await ran(served, [{"odd": "refused"}], "odd", "odd")
    assert failed(samples) == {"t0"}
    assert samples["good"].HasField("reward")


async def test_a_reward_that_raises_or_answers_garbage_costs_its_samples(
    serve_gateway: Any, own: dict[str, Any]
) -> None:
    odd = ["raises", "exits", "nan", "text", "none", "large"]
    async with serve_gateway(**own) as served:
        samples = await ran(served, [{"reward": one} for one in odd], "single_turn", "odd")
    assert {name for name, one in samples.items() if one.HasField("reward")} == {"good"}
    assert failed(samples) == {"t2", "t5"}  # an invalid reward is a fault, a missing one is none


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("environment", "reward", "metadata"),
    [
        ("single_turn", "math_answer", {"messages": "[" * 100_000}),
        ("single_turn", "math_answer", {"messages": "hello"}),
        ("single_turn", "math_answer", {"messages": json.dumps([{"role": "user", "content": HALF}])}),
        ("tool_use", "math_answer", {"interaction": "nobody"}),
        ("tool_use", "math_answer", {"tools": "7"}),
        ("tool_use", "math_answer", {"max_turns": "many"}),
    ],
)  # fmt: skip
async def test_metadata_that_an_environment_cannot_use_costs_its_samples(
    serve_gateway: Any,
    model_dir: Any,
    script: dict[str, Any],
    environment: str,
    reward: str,
    metadata: dict[str, str],
) -> None:
    teach(model_dir, script)
    script["max_sequence_tokens"] = 4096
    async with serve_gateway() as served:
        samples = await ran(served, [metadata], environment, reward)
    assert failed(samples) == {"t0"}
    assert samples["good"].HasField("reward")


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "metadata",
    [
        {"cases": json.dumps([{"stdin": HALF, "stdout": "1"}])},
        {"cases": json.dumps([{"stdin": "1", "stdout": HALF}])},
        {"cases": "[" * 100_000},
        {"tests": "(" * 100_000},
        {"tests": "assert " + "-" * 100_000 + "1"},
        {"tests": "assert f(1) == \0"},
        {"tests": f"assert f(1) == {'9' * 5000}"},
        {"scoring": "half"},
        {},
    ],
)
async def test_tests_that_cannot_be_run_leave_their_samples_unscored(
    serve_gateway: Any, metadata: dict[str, str]
) -> None:
    async with serve_gateway() as served:
        samples = await ran(served, [metadata], "single_turn", "code_tests")
    assert not samples["t0"].HasField("reward") or samples["t0"].reward.value == 0.0


async def test_a_prompt_that_does_not_fit_costs_its_samples(serve_gateway: Any) -> None:
    async with serve_gateway() as served:
        samples = await ran(served, [{}], "single_turn", "math_answer", prompt="1+" * 5000)
    assert failed(samples) == {"t0"}
    assert samples["good"].HasField("reward")
