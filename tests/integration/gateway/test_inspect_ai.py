"""Runs inspect-ai over the gateway of a pretrained chat model, where both are installed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import openai
import pytest
from example_runs import gateway
from outside_tools import program

from paceline.client import find_token
from paceline.local.patience import patient

pytestmark = [pytest.mark.tools, pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Italy?": "Rome",
    "What color is a clear sky at noon?": "blue",
    "What is 17 times 23?": "391",
}
MOST_TOKENS = 24
TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def questions():
    return Task(dataset=json_dataset("questions.jsonl"), solver=generate(), scorer=includes())
"""


def test_its_accuracy_is_that_of_the_same_greedy_answers(real_model: Path, tmp_path: Path) -> None:
    inspect = program("inspect-ai", "inspect", "inspect-ai openai")
    rows = [json.dumps({"input": one, "target": answer}) for one, answer in QUESTIONS.items()]
    (tmp_path / "questions.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "questions.py").write_text(TASK)
    engine = ("gateway.engine.workers=1", "gateway.engine.max_batch=4")
    with gateway(tmp_path, f"gateway.model={real_model}", *engine) as url:
        key = find_token(url)
        assert key is not None
        named = {"PACELINE_API_KEY": key, "PACELINE_BASE_URL": f"{url}/v1"}
        words = ("--model", f"openai-api/paceline/{real_model.name}", "--temperature", "0")
        words += ("--max-tokens", str(MOST_TOKENS), "--display", "plain")
        done = subprocess.run(
            [inspect, "eval", "questions.py", *words, "--log-format", "json", "--log-dir", "logs"],
            cwd=tmp_path,
            env={**os.environ, **named},
            capture_output=True,
            text=True,
            timeout=patient(400),
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
        answers = [greedy(client, question) for question in QUESTIONS]
    (log,) = (tmp_path / "logs").glob("*.json")
    found = json.loads(log.read_text())
    assert found["status"] == "success", found
    said = {
        one["input"]: one["output"]["choices"][0]["message"]["content"] for one in found["samples"]
    }
    assert [said[question] for question in QUESTIONS] == answers
    right = [
        target.lower() in answer.lower()
        for target, answer in zip(QUESTIONS.values(), answers, strict=True)
    ]
    assert 0 < sum(right) < len(right)
    measured = found["results"]["scores"][0]["metrics"]["accuracy"]["value"]
    assert measured == pytest.approx(sum(right) / len(right))


def greedy(client: openai.OpenAI, question: str) -> str:
    answer = client.chat.completions.create(
        model="",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=MOST_TOKENS,
    )
    return answer.choices[0].message.content or ""
