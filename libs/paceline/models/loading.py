"""Loads checkpoints into DecoderWeights: strict names, strict shapes, finite numbers.

Names and shapes are Hugging Face's. Errors are raised before any request is accepted.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import DataLoss, InvalidInput, WeightsError
from paceline.models import products
from paceline.models.config import ModelConfig, read_config
from paceline.models.decoder import DecoderWeights, LayerWeights, Matrix
from paceline.models.profiles import Profile
from paceline.models.records import ServedTensor, input_norm_record, layer_records, model_records
from paceline.models.rope import rotation_table
from paceline.tensors import head_hash

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Serving dtypes by name."""

STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes a checkpoint may be stored in."""

_BUFFERS = (
    *("rotary_emb.inv_freq", "rotary_emb.original_inv_freq"),
    *("rotary_emb.cos_cached", "rotary_emb.sin_cached"),
    *("attn.masked_bias", "attention.masked_bias", "attn.bias", "attention.bias"),
    *("embeddings.position_ids", "model.position_ids"),
)
"""Name suffixes of buffers that older exporters store beside weights; models compute them."""


def is_buffer(name: str) -> bool:
    """Whether a tensor of a checkpoint is a buffer, which readers of weights skip."""
    return name.endswith(_BUFFERS)


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint directory except buffers, in their stored dtypes.

    Reads model.safetensors, or all shards model-*.safetensors. Raises InvalidInput without such
    files, DataLoss for a truncated or invalid file, WeightsError if two files contain the same
    tensor.
    """
    files = weight_files(directory)
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                names = [name for name in opened.keys() if not is_buffer(name)]  # noqa: SIM118
                part = {name: opened.get_tensor(name) for name in names}
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
    """The files with a checkpoint's weights; files of an optimiser's state are excluded.

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


def model_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor name of a checkpoint, with its shape."""
    return {part.name: part.shape for one in model_records(config) for part in one.parts}


def check_tensors(
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype] | None = None,
    looked_at: Collection[str] | None = None,
) -> None:
    """Raises WeightsError with the name of a wrong tensor.

    Wrong means missing, extra, misshapen, of a wrong dtype, or not finite. `dtypes`: dtypes of
    tensors that are no weights; all other tensors are floats. `looked_at`: tensors to check for
    finite numbers; None: all.
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
        if looked_at is None or name in looked_at:
            _check_finite(name, tensors[name])


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


def _check_finite(name: str, tensor: Tensor) -> None:
    # Both are NaN if any number is; checking each number would take three copies of the tensor.
    if not all(torch.isfinite(one) for one in torch.aminmax(tensor)):
        wrong = tensor[~torch.isfinite(tensor)]
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
) -> LayerWeights:
    """LayerWeights from checkpoint tensors; input_norm is None if the checkpoint has none under the
    prefix.
    """
    records = list(layer_records(config, prefix))
    if f"{prefix}input_layernorm.weight" in tensors:
        records.append(input_norm_record(config, prefix))
    return layer_of({one.place: one.built(tensors, dtype, device, None) for one in records})


def layer_of(built: Mapping[str, Matrix]) -> LayerWeights:
    """The layer with these fields; missing fields are None."""
    return LayerWeights(**{one.name: built.get(one.name) for one in fields(LayerWeights)})  # type: ignore[arg-type]


def build_weights(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    positions: int,
    device: torch.device | None = None,
    profile: Profile | None = None,
) -> DecoderWeights:
    """Builds DecoderWeights in new memory, beside the serving weights. The largest tensor is
    temporarily in memory twice.

    `positions`: rows of the rotation table, at least the cache capacity. `profile`: number format
    of the layers' matrices (models/profiles.py). Embedding, norms and head are never rounded.
    Raises WeightsError (see check_tensors) or as `quantised`.
    """
    device = device or torch.device("cpu")
    named = checked_model(config, tensors)
    built = {
        one.place: built_of(one, named, dtype, device, profile) for one in model_records(config)
    }
    rotation = rotation_table(config.rope, config.head_dim, positions).to(device)
    return assembled(config, built, rotation, hash_head(stored_head(named)))


def checked_model(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors of a model. Raises WeightsError, see check_tensors."""
    if config.tie_word_embeddings and "lm_head.weight" in tensors:
        # Exporters differ in writing the tied copy, which has no information.
        tensors = {name: one for name, one in tensors.items() if name != "lm_head.weight"}
    check_tensors(tensors, model_shapes(config))
    return tensors


def stored_head(named: Mapping[str, Tensor]) -> Tensor:
    """The head of a checked model as it is stored."""
    return named.get("lm_head.weight", named["model.embed_tokens.weight"])


def built_of(
    record: ServedTensor,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    profile: Profile | None,
) -> Matrix:
    """The served tensor of a record; a WeightsError names the tensor."""
    try:
        return record.built(tensors, dtype, device, profile)
    except WeightsError as error:
        raise error.within(record.parts[0].name) from error


def assembled(
    config: ModelConfig, built: Mapping[str, Matrix], rotation: Tensor, head_hash: str
) -> DecoderWeights:
    """The model from its built tensors, by place."""
    embed, head = built["embed"], built.get("head", built["embed"])
    norm = built["norm"]
    assert isinstance(embed, Tensor)
    assert isinstance(head, Tensor)
    assert isinstance(norm, Tensor)
    layers = []
    for index in range(config.num_layers):
        place = f"layers.{index}."
        own = {
            name.removeprefix(place): one for name, one in built.items() if name.startswith(place)
        }
        layers.append(layer_of(own))
    products.serve_matrices(one for one in built.values() if isinstance(one, Tensor))
    return DecoderWeights(
        config=config,
        embed=embed,
        layers=tuple(layers),
        norm=norm,
        head=head,
        rotation=rotation,
        head_hash=head_hash,
    )


def hash_head(head: Tensor) -> str:
    """Hash of a head's bytes in its present dtype."""
    return head_hash(head.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1).data)


def load_model(
    directory: Path, *, dtype: torch.dtype, positions: int | None = None
) -> DecoderWeights:
    """A checkpoint directory as DecoderWeights.

    Raises InvalidInput, DataLoss or WeightsError.
    """
    config = read_config(directory)
    return build_weights(
        config,
        read_tensors(directory),
        dtype=dtype,
        positions=positions or config.max_position_embeddings,
    )
