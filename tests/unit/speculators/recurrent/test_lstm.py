"""ArcticLSTMSpeculator against its formula in float64, and its checkpoint against the names in
Arctic's loader.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from unit.drafter_trainer.samples import HIDDEN, TARGET, VOCABULARY, chain_logits, sample
from unit.speculators.recurrent.arctic_method import Published

from paceline.errors import ConfigError, InvalidInput, WeightsError
from paceline.services.drafter_trainer.rows.sample import pack
from paceline.speculators.lstm import LstmNet, LstmOptions
from paceline.speculators.net import read_drafter

HEADS = 4
CONFIG = {
    "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "base_model_name_or_path": "",
    "vocab_size": VOCABULARY,
    "input_hidden_dim": HIDDEN,
    "inner_dim": "12",
    "proj_dim": "12",
    "emb_dim": "12",
    "n_predict": HEADS,
    "top_k_tokens_per_head": [1, 1, 1, 1],
    "n_candidates": HEADS,
    "method": "sum_lstm",
    "tie_weights": True,
    "tie_lstm_embs": True,
    "scale_input": True,
    "torch_dtype": "bfloat16",
}


def rough_net(**options: object) -> LstmNet:
    """A net in which every weight matters."""
    settings = {"n_predict": HEADS, "inner_dim": 12, **options}
    net = LstmNet.fresh(TARGET, LstmOptions.model_validate(settings), seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return net


@pytest.mark.parametrize("tie_lstm_embs", [False, True])
@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("inner_dim", [0, 12])
def test_the_chain_is_the_gated_cell_with_gelu(
    tie_lstm_embs: bool, scale_input: bool, inner_dim: int
) -> None:
    net = rough_net(tie_lstm_embs=tie_lstm_embs, scale_input=scale_input, inner_dim=inner_dim)
    one = sample(14, 0)
    published = Published(net.config_json(), net.export_tensors())
    with torch.no_grad():
        chain = chain_logits(net, pack([one], window=512), HEADS)
    for t in range(14 - 2 - HEADS):
        expected = published.logits(one.hidden[t], one.token_ids[t + 1 : t + 1 + HEADS].tolist())
        for got, logits in zip(chain, expected, strict=True):
            torch.testing.assert_close(got[t].double(), logits, atol=1e-4, rtol=1e-4)


def test_fresh_matrices_have_the_spread_of_their_smaller_side_and_norms_do_nothing() -> None:
    net = LstmNet.fresh(TARGET, LstmOptions(inner_dim=400), seed=0)
    for name, tensor in net.export_tensors().items():
        if "_ln." in name:
            assert torch.equal(tensor, torch.full((400,), float(name.endswith("weight"))))
        else:
            assert float(tensor.std()) == pytest.approx(min(tensor.shape) ** -0.5, rel=0.05), name


def test_names_and_shapes_are_those_of_the_loader() -> None:
    shared = {
        "forget_emb.0.weight": (23, 12),
        "forget_proj.0.weight": (12, 16),
        "forget_proj.1.weight": (12, 12),
        "input_proj.0.weight": (12, 16),
        "input_proj.1.weight": (12, 12),
        "output_proj.0.weight": (12, 16),
        "output_proj.1.weight": (12, 12),
        "cell_proj.0.weight": (12, 16),
        "cell_proj.1.weight": (12, 12),
        "cell_ln.0.weight": (12,),
        "cell_ln.0.bias": (12,),
        "state_ln.0.weight": (12,),
        "state_ln.0.bias": (12,),
        "head.0.weight": (23, 12),
    }
    assert {
        name: tuple(tensor.shape) for name, tensor in rough_net().export_tensors().items()
    } == shared
    apart = rough_net(tie_lstm_embs=False).export_tensors()
    assert {name: tuple(tensor.shape) for name, tensor in apart.items()} == {
        **shared,
        "input_emb.0.weight": (23, 12),
        "output_emb.0.weight": (23, 12),
        "cell_emb.0.weight": (23, 12),
    }


@pytest.mark.parametrize("tie_lstm_embs", [False, True])
def test_a_checkpoint_survives_the_round_trip(tie_lstm_embs: bool, tmp_path: Path) -> None:
    net = rough_net(tie_lstm_embs=tie_lstm_embs)
    net.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {
        **CONFIG,
        "tie_lstm_embs": tie_lstm_embs,
    }
    again, row = read_drafter(tmp_path, TARGET), pack([sample(14, 0)], window=512)
    assert isinstance(again, LstmNet)
    for got, expected in zip(
        chain_logits(again, row, HEADS), chain_logits(net, row, HEADS), strict=True
    ):
        assert torch.equal(got, expected)


def test_tied_tensors_under_all_their_names_are_read_if_they_agree() -> None:
    net, again = rough_net(), rough_net().twin()
    stored = net.export_tensors()
    written = stored | {f"head.{i}.weight": stored["head.0.weight"] for i in range(HEADS)}
    written |= {
        f"{gate}_emb.0.weight": stored["forget_emb.0.weight"].clone()
        for gate in ("input", "cell", "output")
    }
    again.load_tensors({f"speculator.{name}": tensor for name, tensor in written.items()})
    assert all(torch.equal(tensor, stored[name]) for name, tensor in again.export_tensors().items())
    with pytest.raises(WeightsError, match=r"cell_emb\.0\.weight is tied to forget_emb"):
        again.load_tensors(written | {"cell_emb.0.weight": stored["forget_emb.0.weight"].double()})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("input_proj.1.weight", None),
        ("cell_proj.0.weight", torch.zeros(12, 12)),
        ("head.4.weight", torch.zeros(23, 12)),
        ("state_ln.0.weight", torch.full((12,), torch.inf)),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(name: str, change: Tensor | None) -> None:
    net, tensors = rough_net(), rough_net().export_tensors()
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change
    with pytest.raises(WeightsError, match=name):
        net.load_tensors(tensors)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["MLPSpeculatorPreTrainedModel"]),
        ("vocab_size", 24),
        ("input_hidden_dim", 12),
        ("n_predict", 1),
        ("method", "sum_gru"),
        ("method", None),
        ("tie_weights", False),
        ("tie_lstm_embs", "yes"),
        ("inner_dim", "12.24"),
        ("inner_dim", ""),
        ("inner_dim", "12."),
        ("inner_dim", "0.12"),
        ("inner_dim", None),
        ("proj_dim", 12.12),
        ("emb_dim", True),
        ("proj_dim", "24"),
        ("emb_dim", 0),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_key(
    key: str, value: object, tmp_path: Path
) -> None:
    rough_net().save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, key: value}))
    with pytest.raises(InvalidInput, match=key):
        LstmNet.read(tmp_path, TARGET)


def test_widths_as_numbers_are_read_as_well(tmp_path: Path) -> None:
    rough_net().save(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({**CONFIG, "inner_dim": 12, "proj_dim": 12, "emb_dim": 12})
    )
    assert LstmNet.read(tmp_path, TARGET).width == 12


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_predict", 1),  # would leave weights untrained
        ("tie_weights", False),
        ("method", "sum_gru"),
        ("inner_dim", -1),
        ("proj_dim", 12),
    ],
)
def test_settings_that_no_lstm_has_are_refused_by_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        LstmNet.read_options({key: value})
