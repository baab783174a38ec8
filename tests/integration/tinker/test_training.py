"""Training through the SDK: exact losses, steps, custom losses, saved states, several sessions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from integration.tinker import data

from benchmarks.tinker_loop import MODEL

FULL = {"paceline.full_training": "true"}


def steps(training: Any, count: int, rate: float = 3e-3) -> list[float]:
    """Losses before each of so many steps on the texts."""
    import tinker

    batch, losses = [data.datum(ids) for ids in data.sequences()], []
    for _ in range(count):
        done = training.forward_backward(batch, "cross_entropy")
        moved = training.optim_step(tinker.AdamParams(learning_rate=rate))
        losses.append(done.result().metrics["loss:sum"])
        moved.result()
    return losses


def test_the_service_describes_its_model_and_a_training_client(client: Any) -> None:
    served = client.get_server_capabilities().supported_models
    assert [one.model_name for one in served] == [str(MODEL)]
    training = client.create_lora_training_client(str(MODEL), rank=8).result()
    info = training.get_info()
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == (str(MODEL), True, 8)
    assert training.get_tokenizer().encode("12") == data.tokenizer().encode("12")


def test_fine_tuning_lowers_the_loss(client: Any) -> None:
    training = client.create_lora_training_client(str(MODEL), rank=8, seed=1).result()
    losses = steps(training, 8)
    assert losses[-1] < 0.7 * losses[0]


def test_losses_and_steps_equal_a_plain_recomputation(client: Any) -> None:
    import tinker

    training = client.create_lora_training_client(str(MODEL), user_metadata=FULL).result()
    assert not training.get_info().is_lora
    model, ids = data.plain_model(), data.sequences()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-5)
    adam.param_groups[0]["weight_decay"] = 0.01
    for number in range(3):
        done = training.forward_backward([data.datum(one) for one in ids], "cross_entropy")
        settings = tinker.AdamParams(
            learning_rate=1e-4, eps=1e-5, weight_decay=0.01, grad_clip_norm=1.0
        )
        moved = training.optim_step(settings)
        plain = [data.plain_logprobs(model, one) for one in ids]
        loss = -sum(one[3:].sum() for one in plain)
        result = done.result()
        rounding = 0.0 if number == 0 else 1e-5  # Adam divides small gradients by their size
        for own, other in zip(data.logprobs_of(result), plain, strict=True):
            assert own == pytest.approx(other.tolist(), abs=1e-5, rel=rounding)
        assert result.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        assert moved.result().metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_gradients_add_up_over_calls_and_chunks(client: Any) -> None:
    import tinker

    ids = data.sequences()
    norms = []
    for parts in ([ids], [ids[:1], ids[1:]]):
        training = client.create_lora_training_client(str(MODEL), rank=4, seed=5).result()
        for part in parts:
            training.forward_backward([data.datum(one) for one in part], "cross_entropy")
        moved = training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        norms.append(moved.metrics["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_policy_losses_equal_their_formulas_in_float64(client: Any, loss: str) -> None:
    training = client.create_lora_training_client(str(MODEL), rank=4, seed=3).result()
    ids = data.sequences()[0]
    count, model = len(ids) - 1, data.plain_model()
    policy = data.plain_logprobs(model, ids).double().detach()
    noise = torch.linspace(-0.6, 0.6, count, dtype=torch.float64)
    sampler, advantages = policy - noise, torch.linspace(-1.0, 2.0, count, dtype=torch.float64)
    one = data.datum(ids, logprobs=sampler.tolist(), advantages=advantages.tolist())
    clips = {} if loss == "importance_sampling" else {"clip_high_threshold": 1.1}
    result = training.forward([one], loss, clips).result()
    ratio = (policy - sampler).exp()
    clipped = ratio.clamp(0.8, 1.1)
    expected = {
        "importance_sampling": -(ratio * advantages),
        "ppo": -torch.minimum(ratio * advantages, clipped * advantages),
    }[loss]
    found = list(result.loss_fn_outputs[0]["elementwise_loss"].data)
    assert found == pytest.approx(expected.tolist(), abs=1e-5, rel=2e-6)
    assert result.metrics["loss:sum"] == pytest.approx(float(expected.sum()), abs=1e-4)


def test_a_custom_loss_has_the_gradient_of_the_built_in_loss(client: Any) -> None:
    import tinker

    batch = [data.datum(ids) for ids in data.sequences()]

    def custom(given: Any, logprobs: Any) -> Any:
        weights = [torch.tensor(one.loss_fn_inputs["weights"].data) for one in given]
        loss = -sum((w * p).sum() for w, p in zip(weights, logprobs, strict=True))
        return loss, {"own:mean": loss.item() / len(given)}

    norms, losses = [], []
    for own in (True, False):
        training = client.create_lora_training_client(str(MODEL), rank=4, seed=7).result()
        if own:
            done = training.forward_backward_custom(batch, custom)
        else:
            done = training.forward_backward(batch, "cross_entropy")
        losses.append(done.result().metrics["loss:sum"])
        moved = training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        norms.append(moved.metrics["grad_norm"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_several_targets_of_a_token_have_their_own_weights(client: Any) -> None:
    import tinker

    training = client.create_lora_training_client(str(MODEL), rank=4).result()
    ids = data.sequences()[0]
    count = len(ids) - 1
    targets = torch.stack([torch.tensor(ids[1:]), torch.full((count,), 5)], 1)
    inputs = {
        "target_tokens": tinker.TensorData.from_torch(targets),
        "weights": tinker.TensorData.from_torch(torch.full((count, 2), 0.5)),
    }
    one = tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
    found = training.forward([one], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    assert list(found.shape) == [count, 2]
    plain = torch.log_softmax(data.plain_model()(torch.tensor([ids])).logits[0, :-1], -1)
    expected = plain.gather(-1, targets).flatten().tolist()
    assert list(found.data) == pytest.approx(expected, abs=1e-5)


def test_a_saved_state_continues_with_the_same_losses(client: Any) -> None:
    training = client.create_lora_training_client(str(MODEL), rank=8, seed=2).result()
    steps(training, 2)
    path = training.save_state("middle").result().path
    expected = steps(training, 3)
    training.load_state_with_optimizer(path).result()
    assert steps(training, 3) == pytest.approx(expected, rel=1e-6)
    other = client.create_training_client_from_state_with_optimizer(path).result()
    assert other.get_info().lora_rank == 8
    assert steps(other, 3) == pytest.approx(expected, rel=1e-6)
    fresh = client.create_training_client_from_state(path).result()
    again = steps(fresh, 3)
    assert again[0] == pytest.approx(expected[0], rel=1e-6)
    assert not math.isclose(again[2], expected[2], rel_tol=1e-4), "the optimiser's state is new"


def test_two_sessions_train_in_turn_as_if_each_were_alone(
    client_of: Callable[[], Any],
) -> None:
    import tinker

    alone = client_of().create_lora_training_client(str(MODEL), rank=4, seed=11).result()
    expected = steps(alone, 3)
    pair = [
        client_of().create_lora_training_client(str(MODEL), rank=rank, seed=11).result()
        for rank in (4, 8)
    ]
    batch = [data.datum(ids) for ids in data.sequences()]
    losses: list[list[float]] = [[], []]
    for _ in range(3):
        done = [one.forward_backward(batch, "cross_entropy") for one in pair]
        moved = [one.optim_step(tinker.AdamParams(learning_rate=3e-3)) for one in pair]
        for own, result in zip(losses, done, strict=True):
            own.append(result.result().metrics["loss:sum"])
        for step in moved:
            step.result()
    assert losses[0] == pytest.approx(expected, rel=1e-6)
    assert losses[1][1:] != pytest.approx(expected[1:], rel=1e-6), "the other client has rank 8"
