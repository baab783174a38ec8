"""The environment openenv:URL against a real server of the package."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.gateway.conftest import ServeGateway

from paceline.errors import ConfigError, PacelineError, Unavailable
from paceline.local.patience import patient
from paceline.rpc import rpc_errors
from paceline.services.rollout_gateway.environments.table import environment
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb

pytestmark = pytest.mark.timeout(240)
PROGRAM = Path(__file__).parents[2] / "openenv_server.py"
StartServer = Callable[[str], str]


@pytest.fixture(scope="module")
def start_server(
    openenv_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartServer]:
    """The URL of a server of a kind, once it listens."""
    started: dict[str, tuple[subprocess.Popen[bytes], str]] = {}

    def start(kind: str) -> str:
        if kind not in started or started[kind][0].poll() is not None:
            place = tmp_path_factory.mktemp("openenv") / "port"
            listens = place.with_suffix(".listens")
            os.mkfifo(listens)
            command = [openenv_python, str(PROGRAM), kind, str(place)]
            server = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            listens.read_text()  # the server writes there once it listens
            started[kind] = server, f"http://127.0.0.1:{place.read_text()}"
        return started[kind][1]

    yield start
    for server, _ in started.values():
        server.kill()
        server.communicate()


def asked(served: Any, name: str, *resets: dict[str, Any], **options: Any) -> rpb.RunTasksRequest:
    request = served.tasks_request(environment=name, reward="agent", **options)
    del request.tasks[:]
    request.sampling.max_tokens = 256
    for index, reset in enumerate(resets):
        metadata = {"reset": json.dumps(reset)}
        request.tasks.add(
            task_id=f"t-{index}", prompt="Guess.", group_id=f"g-{index}", metadata=metadata
        )
    return request


async def samples_of(served: Any, request: rpb.RunTasksRequest) -> list[rpb.SampleFinished]:
    with rpc_errors():
        told = [event async for event in served.stub.RunTasks(request, timeout=patient(120))]
    found = [event.sample for event in told if event.HasField("sample")]
    return sorted(found, key=lambda one: (one.task_id, one.sample_index))


@pytest.mark.parametrize(("options", "reward"), [("", 1.0), ("?reward=sum", 1.5)])
async def test_a_text_is_an_action_and_the_observation_the_next_message(
    conversations: ServeGateway, start_server: StartServer, options: str, reward: float
) -> None:
    name = f"openenv:{start_server('guess')}{options}"
    async with conversations() as served:
        found = await samples_of(served, asked(served, name, {"seed": 5}, {"seed": 6}))
    assert [one.reward.value for one in found] == [reward] * 4
    assert {one.finish_reason for one in found} == {tpb.FINISH_REASON_STOP}


async def test_calls_of_tools_are_actions(
    conversations: ServeGateway, start_server: StartServer
) -> None:
    name = f"openenv:{start_server('tools')}?reward=sum"
    async with conversations() as served:
        request = asked(served, name, {}, samples_per_task=1)
        request.tasks[0].prompt = "The weather in Oslo?"
        found = await samples_of(served, request)
    assert [one.reward.value for one in found] == [1.0]  # two calls in one message


async def test_samples_wait_for_a_full_server(
    conversations: ServeGateway, start_server: StartServer
) -> None:
    name = f"openenv:{start_server('full')}"
    async with conversations() as served:
        found = await samples_of(served, asked(served, name, {"seed": 1}, samples_per_task=8))
    assert [one.reward.value for one in found] == [1.0] * 8


@pytest.mark.parametrize("seed", [13, 14, 15])
async def test_a_lost_hanging_or_failing_server_fails_its_samples_and_not_the_call(
    conversations: ServeGateway, start_server: StartServer, seed: int
) -> None:
    name = f"openenv:{start_server('guess')}?deadline_s=1"
    async with conversations() as served:
        found = await samples_of(served, asked(served, name, {"seed": seed}))
    assert [one.HasField("reward") for one in found] == [False, False]


async def test_a_server_that_is_away_stops_the_call(conversations: ServeGateway) -> None:
    async with conversations() as served:
        with pytest.raises(Unavailable, match=r"server http://127\.0\.0\.1:9 does not answer"):
            await samples_of(served, asked(served, "openenv:http://127.0.0.1:9", {}))


@pytest.mark.parametrize(
    "name",
    ["openenv:", "openenv:ftp://x", "openenv:http://x?reward=best", "openenv:http://x?speed=1"],
)
def test_a_name_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(PacelineError, match="no OpenEnv server"):
        environment(name)


async def test_a_field_that_actions_lack_is_refused(
    conversations: ServeGateway, start_server: StartServer
) -> None:
    name = f"openenv:{start_server('guess')}?action=text"
    async with conversations() as served:
        with pytest.raises(PacelineError, match=r"no such field.*message"):
            await samples_of(served, asked(served, name, {}))


def test_the_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "websockets", None)
    from paceline.services.rollout_gateway.environments import openenv

    with pytest.raises(ConfigError, match=r"paceline\[openenv\]"):
        openenv._websockets()
