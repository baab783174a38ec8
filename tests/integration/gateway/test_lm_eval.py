"""Runs EleutherAI's harness, lm-eval, where it is installed. Tasks of its three kinds run over this
gateway's completions, and over transformers in the harness's process.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from integration.gateway.conftest import POLICY_MODEL, serving, tiny_model
from outside_tools import program

from paceline.local.patience import patient

RUN_S = 240.0
QUESTIONS: list[dict[str, Any]] = [
    {"question": "1+1=", "choices": ["%131070%070041", "1+1=2 #2", "7"], "label": 0},
    {"question": "2+2=", "choices": ["4", "2+2=5 #5"], "label": 0},
    {"question": "99:18=", "choices": ["9", "99-18=81", "3"], "label": 0},
]
"""The first choice is the beginning of the demo start policy's greedy answer."""
KINDS: dict[str, dict[str, Any]] = {
    "chosen": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
    },
    "rolled": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}{{choices[0]}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
    "answered": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["#"], "max_gen_toks": 24, "do_sample": False},
    },
}
pytestmark = [
    pytest.mark.tools,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


def write_tasks(folder: Path) -> None:
    """One task of each kind, in the harness's own format (JSON is YAML)."""
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    for name, fields in KINDS.items():
        task = {
            "task": f"paceline_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": str(data)},
            "test_split": "train",
            "doc_to_text": "{{question}}",
            "target_delimiter": "",
            **fields,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task))


async def answers(folder: Path, kind: str, **arguments: Any) -> dict[str, list[Any]]:
    """The harness's answers to each question, by kind of task."""
    harness = program("lm-eval", "lm_eval", "lm-eval[api,hf]")
    out = folder / kind
    child = await asyncio.create_subprocess_exec(
        *(harness, "--model", kind, "--log_samples", "--output_path", str(out)),
        *("--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())),
        *("--tasks", ",".join(f"paceline_{name}" for name in KINDS)),
        *("--include_path", str(folder), "--device", "cpu"),
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(child.communicate(), patient(RUN_S))
    assert child.returncode == 0, said.decode()
    found: dict[str, list[Any]] = {}
    for name in KINDS:
        (file,) = out.glob(f"*/samples_paceline_{name}_*.jsonl")
        samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda x: x["doc_id"])
        found[name] = [one["resps"] for one in samples]
    return found


async def test_the_harness_is_answered_as_by_transformers_itself(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    common = {"max_length": 256, "add_bos_token": True}
    engine = {"kind": "embedded", "max_sequence_tokens": 256}
    async with serving(
        tiny_model(tmp_path / "beside"), {}, model=str(POLICY_MODEL), engine=engine
    ) as gateway:
        url = f"{gateway.http.base_url}/v1/completions"
        ours = await answers(
            tmp_path,
            "local-completions",
            model=POLICY_MODEL.name,
            base_url=url,
            tokenizer=POLICY_MODEL,
            tokenizer_backend="huggingface",
            **common,
        )
    theirs = await answers(tmp_path, "hf", pretrained=POLICY_MODEL, dtype="float32", **common)

    assert ours["answered"] == theirs["answered"]
    greedy = list[bool]()
    for mine, other in zip(ours["chosen"], theirs["chosen"], strict=True):
        for [[score, is_greedy]], [[expected, also]] in zip(mine, other, strict=True):
            assert math.isclose(float(score), float(expected), abs_tol=1e-3)
            assert is_greedy == also
            greedy.append(is_greedy == "True")
    assert greedy == [True, *[False] * 7]
    for [[score]], [[expected]] in zip(ours["rolled"], theirs["rolled"], strict=True):
        assert math.isclose(float(score), float(expected), abs_tol=1e-3)
