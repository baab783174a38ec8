"""Sampling through the SDK: reinforcement learning, exact log-probs, snapshots, stops, seeds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integration.tinker import data
from integration.tinker.test_training import steps

from benchmarks.tinker_loop import MODEL


def sampled(sampling: Any, prompt: str = "12 and 18", count: int = 2, **params: Any) -> Any:
    """Samples of a prompt."""
    import tinker

    ids = data.tokenizer().encode(prompt, add_special_tokens=False)
    given = tinker.SamplingParams(**{"max_tokens": 24, "temperature": 1.0, **params})
    return tinker.ModelInput.from_ints(ids), sampling.sample(
        tinker.ModelInput.from_ints(ids), count, given
    ).result()


def test_samples_have_the_log_probs_that_a_scoring_gives(client: Any) -> None:
    import tinker

    training = client.create_lora_training_client(str(MODEL), rank=8, seed=1).result()
    steps(training, 4)
    sampling = training.save_weights_and_get_sampling_client().result()
    prompt, answer = sampled(sampling, count=3, seed=5)
    ids = prompt.to_ints()
    for one in answer.sequences:
        whole = [*ids, *one.tokens]
        scores = sampling.compute_logprobs(tinker.ModelInput.from_ints(whole)).result()
        assert scores[0] is None
        assert scores[len(ids) :] == pytest.approx(one.logprobs, abs=1e-4)
        trained = training.forward([data.datum(whole)], "cross_entropy").result()
        assert data.logprobs_of(trained)[0] == pytest.approx(scores[1:], abs=1e-4)
        last = sampling.compute_logprobs(
            tinker.ModelInput.from_ints(whole), prompt_logprobs_last_n=2
        ).result()
        assert last[:-2] == [None] * (len(whole) - 2)
        assert last[-2:] == pytest.approx(scores[-2:], abs=1e-6)


def test_policy_gradient_steps_raise_the_reward(client: Any) -> None:
    import tinker

    training = client.create_lora_training_client(str(MODEL), rank=8, seed=3).result()
    wanted = data.tokenizer().encode("%", add_special_tokens=False)[0]  # of two likely beginnings
    rewards = []
    for _ in range(6):
        sampling = training.save_weights_and_get_sampling_client().result()
        prompt, answer = sampled(sampling, "273:077=", count=24, max_tokens=4, seed=100)
        ids = prompt.to_ints()
        scores = torch.tensor([float(one.tokens[0] == wanted) for one in answer.sequences])
        rewards.append(float(scores.mean()))
        batch = []
        for one, advantage in zip(answer.sequences, scores - scores.mean(), strict=True):
            drawn, before = len(one.tokens), len(ids) - 1
            batch.append(
                data.datum(
                    [*ids, *one.tokens],
                    logprobs=[0.0] * before + list(one.logprobs),
                    advantages=[0.0] * before + [float(advantage)] * drawn,
                )
            )
        done = training.forward_backward(batch, "importance_sampling")
        training.optim_step(tinker.AdamParams(learning_rate=3e-3)).result()
        done.result()
    assert rewards[-1] > rewards[0] + 0.2, rewards


def test_a_snapshot_keeps_its_weights_while_training_goes_on(client: Any) -> None:
    training = client.create_lora_training_client(str(MODEL), rank=8, seed=4).result()
    path = training.save_weights_for_sampler("first").result().path
    first = client.create_sampling_client(model_path=path).result()
    start = client.create_sampling_client(base_model=str(MODEL)).result()
    before = sampled(first, seed=9)[1].sequences[0]
    steps(training, 6)
    second = training.save_weights_and_get_sampling_client().result()
    after = sampled(second, seed=9)[1].sequences[0]
    assert after.logprobs != pytest.approx(before.logprobs, abs=1e-3)
    futures = [sampled(one, seed=9)[1].sequences[0] for one in (first, second, start, first)]
    assert [one.tokens for one in futures] == [
        *(before.tokens, after.tokens, before.tokens, before.tokens)
    ], "new adapters change nothing, so the first snapshot equals the start"


def test_sampling_parameters_reach_the_engine(client: Any) -> None:
    sampling = client.create_sampling_client(base_model=str(MODEL)).result()
    greedy = [sampled(sampling, temperature=0.0)[1].sequences[0] for _ in range(2)]
    assert greedy[0].tokens == greedy[1].tokens
    only = sampled(sampling, top_k=1)[1].sequences[0]
    assert only.tokens == greedy[0].tokens
    seeded = [sampled(sampling, seed=3, temperature=3.0)[1].sequences for _ in range(2)]
    assert [one.tokens for one in seeded[0]] == [one.tokens for one in seeded[1]]
    assert seeded[0][0].tokens != seeded[0][1].tokens
    assert sampled(sampling, max_tokens=3, stop=[])[1].sequences[0].stop_reason == "length"
    stop = greedy[0].tokens[4]
    cut = sampled(sampling, temperature=0.0, stop=[stop])[1].sequences[0]
    assert cut.stop_reason == "stop"
    assert cut.tokens == greedy[0].tokens[: greedy[0].tokens.index(stop) + 1]
    names = {one.sequence_id for one in seeded[0]}
    assert len(names) == 2
