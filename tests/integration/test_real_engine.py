"""A pretrained model of 135M parameters: the embedded engine's tokens depend neither on the batch
nor on speculation, although each number of rows has a product of its own form.
"""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.trajectory import NEAR_TIE_GAP

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]
QUESTIONS = (
    "Count from one to twenty in words.",
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
    "Name five animals that live in the sea.",
    "Translate 'good morning' into French, Spanish and German.",
)
TOKENS = 40


def answers(
    model: Path, max_batch: int, arm: str, temperature: float
) -> list[tuple[tuple[int, ...], float]]:
    """Tokens and smallest gap of each answer, requests in one queue."""
    engine = EmbeddedEngine(
        EmbeddedSpec(
            model_dir=str(model), max_batch=max_batch, max_sequence_tokens=160, prefix_slots=0
        )
    )
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for number, question in enumerate(QUESTIONS):
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        prompt = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
        sampling = Sampling(
            seed=number,
            max_tokens=TOKENS,
            temperature=temperature,
            top_p=0.95 if temperature else 1,
        )
        engine.enqueue(Request(number, prompt, sampling, forced_arm=arm))
    found: list[list[int]] = [[] for _ in QUESTIONS]
    gaps = [float("inf")] * len(QUESTIONS)
    while engine.has_work:
        for chunk in engine.step():
            assert not chunk.error
            found[chunk.request_id] += chunk.token_ids
            gaps[chunk.request_id] = min(gaps[chunk.request_id], chunk.smallest_gap)
    engine.close()
    return [(tuple(tokens), gap) for tokens, gap in zip(found, gaps, strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_real_models_tokens_are_the_same_alone_in_a_batch_and_with_drafts(
    real_model: Path, temperature: float
) -> None:
    alone = answers(real_model, 1, "off", temperature)
    assert all(tokens for tokens, _ in alone)
    for max_batch, arm in ((6, "off"), (1, "ngram:4_1_5"), (6, "ngram:4_1_5")):
        for (tokens, gap), (others, _) in zip(
            alone, answers(real_model, max_batch, arm, temperature), strict=True
        ):
            assert tokens == others or gap < NEAR_TIE_GAP, (max_batch, arm, gap)
