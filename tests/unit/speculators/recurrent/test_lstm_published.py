"""LSTM drafters compute the published method and keep its names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from unit.drafter_trainer.samples import (
    HIDDEN,
    TARGET,
    VOCABULARY,
    chain_logits,
    sample,
    toy_policy,
)
from unit.speculators.recurrent.arctic_method import Published, declared_shapes

from paceline.services.drafter_trainer.rows.sample import pack
from paceline.speculators.lstm import LstmNet, LstmOptions
from paceline.speculators.net import read_drafter


def config_of(method: str, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "base_model_name_or_path": "",
        "vocab_size": VOCABULARY,
        "input_hidden_dim": HIDDEN,
        "inner_dim": "12",
        "proj_dim": "12",
        "emb_dim": "12",
        "n_predict": 3,
        "top_k_tokens_per_head": [1, 1, 1],
        "n_candidates": 3,
        "method": method,
        "tie_weights": True,
        "tie_lstm_embs": True,
        "scale_input": True,
        "torch_dtype": "bfloat16",
        **changes,
    }


LENGTH = 7
SHAPES = {
    "gates": config_of("sum_lstm"),
    "an embedding for each gate": config_of("sum_lstm", tie_lstm_embs=False),
}


def rough_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """A checkpoint in which every weight matters, as the loader declares it."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in declared_shapes(config).items()
    }


def read_net(config: dict[str, Any]) -> LstmNet:
    net = LstmNet.parse(config, TARGET, LstmOptions())
    net.load_tensors(rough_tensors(config))  # which refuses other names and shapes
    return net


def check_chain(net: LstmNet, config: dict[str, Any]) -> None:
    """Compare with the published method in float64, position by position."""
    one, heads = sample(LENGTH, 0), config["n_predict"]
    published = Published(config, rough_tensors(config))
    row = pack([one], window=512)
    with torch.no_grad():
        chain = chain_logits(net.double(), replace(row, states=row.states.double()), heads)
    for t in range(LENGTH - 2 - heads):
        expected = published.logits(one.hidden[t], one.token_ids[t + 1 : t + 1 + heads].tolist())
        for got, logits in zip(chain, expected, strict=True):
            torch.testing.assert_close(got[t], logits, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_a_drafter_computes_what_the_published_method_does(name: str, scale_input: bool) -> None:
    config = SHAPES[name] | {"scale_input": scale_input}
    check_chain(read_net(config), config)


@pytest.mark.parametrize("name", SHAPES)
def test_a_checkpoint_survives_the_round_trip(name: str, tmp_path: Path) -> None:
    config = SHAPES[name]
    read_net(config).save(tmp_path)
    again = read_drafter(tmp_path, TARGET)
    assert json.loads((tmp_path / "config.json").read_text()) == config
    stored = again.export_tensors()
    assert stored.keys() == declared_shapes(config).keys()
    assert all(torch.equal(stored[key], given) for key, given in rough_tensors(config).items())


@pytest.mark.parametrize("name", SHAPES)
def test_a_drafter_trains_all_its_weights(name: str) -> None:
    net, policy = read_net(SHAPES[name]), toy_policy()
    net.bind(policy.embed, policy.head)
    loss, positions, _ = net(pack([sample(24, seed) for seed in range(4)], window=512))
    (loss / positions).backward()
    for key, parameter in net.named_parameters():
        assert parameter.grad is not None
        # The first draft forgets nothing: there is no memory before it.
        assert float(parameter.grad.norm()) > 0 or key == "forget_proj.0.weight", key
