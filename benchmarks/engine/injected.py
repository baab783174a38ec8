"""Builds a model of random weights and a speculator that has its answers, for speculation with a
chosen acceptance.

The speculator drafts at no cost, so only verification is measured. The result is the upper limit
for any drafter with this acceptance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from paceline.models.config import parse_config
from paceline.models.loading import model_shapes
from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.speculators.base import (
    CaptureSpec,
    DraftBatch,
    Drafts,
    DraftShape,
    Speculator,
    SpeculatorSetup,
)
from paceline.speculators.kinds import SPECULATORS, SpeculatorKind

RANDOM_56M: Mapping[str, int] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
}
"""55.6M parameters with an untied head."""
RANDOM_TINY: Mapping[str, int] = {
    **RANDOM_56M,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
}

WEIGHT_STD = 0.02
NAME = "ngram"  # the speculator that KnownTokens replaces


def write_random_model(
    directory: Path, sizes: Mapping[str, int], seed: int, dtype: torch.dtype = torch.float32
) -> int:
    """Writes a Llama checkpoint with weights N(0, 0.02^2) and norms of one; returns its number of
    parameters.
    """
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        **sizes,
    }
    (directory / "config.json").write_text(json.dumps(raw))
    source = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape, dtype=dtype)
        if len(shape) == 1
        else (torch.randn(shape, generator=source) * WEIGHT_STD).to(dtype)
        for name, shape in model_shapes(parse_config(raw)).items()
    }
    save_file(tensors, directory / "model.safetensors")
    return sum(tensor.numel() for tensor in tensors.values())


NOTHING = np.empty(0, dtype=np.int64)


class KnownTokens(Speculator):
    """Speculator (speculators/base.py) that proposes each next token right with a given
    probability, else wrong.
    """

    name = NAME
    capture = CaptureSpec(last=False)

    def __init__(self, setup: SpeculatorSetup) -> None:
        self._vocab = setup.target.config.vocab_size
        self._width = 0
        self._proposals: dict[tuple[int, ...], npt.NDArray[np.int64]] = {}

    def know(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], acceptance: float, seed: int
    ) -> None:
        """Sets the answers to propose, each token right with probability `acceptance`.

        The prompts must all differ and have one length.
        """
        draws = np.random.default_rng(seed)
        self._width = len(next(iter(answers)))
        self._proposals = {}
        for prompt, tokens in answers.items():
            right = np.asarray(tokens, dtype=np.int64)
            wrong = (right + 1) % self._vocab
            self._proposals[prompt] = np.where(draws.random(len(right)) < acceptance, right, wrong)

    def propose(self, batch: DraftBatch, shape: DraftShape) -> Drafts:
        """Proposes a chain; -1 behind the end of an answer, and for a prompt without an answer."""
        steps = shape.steps
        drafts = np.full((len(batch.slots), steps), -1, dtype=np.int64)
        known = batch.token_ids.cpu().numpy()
        for row, (slot, n) in enumerate(zip(batch.slots, batch.lengths, strict=True)):
            proposal = self._proposals.get(tuple(known[slot, : self._width].tolist()), NOTHING)
            found = proposal[n - self._width : n - self._width + steps]
            drafts[row, : len(found)] = found
        tokens = torch.from_numpy(drafts).to(batch.token_ids.device)
        return Drafts(tokens, torch.ones(tokens.shape, device=tokens.device))


def build_injected(spec: EmbeddedSpec) -> tuple[Engine, KnownTokens]:
    """Builds an engine that drafts its n-gram arms with KnownTokens. Raises the errors of
    EmbeddedEngine.
    """
    made: list[KnownTokens] = []

    def make(setup: SpeculatorSetup) -> KnownTokens:
        made.append(KnownTokens(setup))
        return made[-1]

    with _in_place_of_ngram(make):
        engine = EmbeddedEngine(spec)
    return engine, made[0]


@contextmanager
def _in_place_of_ngram(make: Callable[[SpeculatorSetup], Speculator]) -> Iterator[None]:
    """Replaces n-grams in the table of speculators while an engine is built; the engine's code is
    untouched.
    """
    usual = SPECULATORS[NAME]
    SPECULATORS[NAME] = SpeculatorKind(NAME, make)
    try:
        yield
    finally:
        SPECULATORS[NAME] = usual


def expected_accept_length(acceptance: float, steps: int) -> float:
    """Mean tokens of a round with `steps` drafts, each right with probability `acceptance`
    (Leviathan et al. 2023, equation 1).
    """
    return sum(acceptance**i for i in range(steps + 1))
