"""A gateway over real worker processes of the scripted engine, with real gRPC and HTTP on free
ports.
"""

from __future__ import annotations

import json
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from integration.gateway.conversations import teach

from examples.scripted_engine.engine import SCRIPTED_PATH
from paceline.config import SecurityConfig
from paceline.local.patience import patient
from paceline.rpc import channel, leased
from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.engines import ENGINES
from paceline.services.rollout_gateway.server import running
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub

DEMO_TOKENIZER = Path(__file__).parents[3] / "examples" / "demo" / "policy_start"
POLICY_MODEL = DEMO_TOKENIZER
"""The demo's start policy, which the embedded engine can serve."""
EOS = 1
NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""No test here uses TLS; loading the system's certificate authorities takes 40 ms per test."""


@dataclass
class Served:
    """A gateway under test with its clients."""

    config: GatewayConfig
    channel: grpc.aio.Channel
    stub: Any
    http: httpx.AsyncClient
    codec: TextCodec

    def tasks_request(
        self, *, purpose: int = tpb.PURPOSE_TRAIN, **options: Any
    ) -> rpb.RunTasksRequest:
        """Two tasks, two samples each: 1+1 is answered right by sample 0 or 1, 2+2 always wrong."""
        return rpb.RunTasksRequest(
            context=leased(SecurityConfig(), self.config.run.id, options.pop("step", 0), 1),
            purpose=purpose,
            tasks=[
                rpb.TaskSpec(task_id="a", prompt="1+1=", answer="2", group_id="g-a", task_index=0),
                rpb.TaskSpec(task_id="b", prompt="2+2=", answer="4", group_id="g-b", task_index=1),
            ],
            samples_per_task=options.pop("samples_per_task", 2),
            sampling=tpb.SamplingParams(temperature=1.0, max_tokens=64),
            run_seed=7,
            environment=options.pop("environment", "single_turn"),
            reward=options.pop("reward", "math_answer"),
            **options,
        )


ServeGateway = Callable[..., AbstractAsyncContextManager[Served]]


def tiny_model(directory: Path) -> Path:
    """The demo's tokenizer and a model of width 8 that only the scripted engine can serve."""
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_TOKENIZER / name, directory)
    config = {"model_type": "llama", "hidden_size": 8, "vocab_size": 320, "eos_token_id": EOS}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def sums(model_dir: Path) -> dict[str, Any]:
    """Settings of a scripted engine with answers to two prompts."""
    codec = TextCodec(model_dir)

    def line(prompt: str, *responses: str) -> dict[str, Any]:
        return {
            "prompt": codec.encode(prompt),
            "responses": [[*codec.encode(text)[1:], EOS] for text in responses],
        }

    return {"script": [line("1+1=", "1+1=2 #2", "1+1=3 #3"), line("2+2=", "2+2=5 #5")]}


@asynccontextmanager
async def serving(
    model_dir: Path, script: dict[str, Any], number: int = 0, **keys: Any
) -> AsyncIterator[Served]:
    """Gateway `number` of a run with these configuration keys; its files are stored beside the
    model.
    """
    path = model_dir.parent / "script.json"
    path.write_text(json.dumps(script))
    settings: dict[str, Any] = {
        "model": str(model_dir),
        "addresses": {"gateway": "127.0.0.1:0", "http": "127.0.0.1:0"},
        "spool_dir": str(model_dir.parent / "spool"),
        **keys,
    }
    settings["engine"] = {
        "kind": SCRIPTED_PATH,
        "workers": 1,
        **settings.get("engine", {}),
    }
    if settings["engine"]["kind"] not in ENGINES:
        settings["engine"]["options"] = {"file": str(path)}
    config = GatewayConfig.model_validate(settings).of_gateway(number)
    async with running(config) as (grpc_port, http_port):
        connection = channel(f"127.0.0.1:{grpc_port}", SecurityConfig())
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{http_port}",
            timeout=patient(20),
            verify=NO_AUTHORITIES,
        ) as http:
            stub, codec = RolloutServiceStub(connection), TextCodec(model_dir)
            yield Served(config, connection, stub, http, codec)
        await connection.close()


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny-model")


@pytest.fixture
def script(model_dir: Path) -> dict[str, Any]:
    """Settings of the scripted engine; a test may add to them before it serves."""
    return sums(model_dir)


@dataclass(frozen=True)
class Ends:
    """Delays the ends of the scripted engine's requests until the test allows them, so that a slow
    test can still act during a request.
    """

    path: Path

    def come(self) -> None:
        self.path.touch()

    def wait(self) -> None:
        self.path.unlink(missing_ok=True)


@pytest.fixture
def ends(script: dict[str, Any], model_dir: Path) -> Ends:
    """Ends that wait from the start of the test."""
    found = Ends(model_dir.parent / "ends")
    script["ends_with"] = str(found.path)
    return found


@pytest.fixture
def serve_gateway(model_dir: Path, script: dict[str, Any]) -> ServeGateway:
    """`async with serve_gateway(**config keys) as served`."""
    return partial(serving, model_dir, script)


@pytest.fixture
def conversations(model_dir: Path, script: dict[str, Any]) -> ServeGateway:
    """`serve_gateway` over a model that holds conversations and calls tools (conversations.py)."""
    teach(model_dir, script)

    def serve(**keys: Any) -> AbstractAsyncContextManager[Served]:
        engine = {"max_sequence_tokens": 4096, **keys.pop("engine", {})}
        return serving(model_dir, script, engine=engine, **keys)

    return serve


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """One gateway that holds conversations for all tests of a file with this mark:
    `pytest.mark.asyncio(loop_scope="module")`.
    """
    model_dir = tiny_model(tmp_path_factory.mktemp("shared") / "tiny-model")
    script = sums(model_dir)
    teach(model_dir, script)
    async with serving(model_dir, script, engine={"max_sequence_tokens": 4096}) as one:
        yield one
