"""The wheel, built from this tree and installed into otherwise empty virtual environments."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from demo_runs import SMALL
from example_runs import ROOT, background, until_it_serves

from paceline.local.patience import patient
from paceline.local.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

AGENT = """
import json, sys
from paceline.client import Client
import paceline

with Client(sys.argv[1]) as client, client.session(task="product", trainable=False) as session:
    question = {"role": "user", "content": "12 + 30"}
    create = session.openai.chat.completions.create
    answer = create(model="", messages=[question], max_tokens=64)
    session.reward(1.0)
loaded = set(sys.modules)
text = answer.choices[0].message.content
print(json.dumps({"text": text, "file": paceline.__file__, "loaded": sorted(loaded)}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=patient(120))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def with_the_client(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment after `pip install paceline`."""
    environment = tmp_path_factory.mktemp("client")
    venv.create(environment, with_pip=True)
    run(environment / "bin/python", "-m", "pip", "install", "-q", wheel, cwd=environment)
    return environment


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[str]:
    """The address of a gateway over a scripted engine, served from this tree."""
    port, log = free_port(), tmp_path / "gateway.log"
    words = ["--config", "examples/batch_evaluation/serve.toml", "--http-port", str(port)]
    words += ["--grpc-port", "0", f'run.dir="{tmp_path}"']
    with background("serve", "gateway", *words, log=log) as process:
        until_it_serves(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"


def run(
    *command: str | Path, cwd: Path, status: int = 0, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """Runs a command without this tree on its path and without a foreign Redis."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "REDIS_URL", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        command,
        cwd=cwd,
        env=kept,
        capture_output=True,
        text=True,
        timeout=patient(timeout_s),
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_the_wheel_has_what_the_demo_reads_and_nothing_that_only_a_checkout_uses(
    wheel: Path,
) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    demo = {name for name in names if name.startswith("paceline/examples/")}
    read = ["demo.toml", "tasks_train.jsonl", "tasks_heldout.jsonl", "policy_start/tokenizer.json"]
    read += ["policy_start/model.safetensors", "drafter_start/model.safetensors"]
    assert {f"paceline/examples/demo/{name}" for name in read} <= demo
    assert not [name for name in demo if name.endswith(".py") or "trained" in name]
    services = ("coordinator", "rollout_gateway", "policy_trainer", "drafter_trainer")
    assert {f"paceline/services/{name}/__main__.py" for name in services} <= set(names)
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"paceline"}
    assert wheel.stat().st_size < 8 << 20


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _with_requirements(name: str) -> set[str]:
    """A package and all its requirements without extras, whether installed here or not."""
    found, left = set[str](), [name]
    while left:
        if (one := _normal(left.pop())) in found:
            continue
        found.add(one)
        with suppress(PackageNotFoundError):
            asked = [text for text in requires(one) or () if "extra ==" not in text]
            left += [re.match(r"[\w.-]+", text)[0] for text in asked]
    return found


def test_an_agent_needs_openai_alone_to_chat_and_reward(
    with_the_client: Path, gateway: str, tmp_path: Path
) -> None:
    python = with_the_client / "bin/python"
    listed = run(python, "-m", "pip", "list", "--format=json", cwd=tmp_path).stdout
    beside = {_normal(one["name"]) for one in json.loads(listed)} - {"pip", "setuptools"}
    assert beside <= {"paceline", *_with_requirements("openai")}

    said = json.loads(run(python, "-c", AGENT, gateway, cwd=tmp_path).stdout)
    assert said["text"] == "12 + 30 = 42"
    assert Path(said["file"]).is_relative_to(with_the_client)
    assert {"paceline", "openai"} <= set(said["loaded"])
    assert not {"grpc", "torch", "paceline.services"} & set(said["loaded"])


def test_beside_the_client_alone_the_command_names_the_extra_that_it_needs(
    with_the_client: Path, tmp_path: Path
) -> None:
    command = with_the_client / "bin/paceline"
    refused = run(command, "demo", cwd=tmp_path, status=2)
    assert "pip install 'paceline[control]'" in refused.stderr
    assert "Traceback" not in refused.stderr
    metadata = "import importlib.metadata as m; print(m.version('paceline'))"
    version = run(with_the_client / "bin/python", "-c", metadata, cwd=tmp_path).stdout
    assert run(command, "--version", cwd=tmp_path).stdout == version


def test_the_demo_runs_from_the_wheel_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    environment, folder = tmp_path / "environment", tmp_path / "empty"
    venv.create(environment, with_pip=True)
    folder.mkdir()
    python = environment / "bin/python"
    run(python, "-m", "pip", "install", "-q", "--no-deps", wheel, cwd=folder)
    # This interpreter already has the gigabytes of the extra `train`.
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))

    words = ("demo", "--steps", "1", "--lines", "text", *SMALL)
    run(environment / "bin/paceline", *words, cwd=folder, timeout_s=400)
    made = folder / "runs/demo-0-1"
    summary = json.loads((made / "summary.json").read_text())
    assert (summary["steps"], summary["phase"]) == (1, "finished")
    assert (made / "report.html").is_file()
    settings = (made / "config.toml").read_text()
    assert str(packages / "paceline/examples/demo/policy_start") in settings
    assert str(ROOT) not in settings
