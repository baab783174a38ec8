"""Environments of the package verifiers: their children lead samples under the sessions' keys."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from integration.gateway.conftest import ServeGateway
from integration.gateway.test_gateway_metrics import scrape

from paceline import telemetry
from paceline.config import TelemetryConfig
from paceline.errors import InvalidInput
from paceline.local.patience import patient
from paceline.rpc import rpc_errors
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.runs import hosted
from paceline.tasks.file import TaskFile
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb

pytestmark = pytest.mark.timeout(300)


def tasks_of(name: str, python: str) -> list[rpb.TaskSpec]:
    return [
        rpb.TaskSpec(
            task_id=task.task_id,
            prompt=task.prompt,
            answer=task.answer,
            group_id=f"g-{task.task_id}",
            task_index=index,
            metadata=task.metadata,
        )
        for index, task in enumerate(TaskFile(name, python=python))
    ]


async def run(
    served: Any, name: str, python: str, *, wanted: slice = slice(None), **options: Any
) -> list[rpb.SampleFinished]:
    """The samples of a call with the tasks of an environment."""
    request = served.tasks_request(environment=name, reward="agent", **options)
    del request.tasks[:]
    request.tasks.extend(tasks_of(name, python)[wanted])
    request.sampling.max_tokens = 256
    with rpc_errors():
        told = [event async for event in served.stub.RunTasks(request, timeout=patient(200))]
    assert told[-1].HasField("finished")
    samples = [event.sample for event in told if event.HasField("sample")]
    return sorted(samples, key=lambda one: (one.task_id, one.sample_index))


async def exported(served: Any, session_id: str, form: str) -> list[dict[str, Any]]:
    path = f"/v1/sessions/{session_id}/export"
    return list((await served.http.get(path, params={"form": form})).json()[form])


@pytest.fixture
def counted() -> Iterator[None]:
    telemetry.setup("gateway", TelemetryConfig())
    yield
    telemetry.shutdown()


async def attempts_of(served: Any) -> dict[str, float]:
    """Ended attempts by outcome."""
    found = (await scrape(served.http))["paceline_gateway_environment_attempts_total"]
    return {labels["outcome"]: value for labels, value in found}


@pytest.fixture
def serve(conversations: ServeGateway, verifiers_python: str) -> Any:
    return lambda **keys: conversations(run={"verifiers_python": verifiers_python}, **keys)


async def test_each_sample_has_the_rubrics_reward_and_its_parts(
    serve: Any, verifiers_python: str
) -> None:
    async with serve() as served:
        found = await run(served, "verifiers:tiny_sums", verifiers_python)
    assert [one.task_id for one in found] == [f"train-{n}" for n in (1, 1, 2, 2, 3, 3, 4, 4)]
    for one in found:
        parts = one.reward.parts
        assert set(parts) == {"says", "brevity", "num_turns"}
        assert one.reward.value == pytest.approx(parts["says"] + 0.5 * parts["brevity"])
        assert parts["num_turns"] == 1
        assert one.response_tokens > 0
    solved = {one.task_id for one in found if one.reward.parts["says"] == 1}
    assert {"train-2", "train-3", "train-4"} <= solved  # the scripted model's texts


@pytest.mark.slow
async def test_an_environment_of_plain_completions_generates_without_a_chat_template(
    serve: Any, verifiers_python: str
) -> None:
    async with serve() as served:
        name = "verifiers:tiny_sums?kind=completion"
        (one,) = await run(served, name, verifiers_python, samples_per_task=1)
        (turn,) = await exported(served, one.session_id, "tree")
    assert one.HasField("reward")
    assert turn["message"] is None


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "turns"), [("multi", 2), ("tools", 2)])
async def test_a_session_has_every_turn_of_its_environment(
    serve: Any, verifiers_python: str, kind: str, turns: int
) -> None:
    async with serve() as served:
        name, first = f"verifiers:tiny_sums?kind={kind}", slice(0, 1)
        found = await run(served, name, verifiers_python, wanted=first, samples_per_task=1)
        assert [one.reward.parts["num_turns"] for one in found] == [turns]
        tree, samples = [
            await exported(served, found[0].session_id, form) for form in ("tree", "samples")
        ]
    assert len(tree) == turns
    assert tree[1]["parent"] == tree[0]["completion_id"]
    # the second turn adds its own tokens to the first one's, which are not tokenised again
    assert len(samples) == 1
    known = [*tree[0]["prompt_ids"], *tree[0]["response_ids"]]
    assert samples[0]["token_ids"] == [*known, *tree[1]["prompt_ids"], *tree[1]["response_ids"]]


@pytest.mark.slow
async def test_a_rubric_of_groups_scores_siblings_together(
    serve: Any, verifiers_python: str
) -> None:
    async with serve() as served:
        name, first = "verifiers:tiny_sums?kind=group", slice(0, 2)
        found = await run(served, name, verifiers_python, wanted=first, samples_per_task=4)
    assert len(found) == 8
    assert {int(one.reward.parts["rank"]) // 4 for one in found} == {1}  # four siblings each


@pytest.mark.slow
async def test_siblings_that_outnumber_the_places_are_scored_together(
    serve: Any, verifiers_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted, "PARALLEL", 2)
    async with serve() as served:
        name, first = "verifiers:tiny_sums?kind=group", slice(0, 2)
        found = await run(served, name, verifiers_python, wanted=first, samples_per_task=5)
    assert len(found) == 10
    assert {int(one.reward.parts["rank"]) // 5 for one in found} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["paid", "paid_group"])
async def test_a_turns_own_reward_reaches_its_turn_and_the_samples_return(
    serve: Any, verifiers_python: str, kind: str
) -> None:
    async with serve() as served:
        name, two = f"verifiers:tiny_sums?kind={kind}", slice(0, 2)
        call = {"wanted": two, "samples_per_task": 2}
        found = await run(served, name, verifiers_python, turn_discount=0.5, **call)
        assert len(found) == 4
        for one in found:
            parts = one.reward.parts
            total = parts["says"] + 0.5 * parts["brevity"] + parts["paid"] + parts.get("rank", 0.0)
            tree, samples = [
                await exported(served, one.session_id, form) for form in ("tree", "samples")
            ]
            assert parts["paid"] == 0.75
            # the second turn, which the environment did not reward, has the rest of the rubric's
            assert [turn["reward"] for turn in tree] == [0.75, None]
            returns = [0.75 + 0.5 * (total - 0.75), total - 0.75]
            assert [sample["reward"] for sample in samples] == pytest.approx(returns)
            assert one.reward.value == pytest.approx(sum(returns) / 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("purpose", "turns"), [(tpb.PURPOSE_TRAIN, [0.75, None]), (tpb.PURPOSE_EVAL, [None, None])]
)
async def test_without_a_discount_the_samples_reward_is_the_rubrics(
    serve: Any, verifiers_python: str, purpose: int, turns: list[float | None]
) -> None:
    async with serve() as served:
        call = {"wanted": slice(0, 1), "samples_per_task": 1, "purpose": purpose}
        name = "verifiers:tiny_sums?kind=paid"
        (one,) = await run(served, name, verifiers_python, **call)
        tree = await exported(served, one.session_id, "tree")
    parts = one.reward.parts
    total = parts["says"] + 0.5 * parts["brevity"] + parts["paid"]
    assert one.reward.value == pytest.approx(total)
    assert [turn["reward"] for turn in tree] == turns


@pytest.mark.slow
async def test_siblings_of_a_sample_that_fails_are_scored_without_it(
    serve: Any, verifiers_python: str
) -> None:
    async with serve() as served:
        name, first = "verifiers:tiny_sums?kind=survivors", slice(0, 1)
        found = await run(served, name, verifiers_python, wanted=first, samples_per_task=6)
    scored = [one for one in found if one.HasField("reward")]
    assert 0 < len(scored) < len(found)
    assert {int(one.reward.parts["rank"]) for one in scored} == {len(scored)}


@pytest.mark.slow
async def test_the_same_call_draws_the_same_tokens(serve: Any, verifiers_python: str) -> None:
    name, first = "verifiers:tiny_sums", slice(0, 1)
    hashes = []
    for _ in range(2):
        async with serve() as served:
            found = await run(served, name, verifiers_python, wanted=first, samples_per_task=3)
            hashes.append([one.tokens_hash for one in found])
    assert hashes[0] == hashes[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raises", "RuntimeError: the world has ended"),
        ("cancels", "caused by CancelledError: the world has ended"),
        ("exits", "caused by SystemExit: the world has ended"),
        ("silent", "without a turn"),
        ("rewardless", "no reward"),
    ],
)
async def test_a_fault_of_the_environment_fails_its_samples_alone(
    serve: Any,
    verifiers_python: str,
    fault: str,
    words: str,
    capfd: pytest.CaptureFixture[str],
    counted: None,
) -> None:
    async with serve() as served:
        name = f"verifiers:tiny_sums?kind=failing&fault={fault}"
        found = await run(served, name, verifiers_python)
        assert await attempts_of(served) == {"scored": 6, "data": 4}
    failed = [one for one in found if not one.HasField("reward")]
    assert {one.task_id for one in failed} == {"train-3"}
    assert {one.finish_reason for one in failed} == {tpb.FINISH_REASON_ERROR}
    assert (len(found), len(failed)) == (8, 2)
    assert words in "".join(capfd.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hangs", "blocks"])
async def test_a_hanging_environment_costs_its_sample_and_not_the_call(
    serve: Any, verifiers_python: str, fault: str, counted: None
) -> None:
    async with serve() as served:
        name = f"verifiers:tiny_sums?kind=failing&fault={fault}"
        found = await run(
            served, name, verifiers_python, wanted=slice(1, 3), samples_per_task=1, silence_s=4
        )
        # while its event loop is blocked, the other sample is silent too
        assert (await attempts_of(served))["silent"] >= 2
    assert [one.HasField("reward") for one in found][-1] is False
    assert len(found) == 2


@pytest.mark.slow
async def test_a_dying_environment_fails_its_sample_after_its_attempts(
    serve: Any, verifiers_python: str, counted: None
) -> None:
    async with serve() as served:
        name = "verifiers:tiny_sums?kind=failing&fault=dies"
        one = {"wanted": slice(2, 3), "samples_per_task": 1}
        found = await run(served, name, verifiers_python, **one)
        assert await attempts_of(served) == {"infra": 4}
        assert [one.HasField("reward") for one in found] == [False]
        # its host starts again for the next call
        next_one = {"wanted": slice(0, 1), "samples_per_task": 1}
        found = await run(served, name, verifiers_python, **next_one)
    assert [one.HasField("reward") for one in found] == [True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("no_such", "Could not import 'no_such'"),
        ("tiny_sums?kind=exits", "wants no rollout"),
        ("", "no name of an environment"),
        ("tiny_sums?kind", "options of a source"),
    ],
)
async def test_an_environment_that_cannot_be_loaded_names_fault_and_remedy(
    serve: Any, name: str, fault: str
) -> None:
    words = fault + r".*(paceline\[verifiers\]|VALUE)"
    async with serve() as served:
        request = served.tasks_request(environment=f"verifiers:{name}", reward="agent")
        call = served.stub.RunTasks(request, timeout=patient(100))
        with pytest.raises(InvalidInput, match=words), rpc_errors():
            await anext(aiter(call))


@pytest.mark.slow
async def test_tasks_of_another_origin_fail_and_name_the_setting(
    serve: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    async with serve() as served:
        request = served.tasks_request(environment="verifiers:tiny_sums", reward="agent")
        told = [event async for event in served.stub.RunTasks(request, timeout=patient(100))]
    samples = [event.sample for event in told if event.HasField("sample")]
    assert [one.HasField("reward") for one in samples] == [False] * 4
    assert "coordinator.tasks_path" in "".join(capfd.readouterr())


def test_the_fault_of_a_dataset_is_told(verifiers_python: str) -> None:
    with pytest.raises(InvalidInput, match="wants no rollout"):
        TaskFile("verifiers:tiny_sums?kind=exits", python=verifiers_python)


@pytest.mark.skipif(find_spec("verifiers") is not None, reason="this Python has verifiers")
def test_the_package_that_is_not_installed_names_the_extra() -> None:
    with pytest.raises(InvalidInput, match=r"No module named 'verifiers'.*paceline\[verifiers\]"):
        TaskFile("verifiers:tiny_sums")


def test_a_python_that_does_not_exist_names_the_extra() -> None:
    config = GatewayConfig()
    assert config.run.verifiers_python == ""
    with pytest.raises(InvalidInput, match=r"paceline\[verifiers\]"):
        TaskFile("verifiers:tiny_sums", python="/nowhere/python")
