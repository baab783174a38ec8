"""Another user of the machine can do nothing to a gateway that `paceline serve` has started.

The attacker is a process of uid 65534 if the test may change its uid. Otherwise the attacker is a
process that has only the addresses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from example_runs import background, until_it_serves

from paceline.config import SecurityConfig
from paceline.local.patience import patient
from paceline.local.ports import free_ports
from paceline.rpc import leased
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub

pytestmark = pytest.mark.attack
MODEL = Path(__file__).parents[2] / "examples" / "demo" / "policy_start"
NOBODY = 65534
ATTACKER = """
import json, os, pathlib, sys
import encodings.idna, grpc, httpx
from paceline.v1 import rollout_pb2 as rpb, trajectory_pb2 as tpb, weights_pb2 as wpb
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub
from paceline.v1.weights_pb2_grpc import WeightServiceStub

address, url, rule, files, token, uid = json.loads(sys.argv[1])
channel = grpc.insecure_channel(address)
rollout, weights = RolloutServiceStub(channel), WeightServiceStub(channel)
metadata = (("authorization", f"Bearer {token}"),)
last = tpb.CommandContext(run_id="local", epoch=2**64 - 1)
tasks = rpb.RunTasksRequest(
    context=tpb.CommandContext(run_id="local", epoch=1),
    purpose=tpb.PURPOSE_EVAL,
    tasks=[rpb.TaskSpec(task_id="a", prompt="1+1=", group_id="g")],
    samples_per_task=1,
    environment="single_turn",
    reward=rule,
)
calls = {
    "RunTasks": lambda: list(rollout.RunTasks(tasks, timeout=20, metadata=metadata)),
    "Abort": lambda: weights.Abort(
        wpb.AbortRequest(context=last, target=1, version=9), timeout=20, metadata=metadata
    ),
    "Commit": lambda: weights.Commit(wpb.CommitRequest(context=last), timeout=20, metadata=metadata),
    "ReleaseWorkers": lambda: rollout.ReleaseWorkers(
        rpb.ReleaseWorkersRequest(context=last, workers=[0]), timeout=20, metadata=metadata
    ),
}
with httpx.Client(base_url=url, timeout=20) as http:
    http.get("/health")  # what it needs is loaded now, while it may still read it
    if uid:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    seen = {}
    for name, call in calls.items():
        try:
            call()
            seen[name] = "OK"
        except grpc.RpcError as error:
            seen[name] = error.code().name
    keys = {"authorization": f"Bearer {token}"}
    chat = {"prompt": "1+1=", "max_tokens": 4}
    seen["completions"] = http.post("/v1/completions", json=chat, headers=keys).status_code
    seen["metrics"] = http.get("/metrics", headers=keys).status_code
    for file in files if uid else ():
        try:
            pathlib.Path(file).read_bytes()
            seen[file] = "read"
        except OSError as error:
            seen[file] = type(error).__name__
print(json.dumps(seen))
"""


@dataclass(frozen=True)
class Target:
    """A gateway with tokens of its own."""

    url: str
    address: str
    directory: Path

    def token(self, name: str) -> str:
        return (self.directory / "tokens" / name).read_text()

    def attacked(self, rule: Path, token: str) -> dict[str, Any]:
        """Runs the attacker and returns its findings."""
        files = [*self.directory.rglob("*")]
        uid = NOBODY if os.getuid() == 0 else 0
        words = [self.address, self.url, f"{rule}:Rule", list(map(str, files)), token, uid]
        done = subprocess.run(
            [sys.executable, "-c", ATTACKER, json.dumps(words)],
            capture_output=True,
            text=True,
            timeout=patient(120),
        )
        assert done.returncode == 0, done.stderr
        seen: dict[str, Any] = json.loads(done.stdout)
        return seen


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("run")
    # The directory and its parents are open; only the run's own permissions protect its files.
    for folder in (directory, *directory.parents[:2]):
        folder.chmod(0o755)
    grpc, http = free_ports(2)
    words = ["serve", "gateway", "--model", str(MODEL), "--drafter", "ngram", "engine.workers=1"]
    words += ["--grpc-port", str(grpc), "--http-port", str(http), f'run.dir="{directory}"']
    log = directory / "gateway.log"
    with background(*words, log=log) as process:
        until_it_serves(f"http://127.0.0.1:{http}", process, log)
        yield Target(f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}", directory)


@pytest.fixture
def rule(tmp_path: Path) -> Path:
    """A reward rule that leaves a mark when it is imported."""
    file = tmp_path / "rule.py"
    file.write_text(
        "import pathlib\n"
        f"pathlib.Path({str(tmp_path / 'was_here')!r}).touch()\n"
        "class Rule:\n    def score(self, episode):\n        return 1.0\n"
    )
    return file


def test_without_a_token_nothing_answers_and_no_file_of_the_run_can_be_read(
    target: Target, rule: Path
) -> None:
    seen = target.attacked(rule, "guess")
    files = {name: what for name, what in seen.items() if "/" in name}
    assert {seen[name] for name in ("completions", "metrics")} == {401}
    calls = seen.keys() - files.keys() - {"completions", "metrics"}
    assert {seen[name] for name in calls} == {"UNAUTHENTICATED"}
    assert not rule.with_name("was_here").exists()
    if os.getuid() == 0:
        tokens = [name for name in files if "/tokens/" in name]
        assert len(tokens) == 2
        assert {files[name] for name in tokens} == {"PermissionError"}


def test_with_the_agents_token_the_run_cannot_be_steered(target: Target, rule: Path) -> None:
    seen = target.attacked(rule, target.token("agent"))
    steering = ("RunTasks", "Abort", "Commit", "ReleaseWorkers")
    assert {seen[name] for name in steering} == {"PERMISSION_DENIED"}
    assert seen["completions"] == 200
    assert not rule.with_name("was_here").exists()


def test_an_operator_names_no_file_to_run_and_locks_nobody_out(
    target: Target, rule: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = target.attacked(rule, target.token("operator"))
    assert {seen[name] for name in ("RunTasks", "Abort", "Commit", "ReleaseWorkers")} == {
        "PERMISSION_DENIED"
    }
    assert not rule.with_name("was_here").exists()

    monkeypatch.setenv("PACELINE_TOKEN", target.token("operator"))
    metadata = (("authorization", f"Bearer {target.token('operator')}"),)

    def run(reward: str) -> list[Any]:
        with grpc.insecure_channel(target.address) as channel:
            request = rpb.RunTasksRequest(
                context=leased(SecurityConfig(), "local", 0, 1),
                purpose=tpb.PURPOSE_EVAL,
                tasks=[rpb.TaskSpec(task_id="a", prompt="1+1=", group_id="g")],
                samples_per_task=1,
                sampling=tpb.SamplingParams(temperature=1.0, max_tokens=8),
                environment="single_turn",
                reward=reward,
            )
            stub = RolloutServiceStub(channel)
            return list(stub.RunTasks(request, timeout=patient(60), metadata=metadata))

    assert run("math_answer")[-1].HasField("finished"), "the coordinator's own lease still works"
    with pytest.raises(grpc.RpcError) as refused:
        run(f"{rule}:Rule")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert not rule.with_name("was_here").exists()


def test_refused_calls_are_counted(target: Target, rule: Path) -> None:
    target.attacked(rule, "guess")
    headers = {"authorization": f"Bearer {target.token('agent')}"}
    page = httpx.get(f"{target.url}/metrics", headers=headers).text
    counted = [line for line in page.splitlines() if line.startswith("paceline_rpc_refused_total{")]
    assert any('reason="UNAUTHENTICATED"' in line for line in counted), page[:2000]
