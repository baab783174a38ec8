"""A pretrained model of 135M parameters: the embedded engine's tokens depend neither on the batch
nor on speculation or reuse, although each number of rows has a product of its own form.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

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
LONG = 1000


@dataclass
class Answer:
    """Tokens of one request and the engine's counts."""

    tokens: tuple[int, ...] = ()
    gap: float = float("inf")  # smallest of all tokens
    cached: int = 0  # prompt tokens
    accepted: int = 0  # drafts


def asked(model: Path, questions: Sequence[str], arm: str, **sampling: object) -> list[Request]:
    """A request for each question in the model's chat format, with its number as seed."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [f"<|im_start|>user\n{one}<|im_end|>\n<|im_start|>assistant\n" for one in questions]
    prompts = [tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
    return [
        Request(number, prompt, Sampling(seed=number, **sampling), forced_arm=arm)  # type: ignore[arg-type]
        for number, prompt in enumerate(prompts)
    ]


def answers(model: Path, requests: Sequence[Request], **settings: object) -> list[Answer]:
    """Answers of a fresh engine, requests in one queue."""
    given = {"model_dir": str(model), "prefix_slots": 0, **settings}
    engine = EmbeddedEngine(EmbeddedSpec.model_validate(given))
    for one in requests:
        engine.enqueue(one)
    found = [Answer() for _ in requests]
    while engine.has_work:
        for chunk in engine.step():
            assert not chunk.error
            one = found[chunk.request_id]
            one.tokens += chunk.token_ids
            one.gap = min(one.gap, chunk.smallest_gap)
            one.cached = max(one.cached, chunk.cached_prompt_tokens)
            one.accepted += sum(chunk.accepted_drafts)
    engine.close()
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_real_models_tokens_are_the_same_alone_in_a_batch_and_with_drafts(
    real_model: Path, temperature: float
) -> None:
    sampling = {
        "max_tokens": TOKENS,
        "temperature": temperature,
        "top_p": 0.95 if temperature else 1,
    }

    def said(max_batch: int, arm: str) -> list[Answer]:
        requests = asked(real_model, QUESTIONS, arm, **sampling)
        return answers(real_model, requests, max_batch=max_batch, max_sequence_tokens=160)

    alone = said(1, "off")
    assert all(one.tokens for one in alone)
    for max_batch, arm in ((6, "off"), (1, "ngram:4_1_5"), (6, "ngram:4_1_5")):
        for one, other in zip(alone, said(max_batch, arm), strict=True):
            assert one.tokens == other.tokens or one.gap < NEAR_TIE_GAP, (max_batch, arm, one.gap)


@pytest.mark.parametrize("arm", ["off", "self:4_1_5", "ngram:4_1_5"])
def test_a_thousand_new_tokens_are_the_greedy_ones_of_transformers(
    real_model: Path, arm: str
) -> None:
    """Each token is the likeliest in one float32 forward over the tokens before it, so that all are
    the tokens of greedy decoding.
    """
    question = ["Write a long story about a sailor and the sea."]
    sampling = {"max_tokens": LONG, "temperature": 0.0, "ignore_eos": True}
    (request,) = asked(real_model, question, arm, **sampling)
    drafter = "self" if arm.startswith("self") else "ngram"
    (answer,) = answers(
        real_model, [request], drafter=drafter, max_batch=1, max_sequence_tokens=LONG + 100
    )
    oracle = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32)
    with torch.inference_mode():
        logits = oracle(torch.tensor([request.prompt + answer.tokens])).logits[0]
    likeliest = logits[len(request.prompt) - 1 : -1].argmax(dim=-1)
    assert answer.gap > 100 * NEAR_TIE_GAP, "choose another question: a near-tie may flip"
    assert len(answer.tokens) == LONG
    assert list(answer.tokens) == likeliest.tolist()
    assert (answer.accepted > 0) == (arm != "off")


def test_siblings_of_a_long_prompt_compute_it_once_and_answer_as_if_alone(
    real_model: Path,
) -> None:
    question = " ".join(f"Item {number} costs {7 * number} dollars." for number in range(40))
    sampling = {"max_tokens": 16, "temperature": 0.8, "ignore_eos": True}
    requests = asked(real_model, [question] * 4, "off", **sampling)
    settings = {"drafter": "off", "max_batch": 4, "max_sequence_tokens": 1024}
    together = answers(real_model, requests, prefix_slots=8, **settings)
    length = len(requests[0].prompt)
    assert length > 400
    assert sorted(one.cached for one in together) == [0, *[length - 1] * 3]
    assert len({one.tokens for one in together}) == 4
    for one, request in zip(together, requests, strict=True):
        (alone,) = answers(
            real_model, [Request(0, request.prompt, request.sampling, forced_arm="off")], **settings
        )
        assert one.tokens == alone.tokens or alone.gap < NEAR_TIE_GAP
