"""Checkpoints into DecoderWeights: strict names, strict shapes, finite numbers. Owns no serving
state.

Names and shapes are those of Hugging Face checkpoints. A wrong one is named before any request is
accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import DataLoss, InvalidInput, WeightsError
from paceline.models.config import ModelConfig, read_config
from paceline.models.decoder import DecoderWeights, LayerWeights, Matrix
from paceline.models.int8 import quantized
from paceline.models.rope import interleave, rotation_table
from paceline.tensors import head_hash

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Serving dtypes by name."""

STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes a checkpoint may be stored in."""


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint directory, dtypes as stored: model.safetensors, or all shards
    model-*.safetensors.

    Raises InvalidInput when there are none, DataLoss when a file is truncated or no safetensors
    file, WeightsError when two files hold the same tensor.
    """
    files = weight_files(directory)
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                part = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            size = path.stat().st_size
            raise DataLoss(
                f"cannot read {path.name}: {error}",
                seen=f"{path}, {size} bytes",
                allowed="a whole safetensors file",
            ) from error
        if twice := sorted(tensors.keys() & part.keys()):
            raise WeightsError(
                f"tensor {twice[0]} is in two files",
                seen=path.name,
                allowed="one file for each tensor",
            )
        tensors |= part

    return tensors


def weight_files(directory: Path) -> list[Path]:
    """The files with a checkpoint's weights; an optimiser's state may lie beside them.

    Raises InvalidInput.
    """
    whole = directory / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(directory.glob("model-*.safetensors"))
    if not files:
        raise InvalidInput(
            "not a checkpoint directory: it has no weights",
            seen=directory,
            allowed="model.safetensors or its shards",
        )
    return files


