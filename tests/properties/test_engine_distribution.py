"""The embedded engine's samples follow the checkpoint exactly, with and without drafts.

A random Llama has vocabulary 4. Transformers in float64 computes the probability of all 256
sequences of 4 tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from goodness_of_fit import g_test, power
from random_models import random_model
from torch import Tensor

from paceline.messages import stats_from_proto
from paceline.models.config import read_config
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.speculators.dflash import DflashNet, DflashOptions
from paceline.trajectory import SpeculationStats

VOCAB, LENGTH, REQUESTS, ALPHA = 4, 4, 12_000, 1e-3
SEQUENCES = torch.cartesian_prod(*[torch.arange(VOCAB)] * LENGTH)
# The prompt repeats tokens, so that the n-gram drafter finds drafts.
PROMPT = (1, 2, 0, 1, 2, 3, 3, 1, 2)
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """Directory of the checkpoint, and its logits before every token of every sequence, float64
    [256, 4, V].
    """
    directory = tmp_path_factory.mktemp("model")
    model = random_model("llama", sharpness=3.0, **SHAPE)
    model.save_pretrained(directory)
    # A fresh one would read three of the model's two layers.
    options = DflashOptions(block_size=4, inner_layers=(1,))
    DflashNet.fresh(read_config(directory), options, 0).save(directory / "dflash")
    prompts = torch.tensor(PROMPT).expand(len(SEQUENCES), -1)
    with torch.inference_mode():
        logits = model.double()(torch.cat((prompts, SEQUENCES), dim=1)).logits
    assert logits.dtype == torch.float64
    return directory, logits[:, len(PROMPT) - 1 : -1]


def exact(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Probability of every sequence, float64 [256]."""
    return (
        (logits / temperature)
        .log_softmax(-1)
        .gather(2, SEQUENCES[:, :, None])
        .sum(dim=(1, 2))
        .exp()
    )


def said(
    directory: Path, drafter: str, arm: str, temperature: float = 1.0, **options: object
) -> tuple[Tensor, SpeculationStats]:
    """Count how often the engine generates each sequence, [256]; return counts and draft
    statistics.
    """
    settings = {
        "model_dir": str(directory),
        "drafter": drafter,
        "max_batch": 500,
        "max_sequence_tokens": 32,
        **options,
    }
    engine = EmbeddedEngine(EmbeddedSpec.model_validate(settings))
    engine.force_arm(arm)
    for number in range(REQUESTS):
        sampling = Sampling(
            seed=number, max_tokens=LENGTH, temperature=temperature, ignore_eos=True
        )
        engine.enqueue(Request(number, PROMPT, sampling))
    observed = torch.zeros(VOCAB**LENGTH, dtype=torch.int64)
    while engine.has_work:
        for chunk in engine.step():
            observed[int("".join(map(str, chunk.token_ids)), VOCAB)] += 1
    assert observed.sum() == REQUESTS
    return observed, stats_from_proto(engine.load.speculation)


@pytest.mark.parametrize(
    ("drafter", "arm"),
    [
        pytest.param("off", "off", marks=pytest.mark.slow),
        ("eagle", "eagle:3_1_4"),
        pytest.param("eagle", "eagle:3_2_7", marks=pytest.mark.slow),
        pytest.param("ngram", "ngram:4_1_5", marks=pytest.mark.slow),
        pytest.param("dflash", "dflash:3_2_7", marks=pytest.mark.slow),
        pytest.param("self", "self:3_1_4", marks=pytest.mark.slow),
    ],
)
def test_the_engines_sequences_follow_the_checkpoint(
    drafter: str, arm: str, checkpoint: tuple[Path, Tensor]
) -> None:
    directory, logits = checkpoint
    arms = () if arm == "off" else (arm,)
    saved = directory / drafter
    named = str(saved) if saved.is_dir() else drafter
    observed, speculation = said(directory, named, arm, arms=arms)
    result = g_test(observed, exact(logits))
    print(
        f"{arm}: {result}; {speculation.accepted_tokens} of {speculation.drafted_tokens} drafts "
        f"accepted"
    )
    assert result.df == 134
    assert result.p_value > ALPHA, result
    assert (speculation.accepted_tokens > REQUESTS / 2) == (arm != "off"), (
        "drafts must have mattered"
    )


@pytest.mark.slow
def test_a_temperature_off_by_a_tenth_is_caught(checkpoint: tuple[Path, Tensor]) -> None:
    directory, logits = checkpoint
    assert power(REQUESTS, exact(logits), exact(logits, 1.1), ALPHA) > 0.999
    observed, _ = said(directory, "eagle", "eagle:3_1_4", temperature=1.1)
    assert g_test(observed, exact(logits)).p_value < ALPHA
    assert g_test(observed, exact(logits, 1.1)).p_value > ALPHA
