"""Turns a drafter's config.json and tensors into those that other engines load.

A format is an engine. What each one silently gets wrong is settled here: SGLang's EAGLE has a bias
behind fc that it draws at random when the checkpoint has none, vLLM's has no such bias at all, and
both skip names they do not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from paceline.errors import InvalidInput, WeightsError
from paceline.models.config import ModelConfig, architecture
from paceline.models.loading import check_tensors
from paceline.speculators.eagle.checkpoint import ARCHITECTURES as EAGLE
from paceline.speculators.eagle.checkpoint import drafter_config, eagle_shapes, strip_shared
from paceline.speculators.eagle3.checkpoint import ARCHITECTURE as EAGLE3
from paceline.speculators.net import check_fit
from paceline.speculators.recurrent.lstm import ARCHITECTURE as LSTM
from paceline.speculators.recurrent.lstm import GATES
from paceline.speculators.recurrent.mlp import ARCHITECTURE as MLP

Shapes = dict[str, tuple[int, ...]]
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


class Format(StrEnum):
    """Who reads the exported directory."""

    SGLANG = "sglang"
    VLLM = "vllm"
    ARCTIC = "arctic"
    NATIVE = "native"


@dataclass(frozen=True, slots=True)
class Exported:
    """A checkpoint of one format, in memory."""

    config: dict[str, Any]
    """config.json."""
    tensors: dict[str, Tensor]
    shapes: Shapes
    """Of the tensors with weights: every name the engine loads."""
    integers: Shapes = field(default_factory=dict)
    """Of tensors of ids and masks."""
    file: str = "model.safetensors"

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises WeightsError when `tensors` are not exactly what the engine loads."""
        check_tensors({n: t for n, t in tensors.items() if n not in self.integers}, self.shapes)
        for name, shape in self.integers.items():
            if name not in tensors or tuple(tensors[name].shape) != shape:
                seen = tuple(tensors[name].shape) if name in tensors else "(none)"
                raise WeightsError(f"tensor {name} does not fit", seen=seen, allowed=shape)


def export_drafter(
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: ModelConfig,
    form: Format,
    dtype: torch.dtype | None = None,
) -> Exported:
    """A native checkpoint (config.json and tensors) as `form` wants it; dtype None keeps the dtypes
    of its weights.

    max_position_embeddings is the target's: engines cut RoPE off there. Raises InvalidInput for a
    format this kind does not have, naming those it has, and for a config.json that does not fit the
    target; WeightsError for names, shapes and numbers that are not those of the kind.
    """
    name = architecture(raw)
    forms = formats_of(name)
    if form is not Format.NATIVE and form not in forms:
        raise InvalidInput(
            f"no engine of this name loads {name}",
            seen=form.value,
            allowed=[f.value for f in forms],
        )
    check_fit(raw, {"vocab_size": target.vocab_size})
    common = {**raw, "max_position_embeddings": target.max_position_embeddings}
    if form is Format.NATIVE:
        floats = {n: tuple(t.shape) for n, t in tensors.items() if t.is_floating_point()}
        integers = {n: tuple(t.shape) for n, t in tensors.items() if n not in floats}
        exported = Exported(common, dict(tensors), floats, integers)
    else:
        exported = FORMATS[name][form](common, tensors, target)
    exported.check(exported.tensors)
    return _cast(exported, dtype)


def formats_of(name: str) -> list[Format]:
    """Formats of an architecture; any kind has the native one."""
    return [*FORMATS.get(name, {}), Format.NATIVE]


def _cast(exported: Exported, dtype: torch.dtype | None) -> Exported:
    # Tied tensors stay one storage, which torch.save writes once.
    turned: dict[int, Tensor] = {}
    tensors = {}
    for name, tensor in exported.tensors.items():
        if id(tensor) not in turned:
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            turned[id(tensor)] = tensor.detach().to(wanted).contiguous()
        tensors[name] = turned[id(tensor)]
    stored = next((t.dtype for t in tensors.values() if t.is_floating_point()), torch.float32)
    config = {**exported.config, "torch_dtype": str(stored).removeprefix("torch.")}
    return Exported(config, tensors, exported.shapes, exported.integers, exported.file)


def _eagle_sglang(
    raw: dict[str, Any], tensors: Mapping[str, Tensor], target: ModelConfig
) -> Exported:
    own = strip_shared(tensors)
    check_tensors(own, eagle_shapes(drafter_config(raw, target), bool(raw.get("fc_bias"))))
    own.setdefault("fc.bias", torch.zeros(target.hidden_size, dtype=own["fc.weight"].dtype))
    return Exported({**raw, "fc_bias": True}, own, eagle_shapes(drafter_config(raw, target), True))