def layer_shapes(config: ModelConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one decoder layer without its input_layernorm; prefix ends with a dot."""
    hidden, dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
    widths = {
        "q": config.num_heads * dim,
        "k": config.num_kv_heads * dim,
        "v": config.num_kv_heads * dim,
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, width in widths.items():
        shapes[f"{prefix}self_attn.{name}_proj.weight"] = (width, hidden)
        if config.qkv_bias:
            shapes[f"{prefix}self_attn.{name}_proj.bias"] = (width,)

    shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, widths["q"])
    if config.output_bias:
        shapes[f"{prefix}self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (dim,) for name in ("q", "k")}
    shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    shapes |= {f"{prefix}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
    return shapes


def model_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor name of a checkpoint and its shape."""
    shapes = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        shapes[f"{prefix}input_layernorm.weight"] = (config.hidden_size,)
        shapes |= layer_shapes(config, prefix)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def check_tensors(
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Raises WeightsError naming what is missing, extra, misshapen, of a wrong dtype, or not
    finite.

    dtypes: of tensors that are no weights; all others hold floats.
    """
    missing, extra = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing:
        raise WeightsError(
            f"tensor {missing[0]} is missing{_and_others(missing)}",
            seen=f"{len(tensors)} tensors",
            allowed=f"the {len(shapes)} of this model, this one of shape {shapes[missing[0]]}",
        )

    if extra:
        near = get_close_matches(extra[0], shapes, 2, 0.0)
        raise WeightsError(
            f"tensor {extra[0]} is not part of this model{_and_others(extra)}",
            seen=f"{len(tensors)} tensors, this one of shape {tuple(tensors[extra[0]].shape)}",
            allowed=f"the {len(shapes)} of this model, such as {', '.join(near)}",
        )

    for name, shape in shapes.items():
        _check_tensor(
            name,
            tensors[name],
            shape,
            (dtypes[name],) if dtypes and name in dtypes else STORED_DTYPES,
        )


def _and_others(names: Sequence[str]) -> str:
    return f", as are {len(names) - 1} others" if len(names) > 1 else ""


def _check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    if tuple(tensor.shape) != shape:
        raise WeightsError(
            f"tensor {name} has a wrong shape", seen=tuple(tensor.shape), allowed=shape
        )
    if tensor.dtype not in dtypes:
        raise WeightsError(f"tensor {name} has a wrong dtype", seen=tensor.dtype, allowed=dtypes)
    finite = torch.isfinite(tensor)
    if not finite.all():
        wrong = tensor[~finite]
        raise WeightsError(
            f"tensor {name} holds {len(wrong)} numbers that are not finite",
            seen=float(wrong[0]),
            allowed="finite",
        )


def fuse_layer(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    prefix: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    int8: bool = False,
) -> LayerWeights:
    """LayerWeights from checkpoint tensors; input_norm is None when the checkpoint has none under
    the prefix.

    int8: matrices are stored in eight bits (models/int8.py), which raises ConfigError without
    torchao.
    """
    heads = {"q": config.num_heads, "k": config.num_kv_heads}

    def get(name: str) -> Tensor:
        return tensors[prefix + name].detach().to(device, dtype)

    def turned(name: str, kind: str) -> Tensor:
        full = get(f"self_attn.{kind}_proj.{name}")
        return interleave(full, heads[kind]) if kind in heads else full

    def stored(weight: Tensor) -> Matrix:
        return quantized(weight) if int8 else weight

    qk_norm = None
    if config.qk_norm:
        rows = [
            interleave(get(f"self_attn.{kind}_norm.weight"), 1).expand(n, -1)
            for kind, n in heads.items()
        ]
        qk_norm = torch.cat(rows)

    has_norm = f"{prefix}input_layernorm.weight" in tensors
    return LayerWeights(
        input_norm=get("input_layernorm.weight") if has_norm else None,
        qkv=stored(torch.cat([turned("weight", kind) for kind in "qkv"])),
        qkv_bias=torch.cat([turned("bias", kind) for kind in "qkv"]) if config.qkv_bias else None,
        qk_norm=qk_norm,
        output=stored(get("self_attn.o_proj.weight")),
        output_bias=get("self_attn.o_proj.bias") if config.output_bias else None,
        post_norm=get("post_attention_layernorm.weight"),
        gate_up=stored(torch.cat([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")])),
        down=stored(get("mlp.down_proj.weight")),
    )


def build_weights(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    positions: int,
    device: torch.device | None = None,
    int8: bool = False,
) -> DecoderWeights:
    """DecoderWeights beside whatever serves now.

    positions: rows of the rotation table, at least the cache capacity. int8: the layers' matrices
    are stored in eight bits; embedding, norms and head never are. Raises WeightsError (see
    check_tensors), ConfigError without torchao.
    """
    device = device or torch.device("cpu")
    named = dict(tensors)
    if config.tie_word_embeddings:
        # Exporters disagree about writing the tied copy; it carries nothing.
        named.pop("lm_head.weight", None)
    check_tensors(named, model_shapes(config))
    stored_head = named.get("lm_head.weight", named["model.embed_tokens.weight"])
    embed = named["model.embed_tokens.weight"].detach().to(device, dtype)
    tied = config.tie_word_embeddings
    return DecoderWeights(
        config=config,
        embed=embed,
        layers=tuple(
            fuse_layer(config, named, f"model.layers.{index}.", dtype, device, int8=int8)
            for index in range(config.num_layers)
        ),
        norm=named["model.norm.weight"].detach().to(device, dtype),
        head=embed if tied else named["lm_head.weight"].detach().to(device, dtype),
        rotation=rotation_table(config.rope, config.head_dim, positions).to(device),
        head_hash=hash_head(stored_head),
    )


def hash_head(head: Tensor) -> str:
    """Hash of a head's bytes in the dtype it is given in."""
    return head_hash(head.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1).data)


def load_model(
    directory: Path, *, dtype: torch.dtype, positions: int | None = None
) -> DecoderWeights:
    """A checkpoint directory as DecoderWeights.

    Raises InvalidInput, DataLoss or WeightsError saying what is wrong.
    """
    config = read_config(directory)
    return build_weights(
        config,
        read_tensors(directory),
        dtype=dtype,
        positions=positions or config.max_position_embeddings,
    )
