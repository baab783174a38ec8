"""The unpatched SGLang over the CPU stand-in: its greedy tokens are those of transformers, whatever drafts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import save_random
from transformers import PreTrainedModel

import rollout_gateway
from paceline.local.ports import free_port
from paceline.models.config import read_config
from paceline.speculators.eagle import EagleNet, EagleOptions

pytestmark = pytest.mark.sglang
CPU_KERNELS = Path(rollout_gateway.__file__).parent / "engines" / "sglang" / "cpu_kernels"
PROMPTS = [[3, 4, 5, 6, 7, 8], [9, 10, 9, 10, 9, 10, 9, 10, 9, 10, 9, 10, 9], [5], list(range(3, 19)) * 3]
NEW_TOKENS = 60


def generate(engine: dict[str, Any]) -> dict[str, Any]:
    """Runs stock_engine.py to its end."""
    task = {"engine": {"port": free_port(), **engine}, "prompts": PROMPTS, "new_tokens": NEW_TOKENS}
    environment = {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # SGLang compiles one small function of its tree drafting, which takes seconds
        "PYTHONPATH": str(CPU_KERNELS),
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("stock_engine.py"))],
        input=json.dumps(task), env=environment, capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def transformers_greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Greedy tokens of a full forward per token, without a cache."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_llama_under_an_eagle_tree_emits_the_greedy_tokens_of_transformers(tmp_path: Path) -> None:
    # A small vocabulary lets even a random drafter hit, so that accepted branches are really moved and continued.
    model = save_random(tmp_path / "target", "llama", vocab_size=19, sharpness=4.0, max_position_embeddings=512)
    EagleNet(read_config(tmp_path / "target"), EagleOptions(fc_bias=True), seed=1).save(tmp_path / "drafter")
    tree = {"num_steps": 3, "eagle_topk": 3, "num_draft_tokens": 10, "draft_model_path": str(tmp_path / "drafter")}
    report = generate(
        {
            "model_path": str(tmp_path / "target"),
            "speculative_algorithm": "EAGLE",
            **{f"speculative_{name}": value for name, value in tree.items()},
        }
    )
    assert report["tokens"] == [transformers_greedy(model, prompt) for prompt in PROMPTS]
    assert report["accepted"] > NEW_TOKENS


def test_qwen3_under_ngram_emits_the_greedy_tokens_of_transformers(tmp_path: Path) -> None:
    model = save_random(tmp_path / "target", "qwen3", sharpness=4.0, max_position_embeddings=512)
    report = generate(
        {
            "model_path": str(tmp_path / "target"),
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": 8,
        }
    )
    assert report["tokens"] == [transformers_greedy(model, prompt) for prompt in PROMPTS]
    assert report["accepted"] > 0
