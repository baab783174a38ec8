"""Log-probs of prompts against transformers' forward of the same tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prompt_oracle import assert_scores_are
from random_models import save_random

from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.embedded import prefill
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import Chunk, PauseMode, Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.trajectory import Target, VersionSet
from paceline.v1.engine_pb2 import PromptScore

PROMPT = tuple(random.Random(3).randrange(3, 97) for _ in range(70))


def request(number: int, length: int, **sampling: object) -> Request:
    asked = {"seed": number, "max_tokens": 6, "prompt_logprobs": 3, **sampling}
    return Request(number, PROMPT[:length], Sampling(**asked))  # type: ignore[arg-type]


def build(directory: Path, **options: object) -> Engine:
    settings = {
        "model_dir": str(directory),
        "drafter": "ngram",
        "max_batch": 4,
        "max_sequence_tokens": 96,
        "prefill_tokens": 24,
        "prefix_tokens": 16,
        **options,
    }
    return EmbeddedEngine(EmbeddedSpec.model_validate(settings))


def run(engine: Engine, *requests: Request) -> dict[int, tuple[PromptScore, ...]]:
    chunks: list[Chunk] = []
    for one in requests:
        engine.enqueue(one)
    while engine.has_work:
        chunks += engine.step()
    return {chunk.request_id: chunk.prompt_scores for chunk in chunks}


@pytest.mark.parametrize(("family", "columns"), [("llama", 256), ("qwen2", 256), ("llama", 10)])
def test_a_prompt_in_pieces_and_those_of_siblings_are_scored_as_transformers_scores_them(
    tmp_path: Path, family: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "COLUMNS", columns)
    model = save_random(tmp_path, family)
    asked = [
        request(0, 70),  # three pieces of the prefill
        request(1, 70, temperature=0.7, prompt_logprobs=1),
        request(2, 12, temperature=0.0, max_tokens=0),
        request(3, 1, max_tokens=0),
        request(4, 33, prompt_logprobs=0),
        request(5, 70, max_tokens=0),  # waits until a slot is free: its beginning is cached then
    ]
    found = run(build(tmp_path), *asked)
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT])).logits[0]
    for one in asked:
        assert_scores_are(found[one.request_id], logits[: len(one.prompt)], one)


def test_a_request_that_does_not_ask_is_told_none_and_draws_the_same(tmp_path: Path) -> None:
    save_random(tmp_path, "llama")
    asked = [request(0, 40, max_tokens=12), request(1, 40, max_tokens=12)]
    quiet = [replace(one, sampling=replace(one.sampling, prompt_logprobs=-1)) for one in asked]
    said: list[dict[int, tuple[int, ...]]] = []
    for batch in (asked, quiet):
        engine, chunks = build(tmp_path), []
        for one in batch:
            engine.enqueue(one)
        while engine.has_work:
            chunks += engine.step()
        said.append({chunk.request_id: chunk.token_ids for chunk in chunks})
        assert all(bool(chunk.prompt_scores) == (batch is asked) for chunk in chunks)
    assert said[0] == said[1]


def test_a_prompt_that_is_cached_anew_is_scored_under_the_new_weights(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    save_random(old, "llama")
    model = save_random(new, "llama", seed=1)
    engine, one = build(old), request(0, 70)
    engine.enqueue(one)
    engine.step()  # a first piece under the old weights
    engine.prepare_weights(Target.POLICY, 1, new)
    engine.commit_weights(VersionSet(1, 1, 0), PauseMode.RETRACT)
    (scores,) = run(engine).values()
    with torch.inference_mode():
        assert_scores_are(scores, model(torch.tensor([PROMPT])).logits[0], one)
