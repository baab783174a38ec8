"""Executes README, docs/agents.md and docs/tutorial.md from the first block to the last, and
commands of docs/drafters.md.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from doc_pages import ROOT, Block, Reader, blocks_of, reader

from paceline.local.patience import patient
from paceline.local.ports import free_ports
from paceline.speculators.kinds import find_kind

pytestmark = pytest.mark.slow

WORKLOAD = ROOT / "benchmarks/workloads/two_digits"
STEPS = 6
"""Steps of the tutorial's run here, of 16 on the page; its reward rises most in the first."""
SERVICE_PORTS = ("coordinator", "gateway", "http", "policy_trainer", "drafter_trainer", "events")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Working directory of a reader of README and agents.md: a model with a chat template, and
    tasks.
    """
    model = tmp_path / "MODEL_DIR"
    shutil.copytree(WORKLOAD / "policy_start", model)
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    (tmp_path / "DIR").symlink_to(model)
    shutil.copy(WORKLOAD / "tasks_train.jsonl", tmp_path / "train.jsonl")
    return tmp_path


def on_free_ports() -> Callable[[str], str]:
    """Commands as a reader types them on a terminal where the ports of the page are taken."""
    ports = free_ports(len(SERVICE_PORTS) + 1)
    own = {name: f"127.0.0.1:{port}" for name, port in zip(SERVICE_PORTS, ports, strict=False)}
    own["events"] = f"tcp://{own['events']}"
    words = " ".join(f"'addresses.{name}=\"{address}\"'" for name, address in own.items())

    def typed(text: str) -> str:
        text = text.replace(".venv/bin/paceline", "paceline")
        text = text.replace("127.0.0.1:7408", own["http"])
        text = text.replace(" coordinator.steps=16 ", f" coordinator.steps={STEPS} ")
        text = text.replace("127.0.0.1:8000", f"127.0.0.1:{ports[-1]}")
        text = text.replace("--http-port 8000", f"--http-port {ports[-1]} --grpc-port 0")
        return f"{text} --lines text {words}" if text.startswith("paceline up ") else text

    return typed


def play(page: str, one: Reader, timeout_s: float) -> None:
    for block in blocks_of(ROOT / page):
        one.play(block, timeout_s)


@pytest.mark.timeout(120)
def test_readme_is_right_to_its_last_command(folder: Path) -> None:
    with reader(folder, on_free_ports()) as one:
        play("README.md", one, patient(60))


@pytest.mark.timeout(600)
def test_the_complete_configuration_of_the_agents_page_trains_what_its_agents_earn(
    folder: Path,
) -> None:
    with reader(folder, on_free_ports()) as one:
        play("docs/agents.md", one, patient(400))
    summary = json.loads((folder / "runs/agents/summary.json").read_text())
    assert (summary["phase"], summary["steps"]) == ("finished", 3)
    assert summary["trajectories_trained"] == 3 * 2 * 4


@pytest.mark.timeout(1500)
def test_the_tutorial_trains_an_agent_from_an_empty_folder(tmp_path: Path) -> None:
    with reader(tmp_path, on_free_ports()) as one:
        play("docs/tutorial.md", one, patient(900))
    run = tmp_path / "runs/first"
    rewards = [json.loads(line)["reward_mean"] for line in (run / "steps.jsonl").open()]
    assert len(rewards) == STEPS
    assert sum(rewards[-3:]) / 3 > rewards[0], rewards
    events = [json.loads(line) for line in (run / "journal.jsonl").open()]
    rewarded_s = next(event[1] for event in events if event[2] == "ShareDone")
    began_s = (tmp_path / "make_tasks.py").stat().st_mtime
    print(f"{rewarded_s - began_s:.0f} s to the first rewards; by step: {rewards}")


@pytest.mark.timeout(180)
def test_the_drafters_page_trains_a_drafter_and_exports_it(folder: Path) -> None:
    question = {"role": "user", "content": "12:18="}
    chat = {"messages": [question, {"role": "assistant", "content": "12:18: 6 #6"}]}
    (folder / "chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 12)
    _, train, export = run_here("docs/drafters.md")
    with reader(folder, str) as one:
        for block in (train, export):
            one.play(block, patient(80))
    config = json.loads((folder / "eagle-sglang/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle"]


def test_the_drafters_page_names_a_kind_of_ones_own(folder: Path) -> None:
    kind, *_ = run_here("docs/drafters.md")
    (folder / "medusa.py").write_text(kind.text)
    found = find_kind(f"{folder}/medusa.py:KIND")
    assert (found.name, found.inner_layers({}, 12)) == ("medusa", (2, 6))


def run_here(page: str) -> list[Block]:
    """The blocks of a page that name this file as their test."""
    name = "tests/integration/test_pages.py"
    return [replace(one, how="") for one in blocks_of(ROOT / page) if one.what.startswith(name)]
