"""MLPSpeculator against its formula in float64, and its checkpoint against the names in vLLM's
loader.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from unit.drafter_trainer.samples import HIDDEN, TARGET, VOCABULARY, chain_logits, sample

from paceline.errors import InvalidInput, WeightsError
from paceline.services.drafter_trainer.rows.sample import pack
from paceline.speculators.mlp import MlpNet
from paceline.speculators.net import read_drafter
from paceline.speculators.recurrent import RecurrentOptions

HEADS = 4
CONFIG = {
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "vocab_size": VOCABULARY,
    "emb_dim": HIDDEN,
    "inner_dim": 12,
    "n_predict": HEADS,
    "top_k_tokens_per_head": [1, 1, 1, 1],
    "n_candidates": HEADS,
    "tie_weights": True,
    "scale_input": True,
}


def rough_net(**options: object) -> MlpNet:
    """A net in which every weight matters."""
    settings = {"n_predict": HEADS, "inner_dim": 12, "tie_weights": True, **options}
    net = MlpNet.fresh(TARGET, RecurrentOptions.model_validate(settings), seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return net


def expected_logits(net: MlpNet, hidden: Tensor, tokens: list[int]) -> list[Tensor]:
    """The paper's recurrence on one position in float64: h_t [H] and the tokens t + 1, t + 2,
    ...
    """
    tensors = {name: tensor.double() for name, tensor in net.export_tensors().items()}
    tied, heads = net.options.tie_weights, net.options.n_predict
    state_weight: float = 0.5 ** (0.5 / heads)
    ratio = math.sqrt((1 - state_weight**2) * (net.width / 2)) / state_weight
    state = hidden.double()
    if net.options.scale_input:
        state = state / (state.square().mean() + 1e-6).sqrt() / math.sqrt(2)
    logits = []
    for i, token in enumerate(tokens):
        own, projection = (0, min(i, 1)) if tied else (i, i)
        x = (
            tensors[f"proj.{projection}.weight"] @ state
            + ratio * tensors[f"emb.{own}.weight"][token]
        )
        x = x / (x.square().mean() + 1e-6).sqrt()
        x = x * tensors[f"ln.{own}.weight"] + tensors[f"ln.{own}.bias"]
        state = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
        logits.append(tensors[f"head.{own}.weight"] @ state)
    return logits


@pytest.mark.parametrize("tie_weights", [False, True])
@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("inner_dim", [0, 12])
def test_the_chain_is_the_papers_recurrence(
    tie_weights: bool, scale_input: bool, inner_dim: int
) -> None:
    net = rough_net(tie_weights=tie_weights, scale_input=scale_input, inner_dim=inner_dim)
    one = sample(14, 0)
    with torch.no_grad():
        chain = chain_logits(net, pack([one], window=512), HEADS)
    for t in range(14 - 2 - HEADS):
        expected = expected_logits(
            net, one.hidden[t], one.token_ids[t + 1 : t + 1 + HEADS].tolist()
        )
        for got, logits in zip(chain, expected, strict=True):
            torch.testing.assert_close(got[t].double(), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tie_weights", [False, True])
def test_fresh_matrices_have_the_spread_of_the_width_and_norms_do_nothing(
    tie_weights: bool,
) -> None:
    net = MlpNet.fresh(TARGET, RecurrentOptions(inner_dim=400, tie_weights=tie_weights), seed=0)
    for name, tensor in net.export_tensors().items():
        if name.startswith("ln."):
            assert torch.equal(tensor, torch.full((400,), float(name.endswith("weight"))))
        else:
            assert float(tensor.std()) == pytest.approx(1 / 20, rel=0.05), name
            assert abs(float(tensor.mean())) < 0.002, name


def test_names_and_shapes_are_those_of_the_loader() -> None:
    assert {name: tuple(tensor.shape) for name, tensor in rough_net().export_tensors().items()} == {
        "emb.0.weight": (23, 12),
        "proj.0.weight": (12, 16),
        "proj.1.weight": (12, 12),
        "ln.0.weight": (12,),
        "ln.0.bias": (12,),
        "head.0.weight": (23, 12),
    }
    untied = rough_net(tie_weights=False, n_predict=2).export_tensors()
    assert {name: tuple(tensor.shape) for name, tensor in untied.items()} == {
        "emb.0.weight": (23, 12),
        "emb.1.weight": (23, 12),
        "proj.0.weight": (12, 16),
        "proj.1.weight": (12, 12),
        "ln.0.weight": (12,),
        "ln.0.bias": (12,),
        "ln.1.weight": (12,),
        "ln.1.bias": (12,),
        "head.0.weight": (23, 12),
        "head.1.weight": (23, 12),
    }


@pytest.mark.parametrize("tie_weights", [False, True])
def test_a_checkpoint_survives_the_round_trip(tie_weights: bool, tmp_path: Path) -> None:
    net = rough_net(tie_weights=tie_weights)
    net.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {
        **CONFIG,
        "tie_weights": tie_weights,
    }
    again, row = read_drafter(tmp_path, TARGET), pack([sample(14, 0)], window=512)
    assert isinstance(again, MlpNet)
    for got, expected in zip(
        chain_logits(again, row, HEADS), chain_logits(net, row, HEADS), strict=True
    ):
        assert torch.equal(got, expected)


def test_tied_tensors_under_all_their_names_and_a_prefix_are_read_if_they_agree() -> None:
    net, again = rough_net(), rough_net().twin()
    stored = net.export_tensors()
    written = {f"proj.{i}.weight": stored[f"proj.{min(i, 1)}.weight"] for i in range(HEADS)}
    for part in ("emb.{}.weight", "ln.{}.weight", "ln.{}.bias", "head.{}.weight"):
        written |= {part.format(i): stored[part.format(0)].clone() for i in range(HEADS)}
    written = {f"speculator.{name}": tensor for name, tensor in written.items()}
    again.load_tensors(written)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in again.export_tensors().items())
    written["speculator.head.3.weight"] = written["speculator.head.3.weight"] + 1
    with pytest.raises(
        WeightsError, match=r"speculator\.head\.3\.weight is tied to head\.0\.weight"
    ):
        again.load_tensors(written)


def test_one_draft_ties_nothing() -> None:
    net = rough_net(n_predict=1)
    assert sorted(net.export_tensors()) == [
        "emb.0.weight",
        "head.0.weight",
        "ln.0.bias",
        "ln.0.weight",
        "proj.0.weight",
    ]
    assert net.config_json()["tie_weights"] is False


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("emb.0.weight", None),
        ("proj.1.weight", torch.zeros(12, 16)),
        ("head.4.weight", torch.zeros(23, 12)),
        ("ln.0.bias", torch.full((12,), torch.nan)),
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
        ("architectures", ["ArcticLSTMSpeculatorPreTrainedModel"]),
        ("vocab_size", 24),
        ("emb_dim", 12),
        ("n_predict", 0),
        ("n_predict", "4"),
        ("inner_dim", -1),
        ("tie_weights", 1),
        ("scale_input", "yes"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_key(
    key: str, value: object, tmp_path: Path
) -> None:
    rough_net().save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, key: value}))
    with pytest.raises(InvalidInput, match=key):
        MlpNet.read(tmp_path, TARGET)


def test_a_width_of_zero_is_the_targets(tmp_path: Path) -> None:
    rough_net(inner_dim=0).save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "inner_dim": 0}))
    assert MlpNet.read(tmp_path, TARGET).width == HIDDEN
