"""EAGLE-3 checkpoints: names of SGLang's loader, strict refusals, the draft vocabulary and the
inner states.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from unit.drafter_trainer.samples import chain_logits
from unit.speculators.eagle3_rows import TARGET, document, rough_net

from paceline.errors import ConfigError, InvalidInput, WeightsError
from paceline.speculators.eagle3 import Eagle3Net
from paceline.speculators.kinds import inner_layers
from paceline.speculators.net import read_drafter
from paceline.speculators.vocabulary import frequent_tokens

SGLANG_NAMES = {
    "fc.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight",
    "midlayer.self_attn.o_proj.weight",
    "midlayer.post_attention_layernorm.weight",
    "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight",
    "midlayer.mlp.down_proj.weight",
    "norm.weight",
    "lm_head.weight",
    "d2t",
    "t2d",
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "options",
    [{}, {"draft_vocab_size": 21, "inner_layers": (1, 3, 7), "norm_before_residual": True}],
)
def test_a_read_checkpoint_predicts_what_the_saved_one_did(
    family: str, options: dict[str, object], tmp_path: Path
) -> None:
    target = replace(TARGET, family=family, qkv_bias=family == "qwen2", qk_norm=family == "qwen3")
    net = rough_net(target, **options)
    net.save(tmp_path)
    again = read_drafter(tmp_path, target)
    assert isinstance(again, Eagle3Net)
    assert again.capture == net.capture
    again.bind(net.embed, net.head)
    row = replace(document(9, 1), layers=f"1,{','.join(map(str, net.inner))},last")
    for one, other in zip(chain_logits(net, row, 3), chain_logits(again, row, 3), strict=True):
        assert torch.equal(one, other)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert raw["model_type"] == "llama"
    assert raw["tie_word_embeddings"] is False
    assert raw["draft_vocab_size"] == len(net.d2t)
    assert raw["max_position_embeddings"] == target.max_position_embeddings
    # Their ids name the layer that a state leaves.
    assert [left + 1 for left in raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"]] == list(
        net.inner
    )


def test_a_file_holds_the_names_and_dtypes_that_sglang_reads(tmp_path: Path) -> None:
    net = rough_net(draft_vocab_size=21)
    net.to(torch.bfloat16).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == SGLANG_NAMES
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert {t.dtype for name, t in tensors.items() if name not in ("d2t", "t2d")} == {
        torch.bfloat16
    }
    token_ids = tensors["d2t"] + torch.arange(21)
    assert token_ids.tolist() == tensors["t2d"].nonzero()[:, 0].tolist() == net.token_ids.tolist()
    assert {name for name, _ in net.named_parameters()} == SGLANG_NAMES - {"d2t", "t2d"}


def test_copies_of_embed_tokens_and_vllms_name_of_the_layer_are_read() -> None:
    net = rough_net()
    tensors = {
        name.replace("midlayer.", "layers.0."): value
        for name, value in net.export_tensors().items()
    }
    again = net.twin()
    again.load_tensors(
        tensors | {"embed_tokens.weight": torch.zeros(TARGET.vocab_size, TARGET.hidden_size)}
    )
    for name, value in net.export_tensors().items():
        assert torch.equal(again.export_tensors()[name], value)


def _without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def _with(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def _moved(place: int, by: int) -> Callable[[Tensor], Tensor]:
    return lambda d2t: d2t + by * (torch.arange(len(d2t)) == place)


BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing weight": (
        _without("midlayer.hidden_norm.weight"),
        r"midlayer\.hidden_norm\.weight is missing",
    ),
    "missing map": (_without("t2d"), "t2d is missing"),
    "extra": (
        lambda tensors: tensors.update({"midlayer.extra": torch.ones(1)}),
        r"midlayer\.extra is not part",
    ),
    "misshapen": (_with("fc.weight", lambda t: t[:, :-1]), r"fc\.weight has a wrong shape"),
    "another head": (
        _with("lm_head.weight", lambda t: t[:-1]),
        r"lm_head\.weight has a wrong shape",
    ),
    "not finite": (_with("norm.weight", lambda t: t / 0), "not finite"),
    "weights as integers": (
        _with("norm.weight", lambda t: t.long()),
        r"norm\.weight has a wrong dtype",
    ),
    "offsets as floats": (_with("d2t", lambda t: t.float()), "d2t has a wrong dtype"),
    "mask as integers": (_with("t2d", lambda t: t.long()), "t2d has a wrong dtype"),
    "beyond the vocabulary": (_with("d2t", _moved(20, 40)), "outside the vocabulary"),
    "below the vocabulary": (_with("d2t", _moved(0, -40)), "outside the vocabulary"),
    "a token twice": (
        _with("d2t", lambda t: torch.cat((t[:1], t[:1] - 1, t[2:]))),
        "not ascending",
    ),
    "another mask": (_with("t2d", lambda t: ~t), "t2d and d2t name other tokens"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_by_the_name_of_the_tensor(case: str, tmp_path: Path) -> None:
    net = rough_net(draft_vocab_size=21)
    net.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change, message = BROKEN[case]
    change(tensors)
    save_file(
        {name: value.contiguous() for name, value in tensors.items()},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(WeightsError, match=message) as refused:
        Eagle3Net.read(tmp_path, TARGET)
    assert str(tmp_path) in refused.value.message


def test_a_network_with_a_broken_map_exports_nothing() -> None:
    net = rough_net(draft_vocab_size=21)
    net.t2d = ~net.t2d
    with pytest.raises(WeightsError, match="t2d"):
        net.export_tensors()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vocab_size", 38, "vocab_size"),
        ("hidden_size", 32, "hidden_size"),
        ("num_hidden_layers", 2, "one layer"),
        ("architectures", ["LlamaForCausalLMEagle"], "no eagle3 drafter"),
        ("draft_vocab_size", None, "draft_vocab_size"),
        ("draft_vocab_size", 38, "draft_vocab_size"),
        ("norm_output", True, "norm_output"),
        ("fc_norm", True, "fc_norm"),
        ("tie_word_embeddings", True, "tie_word_embeddings"),
        ("target_hidden_size", 99, "target_hidden_size"),
        ("eagle_config", {"eagle_aux_hidden_state_layer_ids": [1, 3]}, "layer_ids"),
        ("eagle_config", {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, "layer_ids"),
        ("eagle_config", {"eagle_aux_hidden_state_layer_ids": "1,2,3"}, "layer_ids"),
        ("eagle_config", {"use_aux_hidden_state": False}, "use_aux_hidden_state"),
        ("eagle_config", [1], "eagle_config"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_its_key(
    key: str, value: Any, message: str, tmp_path: Path
) -> None:
    rough_net().save(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {key: value}))
    with pytest.raises(InvalidInput, match=message):
        Eagle3Net.read(tmp_path, TARGET)


def test_a_config_without_layer_ids_means_sglangs_usual_ones(tmp_path: Path) -> None:
    net = rough_net()
    net.save(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["eagle_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert Eagle3Net.read(tmp_path, TARGET).inner == (2, 4, 5)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (4, (1, 2, 3)),
        (5, (1, 2, 3)),
        (6, (2, 3, 4)),
        (7, (2, 3, 4)),
        (8, (2, 4, 5)),
        (28, (2, 14, 25)),
        (32, (2, 16, 29)),
    ],
)
def test_the_usual_inner_states_are_sglangs_or_the_nearest(
    layers: int, expected: tuple[int, ...]
) -> None:
    assert inner_layers(layers) == expected


@pytest.mark.parametrize("chosen", [(1, 2), (0, 1, 2), (1, 2, 8), (3, 2, 1), (2, 2, 3)])
def test_inner_layers_that_are_no_three_layers_of_the_target_are_refused(
    chosen: tuple[int, ...],
) -> None:
    with pytest.raises(ConfigError, match="inner"):
        rough_net(inner_layers=chosen)


def test_a_target_of_three_layers_is_too_shallow() -> None:
    with pytest.raises(ConfigError, match="too shallow") as refused:
        inner_layers(3)
    assert "4" in str(refused.value)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.data())
def test_frequent_tokens_are_the_most_counted_of_lowest_id_in_order(
    counts: list[int], data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, len(counts)))
    expected = sorted(sorted(range(len(counts)), key=lambda token: (-counts[token], token))[:size])
    assert frequent_tokens(torch.tensor(counts), size).tolist() == expected


@pytest.mark.parametrize("size", [0, 6])
def test_a_size_beyond_the_vocabulary_is_refused(size: int) -> None:
    with pytest.raises(InvalidInput, match=f"seen: {size}; allowed: 1 to 5"):
        frequent_tokens(torch.ones(5, dtype=torch.int64), size)


def test_a_network_drafts_everything_until_told_what_is_frequent() -> None:
    net = rough_net()
    assert net.t2d.all()
    assert not net.d2t.any()
    counts = torch.zeros(TARGET.vocab_size, dtype=torch.int64)
    counts[[30, 7, 11]] = torch.tensor([2, 5, 2])
    small = Eagle3Net.fresh(TARGET, net.Options.model_validate({"draft_vocab_size": 5}), 3)
    assert len(small.d2t) == TARGET.vocab_size
    small.choose_tokens(counts)
    assert small.token_ids.tolist() == [0, 1, 7, 11, 30]
    assert small.lm_head.weight.shape == (5, TARGET.hidden_size)
    assert small.twin().shapes() == small.shapes()
    with pytest.raises(InvalidInput, match="once"):
        small.choose_tokens(counts)
