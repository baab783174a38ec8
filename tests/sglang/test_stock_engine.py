"""The greedy tokens of the unpatched SGLang over the CPU stand-in equal transformers' with any
drafter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from random_models import save_random
from sglang_served import greedy, stock
from transformers import PreTrainedModel

from paceline.models.config import read_config
from paceline.speculators.eagle import EagleNet, EagleOptions

pytestmark = pytest.mark.sglang
PROMPTS = [
    [3, 4, 5, 6, 7, 8],
    [9, 10, 9, 10, 9, 10, 9, 10, 9, 10, 9, 10, 9],
    [5],
    list(range(3, 19)) * 3,
]
NEW_TOKENS = 60


def expected(model: PreTrainedModel) -> list[list[int]]:
    """Greedy tokens of a full forward per token, without a cache."""
    return [greedy(model, prompt, NEW_TOKENS) for prompt in PROMPTS]


def test_llama_under_an_eagle_tree_emits_the_greedy_tokens_of_transformers(tmp_path: Path) -> None:
    # A small vocabulary lets even a random drafter hit, so that accepted branches are moved and
    # continued.
    model = save_random(
        tmp_path / "target", "llama", vocab_size=19, sharpness=4.0, max_position_embeddings=512
    )
    EagleNet(read_config(tmp_path / "target"), EagleOptions(fc_bias=True), seed=1).save(
        tmp_path / "drafter"
    )
    tree = {
        "num_steps": 3,
        "eagle_topk": 3,
        "num_draft_tokens": 10,
        "draft_model_path": str(tmp_path / "drafter"),
    }
    report = stock(
        {
            "model_path": str(tmp_path / "target"),
            "speculative_algorithm": "EAGLE",
            **{f"speculative_{name}": value for name, value in tree.items()},
        },
        PROMPTS,
        NEW_TOKENS,
    )
    assert report["tokens"] == expected(model)
    assert sum(report["accepted"]) > NEW_TOKENS


def test_qwen3_under_ngram_emits_the_greedy_tokens_of_transformers(tmp_path: Path) -> None:
    model = save_random(tmp_path / "target", "qwen3", sharpness=4.0, max_position_embeddings=512)
    report = stock(
        {
            "model_path": str(tmp_path / "target"),
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": 8,
        },
        PROMPTS,
        NEW_TOKENS,
    )
    assert report["tokens"] == expected(model)
    assert sum(report["accepted"]) > 0
