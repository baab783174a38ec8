"""An environment of the package verifiers trains the demo's policy, and measures it as verifiers
does itself.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from demo_runs import demo, left_over
from integration.gateway.conftest import POLICY_MODEL, serving, sums, tiny_model

from paceline.local.patience import patient

pytestmark = pytest.mark.timeout(600)
GCD = "verifiers:tiny_sums?kind=gcd"
OWN = """
import asyncio, json, sys
import verifiers
from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient

async def main(url):
    environment = verifiers.load_environment("tiny_sums", kind="gcd")
    client = OpenAIChatCompletionsClient(AsyncOpenAI(base_url=url, api_key="none"))
    sampling = {"temperature": 0.0, "max_tokens": 24}
    found = await environment.evaluate(client, "", sampling, rollouts_per_example=1)
    rewards = [one["reward"] for one in found["outputs"]]
    parts = [one["metrics"]["brevity"] for one in found["outputs"]]
    mean = lambda values: sum(values) / len(values)
    print("FOUND", json.dumps({"reward": mean(rewards), "brevity": mean(parts)}))

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "turns"),
    [
        (GCD, {}, 1),
        (f"{GCD}_paid", {"coordinator.turn_discount": "0.5"}, 2),  # each turn is a sample
    ],
)
def test_an_environment_trains_two_steps(
    verifiers_python: str, tmp_path: Path, name: str, more: dict[str, str], turns: int
) -> None:
    settings = more | {
        "run.verifiers_python": verifiers_python,
        "coordinator.environment": name,
        "coordinator.tasks_path": name,
        "coordinator.heldout_path": f"{name}#eval",
        "coordinator.reward": "agent",
        "coordinator.evaluation.reward": "agent",
        "coordinator.prompts_per_step": "2",
        "coordinator.samples_per_task": "4",
        "coordinator.evaluation.heldout_prompts": "3",
        "coordinator.evaluation.probe_prompts": "2",
        "coordinator.sampling.max_tokens": "24",
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    process = demo(tmp_path, "--steps", "2", *words)
    shown, _ = process.communicate(timeout=patient(400))
    assert process.returncode == 0, shown
    assert left_over(tmp_path) == []
    run = tmp_path / "demo-0-1"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["phase"], summary["trajectories_lost"]) == (2, "finished", 0)
    samples = 2 * 2 * 4 * turns
    assert summary["trajectories_published"] == summary["trajectories_trained"] == samples
    for line in (run / "steps.jsonl").read_text().splitlines():
        step = json.loads(line)
        assert set(step["reward_parts"]) == {"says", "brevity", "paid", "num_turns"}
        assert step["reward_parts"]["num_turns"] == turns


@pytest.mark.slow
async def test_an_evaluation_equals_the_packages_own(verifiers_python: str, tmp_path: Path) -> None:
    words = ["--temperature", "0", "--max-tokens", "24", "--json"]
    words += [f"run.verifiers_python={verifiers_python}", "gateway.engine.workers=1"]
    words += ["gateway.engine.max_sequence_tokens=128"]
    command = [sys.executable, "-m", "paceline.cli.main", "eval", str(POLICY_MODEL), f"{GCD}#eval"]
    ours = json.loads((await output_of(*command, *words))[-1])
    engine = {"kind": "embedded", "workers": 1, "max_sequence_tokens": 128}
    small: Any = tiny_model(tmp_path / "tiny-model")
    keys = {"model": str(POLICY_MODEL), "drafter": "off", "engine": engine}
    async with serving(small, sums(small), **keys) as served:
        url = f"{served.http.base_url}/v1"
        shown = await output_of(verifiers_python, "-c", OWN, url)
    theirs = json.loads(next(one for one in shown if one.startswith("FOUND "))[6:])
    assert ours["samples"] == 3
    assert ours["reward"] == pytest.approx(theirs["reward"], abs=1e-9)
    assert ours["reward/brevity"] == pytest.approx(theirs["brevity"], abs=1e-9)
    assert theirs["brevity"] > 0


async def output_of(*command: str) -> list[str]:
    """The lines of a program that ends well, beside the event loop of a gateway."""
    program = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    shown, _ = await program.communicate()
    assert program.returncode == 0, shown.decode()
    return shown.decode().splitlines()
