"""LSTM drafters of unequal widths: all that the published method computes are read, and compute the
same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from unit.drafter_trainer.samples import HIDDEN, TARGET, VOCABULARY, sample, toy_policy
from unit.speculators.recurrent.arctic_method import Published, declared_shapes

from paceline.errors import InvalidInput
from paceline.services.drafter_trainer.rows.batcher import pack
from paceline.speculators.loading import read_drafter
from paceline.speculators.recurrent.lstm import LstmNet, LstmOptions


def config_of(
    inner: str, proj: str, emb: str, method: str = "sum_rnn", **changes: Any
) -> dict[str, Any]:
    return {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "base_model_name_or_path": "",
        "vocab_size": VOCABULARY,
        "input_hidden_dim": HIDDEN,
        "inner_dim": inner,
        "proj_dim": proj,
        "emb_dim": emb,
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
UNEQUAL = {
    "a state narrower than the sums": config_of("12.6", "12", "12"),
    "a wider one, over three layers": config_of("8.5.20", "8", "8"),
    "stacks of one width": config_of("12.6", "12.12.12", "12.12"),
    "a stack that ends in one number": config_of("9.4", "9", "7.1"),
    "sums of one number": config_of("9", "1", "5.1"),
    "a weight set for every draft": config_of("12.6", "12.12", "12.12", tie_weights=False),
    "widths that gates do not read": config_of("12.30.12", "12.4", "12.7", "sum_lstm"),
    "single gates": config_of("12", "1", "1", "sum_lstm"),
    "norms with a single weight": config_of("1.12", "12", "12", "sum_lstm"),
    "an embedding for each gate": config_of("1.12", "12", "12.3", "sum_lstm", tie_lstm_embs=False),
}


def rough_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """A checkpoint whose every weight matters, as the loader declares it."""
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
    """In float64, position by position."""
    one, heads = sample(LENGTH, 0), config["n_predict"]
    published = Published(config, rough_tensors(config))
    row = pack([one], window=512)
    with torch.no_grad():
        chain = net.double().chain_logits(replace(row, states=row.states.double()), heads)
    for t in range(LENGTH - 2 - heads):
        expected = published.logits(one.hidden[t], one.token_ids[t + 1 : t + 1 + heads].tolist())
        for got, logits in zip(chain, expected, strict=True):
            torch.testing.assert_close(got[t], logits, atol=1e-9, rtol=1e-9)


def computes(config: dict[str, Any]) -> bool:
    """Whether the published method comes to an end with these widths."""
    hidden = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))
    try:
        Published(config, rough_tensors(config)).logits(hidden, [1, 2, 3])
    except RuntimeError:
        return False
    return True


def chains(widths: tuple[int, ...]) -> list[str]:
    """All chains of one or two of them."""
    return [
        ".".join(map(str, chain)) for length in (1, 2) for chain in product(widths, repeat=length)
    ]


def all_widths(method: str) -> Iterator[dict[str, Any]]:
    for inner, proj, emb in product(chains((1, 2, 3)), repeat=3):
        yield config_of(inner, proj, emb, method)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "fitting"), [("sum_lstm", 224), ("sum_rnn", 288)])
def test_widths_are_read_if_and_only_if_the_published_method_computes_them(
    method: str, fitting: int
) -> None:
    """Of all 1,728 triples of chains of one or two widths up to 3."""
    read = 0
    for config in all_widths(method):
        if computes(config):
            check_chain(read_net(config), config)
            read += 1
        else:
            with pytest.raises(InvalidInput, match=rf"does not fit .* of {method}"):
                LstmNet.parse(config, TARGET, LstmOptions())
    assert read == fitting


@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("name", UNEQUAL)
def test_a_drafter_of_unequal_widths_computes_what_the_published_method_does(
    name: str, scale_input: bool
) -> None:
    config = UNEQUAL[name] | {"scale_input": scale_input}
    check_chain(read_net(config), config)


@pytest.mark.parametrize("name", UNEQUAL)
def test_a_checkpoint_of_unequal_widths_survives_the_round_trip(name: str, tmp_path: Path) -> None:
    config = UNEQUAL[name]
    read_net(config).save(tmp_path)
    again = read_drafter(tmp_path, TARGET)
    assert json.loads((tmp_path / "config.json").read_text()) == config
    stored = again.export_tensors()
    assert stored.keys() == declared_shapes(config).keys()
    assert all(torch.equal(stored[key], given) for key, given in rough_tensors(config).items())


@pytest.mark.parametrize("name", UNEQUAL)
def test_a_drafter_of_unequal_widths_trains_all_its_weights(name: str) -> None:
    net, policy = read_net(UNEQUAL[name]), toy_policy()
    net.bind(policy.embed, policy.head)
    loss, positions, _ = net(pack([sample(24, seed) for seed in range(4)], window=512))
    (loss / positions).backward()
    for key, parameter in net.named_parameters():
        assert parameter.grad is not None
        # The first draft forgets nothing: there is no memory before it.
        assert float(parameter.grad.norm()) > 0 or key == "forget_proj.0.weight", key


def test_without_a_method_a_drafter_is_one_of_stacks(tmp_path: Path) -> None:
    config = UNEQUAL["a state narrower than the sums"]
    read_net(config).save(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key != "method"})
    )
    assert LstmNet.read(tmp_path, TARGET).config_json() == config


def test_a_fresh_drafter_has_the_widths_of_its_settings_the_first_of_inner_dim_by_default() -> None:
    for given, inner, proj, emb in (
        ({}, "16", "16", "16"),
        ({"inner_dim": 12}, "12", "12", "12"),
        ({"inner_dim": "12.6", "proj_dim": "12.12"}, "12.6", "12.12", "12"),
    ):
        options = LstmNet.read_options({"method": "sum_rnn", "n_predict": 3, **given})
        net = LstmNet.fresh(TARGET, options, seed=0)
        assert net.config_json() == config_of(inner, proj, emb)
        assert net.shapes() == declared_shapes(net.config_json())


def test_stacks_may_draft_once() -> None:
    config = config_of("12.6", "12", "12", n_predict=1)
    check_chain(read_net(config), config)
