"""Log-probs on both sides of a commit, recomputed by transformers with the weights that the version
spans name.

in_place keeps the old weights' keys and values of earlier tokens. retract and abort recompute all
keys and values with the new weights.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gumbel_oracle
import numpy as np
import pytest
import torch
from random_models import save_random
from transformers import DynamicCache, PreTrainedModel

from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import Chunk, PauseMode, Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.trajectory import Target, VersionSet, VersionSpan

TOKENS = 30


def draws(logits: torch.Tensor, first: int, sampling: Sampling) -> tuple[list[int], list[float]]:
    """Tokens and log-probs AT positions first .. from logits [T, V] of the positions before."""
    drawn = [
        gumbel_oracle.draw(row, sampling.temperature, sampling.seed, first + index)
        for index, row in enumerate(logits.numpy())
    ]
    return [token for token, _ in drawn], [logprob for _, logprob in drawn]


@torch.inference_mode()
def logits_of(
    old: PreTrainedModel, new: PreTrainedModel, ids: list[int], cut: int, *, keeps_cache: bool
) -> torch.Tensor:
    """Return logits [T, V] by position: old weights before the last of `cut` tokens, then new
    weights.
    """
    cache = DynamicCache()
    before = old(torch.tensor([ids[: cut - 1]]), past_key_values=cache).logits[0]
    if keeps_cache:
        after = new(torch.tensor([ids[cut - 1 :]]), past_key_values=cache).logits[0]
    else:
        after = new(torch.tensor([ids])).logits[0, cut - 1 :]
    return torch.cat((before, after))


def run(directory: Path, requests: list[Request], mode: PauseMode, arm: str) -> dict[int, Chunk]:
    """Return each request's whole output, with a commit in the middle; requests that it ended
    resume.
    """
    spec = EmbeddedSpec(
        model_dir=str(directory / "old"), drafter="eagle", max_batch=3, max_sequence_tokens=96
    )
    engine = EmbeddedEngine(spec)
    engine.force_arm(arm)
    engine.prepare_weights(Target.POLICY, 1, directory / "new")
    for one in requests:
        engine.enqueue(one)
    for _ in range(4):
        assert not engine.step()
    ended = engine.commit_weights(VersionSet(1, 1, 0), mode)
    assert bool(ended) == (mode is PauseMode.ABORT)
    first = {chunk.request_id: chunk for chunk in ended}
    for one in requests if ended else ():
        engine.enqueue(replace(one, response=first[one.request_id].token_ids))
    said: dict[int, Chunk] = {}
    while engine.has_work:
        for chunk in engine.step():
            before = first.get(chunk.request_id)
            said[chunk.request_id] = chunk if before is None else joined(before, chunk)
    return said


def joined(before: Chunk, after: Chunk) -> Chunk:
    return replace(
        after,
        token_ids=before.token_ids + after.token_ids,
        behavior_logprobs=before.behavior_logprobs + after.behavior_logprobs,
        version_spans=before.version_spans + after.version_spans,
    )


@pytest.mark.parametrize("arm", ["off", "eagle:3_1_4"])
@pytest.mark.parametrize("mode", list(PauseMode))
def test_every_token_has_the_logprob_of_the_version_that_its_span_names(
    mode: PauseMode, arm: str, tmp_path: Path
) -> None:
    old = save_random(tmp_path / "old", "llama", sharpness=6.0)
    new = save_random(tmp_path / "new", "llama", seed=1, sharpness=6.0)
    sampling = Sampling(seed=0, max_tokens=TOKENS, temperature=0.8, ignore_eos=True)
    requests = [
        Request(number, tuple(range(5, 8 + number)), replace(sampling, seed=number))
        for number in range(4)  # the last request waits during the commit
    ]
    said = run(tmp_path, requests, mode, arm)
    other = 0.0  # how far the log-probs would lie from the other rule's
    for one in requests:
        chunk = said[one.request_id]
        ids, start = [*one.prompt, *chunk.token_ids], len(one.prompt)
        cut = start + next(s.start for s in chunk.version_spans if s.policy_version == 1)
        spans = (VersionSpan(0, cut - start, 0), VersionSpan(cut - start, TOKENS, 1))
        assert chunk.version_spans == tuple(span for span in spans if span.end > span.start)
        for keeps_cache in (True, False):
            kept = keeps_cache and cut > start
            logits = logits_of(old, new, ids, cut, keeps_cache=kept)[start - 1 : -1]
            tokens, logprobs = draws(logits, start, one.sampling)
            if keeps_cache == (mode is PauseMode.IN_PLACE):
                assert list(chunk.token_ids) == tokens
                np.testing.assert_allclose(chunk.behavior_logprobs, logprobs, atol=5e-5)
            else:
                distance = np.abs(np.subtract(chunk.behavior_logprobs, logprobs)).max()
                other = max(other, float(distance))
    assert said[0].version_spans[0].end >= 4
    assert other > 0.1