def _eagle_vllm(
    raw: dict[str, Any], tensors: Mapping[str, Tensor], target: ModelConfig
) -> Exported:
    own = strip_shared(tensors)
    check_tensors(own, eagle_shapes(drafter_config(raw, target), bool(raw.get("fc_bias"))))
    if bool(own.pop("fc.bias", torch.zeros(1)).any()):
        raise InvalidInput(
            "vLLM's EAGLE has no bias behind fc",
            seen="fc.bias",
            allowed="a drafter trained with fc_bias=false",
        )
    config = {**raw, "fc_bias": False, "architectures": ["EagleLlamaForCausalLM"]}
    return Exported(config, own, eagle_shapes(drafter_config(raw, target), False))


def _eagle3_sglang(
    raw: dict[str, Any], tensors: Mapping[str, Tensor], target: ModelConfig
) -> Exported:
    if raw.get("norm_before_residual"):
        raise InvalidInput(
            "SGLang's EAGLE-3 has the state before its norm as residual",
            seen="norm_before_residual=true",
            allowed="a drafter trained with norm_before_residual=false",
        )
    return _eagle3(raw, tensors, target)


def _eagle3(raw: dict[str, Any], tensors: Mapping[str, Tensor], target: ModelConfig) -> Exported:
    own = {n: t for n, t in tensors.items() if n != "embed_tokens.weight"}
    shapes = _eagle3_shapes(raw, target)
    draft = _size(raw, "draft_vocab_size")
    integers: Shapes = {"d2t": (draft,), "t2d": (target.vocab_size,)}
    exported = Exported({**raw, "tie_word_embeddings": False}, own, shapes, integers)
    exported.check(own)
    chosen = own["d2t"].long() + torch.arange(draft)
    listed = torch.zeros(target.vocab_size, dtype=torch.bool)
    if chosen.min() < 0 or chosen.max() >= target.vocab_size or bool((chosen.diff() <= 0).any()):
        raise WeightsError(
            "d2t does not name ascending tokens of the target",
            allowed=f"0 to {target.vocab_size - 1}",
        )
    listed[chosen] = True
    if not torch.equal(listed, own["t2d"].bool()):
        raise WeightsError(
            "d2t and t2d name different tokens", seen=int(own["t2d"].bool().sum()), allowed=draft
        )
    exported.tensors.update(d2t=own["d2t"].long(), t2d=listed)
    return exported


def _eagle3_vllm(
    raw: dict[str, Any], tensors: Mapping[str, Tensor], target: ModelConfig
) -> Exported:
    exported = _eagle3(raw, tensors, target)
    # SGLang numbers a layer by its output, vLLM (as CaptureSpec) by what enters it.
    if layers := (raw.get("eagle_config") or {}).get(AUX_LAYERS):
        exported.config[AUX_LAYERS] = [layer + 1 for layer in layers]
    return exported


def _eagle3_shapes(raw: Mapping[str, Any], target: ModelConfig) -> Shapes:
    check_fit(raw, {"num_hidden_layers": 1})
    hidden, inner, heads = (
        _size(raw, k) for k in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    dim, keys = raw.get("head_dim") or hidden // heads, raw.get("num_key_value_heads") or heads
    layers = len((raw.get("eagle_config") or {}).get(AUX_LAYERS) or (0, 0, 0))
    middle = "midlayer."
    shapes: Shapes = {"fc.weight": (hidden, layers * target.hidden_size), "norm.weight": (hidden,)}
    shapes["lm_head.weight"] = (_size(raw, "draft_vocab_size"), hidden)
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        shapes[f"{middle}{norm}.weight"] = (hidden,)
    for name, count in (("q", heads), ("k", keys), ("v", keys)):
        shapes[f"{middle}self_attn.{name}_proj.weight"] = (count * dim, 2 * hidden)
    shapes[f"{middle}self_attn.o_proj.weight"] = (hidden, heads * dim)
    shapes |= {f"{middle}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    shapes[f"{middle}mlp.down_proj.weight"] = (hidden, inner)
    return shapes


def _mlp_vllm(raw: dict[str, Any], tensors: Mapping[str, Tensor], target: ModelConfig) -> Exported:
    check_fit(raw, {"emb_dim": target.hidden_size})
    count, width, vocab = (
        _size(raw, "n_predict"),
        raw.get("inner_dim") or target.hidden_size,
        target.vocab_size,
    )
    tied = bool(raw.get("tie_weights"))
    shapes: Shapes = {}
    for i in range(1 if tied else count):
        shapes |= {f"emb.{i}.weight": (vocab, width), f"head.{i}.weight": (vocab, width)}
        shapes |= {f"ln.{i}.weight": (width,), f"ln.{i}.bias": (width,)}
    for i in range(min(count, 2) if tied else count):
        shapes[f"proj.{i}.weight"] = (width, target.hidden_size if i == 0 else width)
    config = raw | _speculator_keys(MLP, raw, count)
    own = _without_copies(
        tensors, shapes, lambda name: _first(name, 1 if name.startswith("proj.") else 0)
    )
    return Exported({"scale_input": False, "tie_weights": False, **config}, own, shapes)


def _lstm_arctic(
    raw: dict[str, Any], tensors: Mapping[str, Tensor], target: ModelConfig
) -> Exported:
    fixed = {"method": "sum_lstm", "tie_weights": True, "tie_lstm_embs": True}
    check_fit(raw, fixed | {"input_hidden_dim": target.hidden_size})
    count, vocab = _size(raw, "n_predict"), target.vocab_size
    inner, proj, emb = (_width(raw, key) for key in ("inner_dim", "proj_dim", "emb_dim"))
    shapes: Shapes = {"forget_emb.0.weight": (vocab, emb), "head.0.weight": (vocab, inner)}
    for gate in GATES:
        shapes |= {
            f"{gate}_proj.0.weight": (proj, target.hidden_size),
            f"{gate}_proj.1.weight": (proj, inner),
        }
    for norm in ("cell_ln", "state_ln"):
        shapes |= {f"{norm}.0.weight": (inner,), f"{norm}.0.bias": (inner,)}
    unique = _without_copies(tensors, shapes, _lstm_owner)
    check_tensors(unique, shapes)
    copies = {f"{gate}_emb.0.weight": "forget_emb.0.weight" for gate in GATES}
    copies |= {f"head.{i}.weight": "head.0.weight" for i in range(count)}
    own = unique | {name: unique[source] for name, source in copies.items()}
    config = {
        "base_model_name_or_path": "",
        "scale_input": False,
        **raw,
        **_speculator_keys(LSTM, raw, count),
    }
    config |= {"inner_dim": str(inner), "proj_dim": str(proj), "emb_dim": str(emb)}
    shapes |= {name: shapes[source] for name, source in copies.items()}
    return Exported(config, own, shapes, file="pytorch_model.bin")


def _speculator_keys(name: str, raw: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Keys that both speculators of model_type mlp_speculator have; engines take the one most
    likely draft per head.
    """
    return {
        "architectures": [name],
        "model_type": "mlp_speculator",
        "n_predict": count,
        "n_candidates": raw.get("n_candidates", count),
        "top_k_tokens_per_head": [1] * count,
    }


def _without_copies(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, object], owner: Callable[[str], str]
) -> dict[str, Tensor]:
    """Tensors without the prefix and the tied copies that some writers add.

    Raises WeightsError when a copy is none.
    """
    own = {name.removeprefix("speculator."): tensor for name, tensor in tensors.items()}
    for name in sorted(own.keys() - shapes.keys()):
        source = owner(name)
        if source == name or source not in own:
            continue  # check_tensors names it
        if not torch.equal(own[name], own[source]):
            raise WeightsError(
                f"tensor {name} is tied to {source} but differs from it", seen=name, allowed=source
            )
        del own[name]
    return own


def _first(name: str, highest: int) -> str:
    """The name with its first number cut to `highest`: emb.3.weight -> emb.0.weight."""
    kind, number, *rest = name.split(".")
    return ".".join((kind, str(min(int(number), highest)), *rest)) if number.isdigit() else name


def _lstm_owner(name: str) -> str:
    kind = name.split(".")[0]
    return (
        "forget_emb.0.weight"
        if kind.endswith("_emb")
        else _first(name, 0)
        if kind == "head"
        else name
    )


def _width(raw: Mapping[str, Any], key: str) -> int:
    """A width that Arctic writes as text; stacks of layers ("4096.2048") belong to another
    method.
    """
    text = str(raw.get(key, ""))
    if not text.isdigit():
        raise InvalidInput(
            f"{key} of the drafter is no width", seen=raw.get(key, "(none)"), allowed="one number"
        )
    return int(text)


def _size(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if type(value) is not int or value < 1:
        raise InvalidInput(
            f"{key} of the drafter must be a positive integer",
            seen=value or "(none)",
            allowed=">= 1",
        )
    return value


Mapper = Callable[[dict[str, Any], Mapping[str, Tensor], ModelConfig], Exported]

FORMATS: dict[str, dict[Format, Mapper]] = {
    # Stock SGLang has EAGLE modules of these two families, vLLM of Llama alone.
    EAGLE["llama"]: {Format.SGLANG: _eagle_sglang, Format.VLLM: _eagle_vllm},
    EAGLE["qwen2"]: {Format.SGLANG: _eagle_sglang},
    EAGLE3: {Format.SGLANG: _eagle3_sglang, Format.VLLM: _eagle3_vllm},
    MLP: {Format.VLLM: _mlp_vllm},
    LSTM: {Format.ARCTIC: _lstm_arctic},
}
"""Architecture in a native config.json -> what can be written besides it. A new kind is one line.
"""
