"""Loads checkpoints into DecoderWeights: strict names, strict shapes, finite numbers.

Names and shapes are Hugging Face's. Errors are raised before any request is accepted.

A ServedTensor records the sources of a served tensor in a checkpoint. It is the first of two
records for an update in place (Liu et al. 2025, FlashRL). The second is the storages themselves
(in_place.py). A transformation interleaves the heads of a tensor, joins rows of several tensors,
and rounds the result. Each step is defined here once; shapes, loading and updates follow from it.
Strides are contiguous throughout; dtypes are the permitted stored dtypes.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import DataLoss, InvalidInput, WeightsError
from paceline.models import products
from paceline.models.config import ModelConfig
from paceline.models.decoder import DecoderWeights, LayerWeights, Matrix
from paceline.models.profiles import Profile
from paceline.models.quantised import quantised
from paceline.models.rope import interleave
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


@dataclass(frozen=True, slots=True)
class LoadedTensor:
    """A tensor of a checkpoint, before any transformation."""

    name: str
    shape: tuple[int, ...]
    heads: int = 0
    """Heads with halves to interleave along the rows; 0: none."""
    repeated: int = 0
    """Number of rows that repeat this vector; 0: it is served once, unchanged."""

    @property
    def rows(self) -> int:
        """Number of rows of the result."""
        return self.repeated or self.shape[0]

    def turned(self, stored: Tensor) -> Tensor:
        """Its rows as served."""
        found = interleave(stored, self.heads) if self.heads else stored
        return found.expand(self.repeated, -1) if self.repeated else found


@dataclass(frozen=True, slots=True)
class ServedTensor:
    """A tensor that the forward reads, with its sources: rows of its parts, in order."""

    place: str
    """A field of DecoderWeights or, as `layers.<index>.<field>`, of LayerWeights."""
    parts: tuple[LoadedTensor, ...]
    rounded: bool = False
    """Whether a profile rounds it."""

    def unrounded(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Its numbers as stored; a view of the only part where the part is served unchanged."""
        rows = [part.turned(tensors[part.name].detach()) for part in self.parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def built(
        self,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        profile: Profile | None,
    ) -> Matrix:
        """Its numbers in new memory. Raises as `quantised`, with the first part's name."""
        sizes = [part.rows for part in self.parts]
        # A drafter's layer may read wider inputs than its config states.
        first = tensors[self.parts[0].name].shape
        width = first if self.parts[0].repeated else first[1:]
        whole = torch.empty((sum(sizes), *width), dtype=dtype, device=device)
        for part, rows in zip(self.parts, whole.split(sizes), strict=True):
            rows.copy_(part.turned(tensors[part.name].detach()))
        if not self.rounded or profile is None:
            return whole
        try:
            return quantised(whole, profile)
        except WeightsError as error:
            raise error.within(self.parts[0].name) from error


def layer_records(config: ModelConfig, prefix: str, place: str = "") -> Iterator[ServedTensor]:
    """Records of one decoder layer. `prefix` (of names in the checkpoint) and `place` end with a
    dot, unless empty.
    """
    hidden, dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": 0}
    widths = {"q": config.num_heads * dim, "k": config.kv_width // 2, "v": config.kv_width // 2}

    def attention(name: str, *shape: int, turned: int = 0, repeated: int = 0) -> LoadedTensor:
        return LoadedTensor(f"{prefix}self_attn.{name}", shape, turned, repeated)

    def mlp(name: str, *shape: int) -> LoadedTensor:
        return LoadedTensor(f"{prefix}mlp.{name}_proj.weight", shape)

    def fused(kind: str, *width: int) -> tuple[LoadedTensor, ...]:
        return tuple(
            attention(f"{one}_proj.{kind}", widths[one], *width, turned=heads[one]) for one in "qkv"
        )

    yield _norm(f"{place}input_norm", f"{prefix}input_layernorm", hidden)
    yield ServedTensor(f"{place}qkv", fused("weight", hidden), rounded=True)
    if config.qkv_bias:
        yield ServedTensor(f"{place}qkv_bias", fused("bias"))
    if config.qk_norm:
        norms = [
            attention(f"{one}_norm.weight", dim, turned=1, repeated=heads[one]) for one in "qk"
        ]
        yield ServedTensor(f"{place}qk_norm", tuple(norms))
    output = attention("o_proj.weight", hidden, widths["q"])
    yield ServedTensor(f"{place}output", (output,), rounded=True)
    if config.output_bias:
        yield ServedTensor(f"{place}output_bias", (attention("o_proj.bias", hidden),))
    yield _norm(f"{place}post_norm", f"{prefix}post_attention_layernorm", hidden)
    up = (mlp("gate", inner, hidden), mlp("up", inner, hidden))
    yield ServedTensor(f"{place}gate_up", up, rounded=True)
    yield ServedTensor(f"{place}down", (mlp("down", hidden, inner),), rounded=True)


def model_records(config: ModelConfig) -> Iterator[ServedTensor]:
    """All served tensors of a checkpoint; tied heads have only the embedding."""
    table = (config.vocab_size, config.hidden_size)
    yield ServedTensor("embed", (LoadedTensor("model.embed_tokens.weight", table),))
    for index in range(config.num_layers):
        yield from layer_records(config, f"model.layers.{index}.", f"layers.{index}.")
    yield _norm("norm", "model.norm", config.hidden_size)
    if not config.tie_word_embeddings:
        yield ServedTensor("head", (LoadedTensor("lm_head.weight", table),))


def _norm(place: str, name: str, width: int) -> ServedTensor:
    return ServedTensor(place, (LoadedTensor(f"{name}.weight", (width,)),))


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
            message = f"cannot read {path.name}: {error}"
            seen = f"{path}, {size} bytes"
            raise DataLoss(message, seen=seen, allowed="a whole safetensors file") from error
        if twice := sorted(tensors.keys() & part.keys()):
            message = f"tensor {twice[0]} is in two files"
            raise WeightsError(message, seen=path.name, allowed="one file for each tensor")
        tensors |= part

    return tensors


def weight_files(directory: Path) -> list[Path]:
    """The files with a checkpoint's weights; files of an optimiser's state are excluded.

    Raises InvalidInput.
    """
    whole = directory / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(directory.glob("model-*.safetensors"))
    if not files:
        message = "not a checkpoint directory: it has no weights"
        raise InvalidInput(message, seen=directory, allowed="model.safetensors or its shards")
    return files


def model_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor name of a checkpoint, with its shape."""
    return {part.name: part.shape for one in model_records(config) for part in one.parts}


def check_tensors(
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype] | None = None,
    looked_at: Collection[str] | None = None,
    computed_in: torch.dtype | None = None,
) -> None:
    """Raises WeightsError with the name of a wrong tensor.

    Wrong means missing, extra, misshapen, of a wrong dtype, or not finite. `dtypes`: dtypes of
    tensors that are no weights; all other tensors are floats. `looked_at`: tensors to check for
    finite numbers; None: all. `computed_in`: dtype in which numbers must be finite; None: their
    own.
    """
    missing, extra = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing:
        message = f"tensor {missing[0]} is missing{_and_others(missing)}"
        allowed = f"the {len(shapes)} of this model, this one of shape {shapes[missing[0]]}"
        raise WeightsError(message, seen=f"{len(tensors)} tensors", allowed=allowed)

    if extra:
        near = get_close_matches(extra[0], shapes, 2, 0.0)
        message = f"tensor {extra[0]} is not part of this model{_and_others(extra)}"
        seen = f"{len(tensors)} tensors, this one of shape {tuple(tensors[extra[0]].shape)}"
        allowed = f"the {len(shapes)} of this model, such as {', '.join(near)}"
        raise WeightsError(message, seen=seen, allowed=allowed)

    for name, shape in shapes.items():
        _check_tensor(
            name,
            tensors[name],
            shape,
            (dtypes[name],) if dtypes and name in dtypes else STORED_DTYPES,
        )
        if looked_at is None or name in looked_at:
            _check_finite(name, tensors[name], computed_in)


def _and_others(names: Sequence[str]) -> str:
    return f", as are {len(names) - 1} others" if len(names) > 1 else ""


def _check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    if tuple(tensor.shape) != shape:
        message = f"tensor {name} has a wrong shape"
        raise WeightsError(message, seen=tuple(tensor.shape), allowed=shape)
    if tensor.dtype not in dtypes:
        raise WeightsError(f"tensor {name} has a wrong dtype", seen=tensor.dtype, allowed=dtypes)


def _check_finite(name: str, tensor: Tensor, dtype: torch.dtype | None) -> None:
    # Both are NaN if any number is; checking each number would take three copies of the tensor.
    if not all(torch.isfinite(one.to(dtype)) for one in torch.aminmax(tensor)):
        wrong = tensor[~torch.isfinite(tensor.to(dtype))]
        where = f" in {str(dtype).removeprefix('torch.')}" if dtype else ""
        message = f"tensor {name} holds {len(wrong)} numbers that are not finite{where}"
        raise WeightsError(message, seen=float(wrong[0]), allowed="finite")


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
    there = [one for one in layer_records(config, prefix) if one.parts[0].name in tensors]
    return layer_of({one.place: one.built(tensors, dtype, device, None) for one in there})


def layer_of(built: Mapping[str, Matrix], place: str = "") -> LayerWeights:
    """The layer whose fields follow `place` in their names; missing fields are None."""
    names = [one.name for one in fields(LayerWeights)]
    return LayerWeights(**{name: built.get(f"{place}{name}") for name in names})  # type: ignore[arg-type]


def checked_model(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors of a model. Raises WeightsError, see check_tensors."""
    if config.tie_word_embeddings and "lm_head.weight" in tensors:
        # Exporters differ in writing the tied copy, which has no information.
        tensors = {name: one for name, one in tensors.items() if name != "lm_head.weight"}
    check_tensors(tensors, model_shapes(config))
    return tensors


def assembled(
    config: ModelConfig, built: Mapping[str, Matrix], rotation: Tensor, head_hash: str
) -> DecoderWeights:
    """The model from its built tensors, by place."""
    embed, norm, head = built["embed"], built["norm"], built.get("head", built["embed"])
    assert isinstance(embed, Tensor)
    assert isinstance(norm, Tensor)
    assert isinstance(head, Tensor)
    layers = tuple(layer_of(built, f"layers.{index}.") for index in range(config.num_layers))
    products.serve_matrices(
        one if isinstance(one, Tensor) else one.values for one in built.values()
    )
    return DecoderWeights(config, embed, layers, norm, head, rotation, head_hash)


def hash_head(named: Mapping[str, Tensor]) -> str:
    """Hash of the bytes of a model's head as it is stored."""
    head = named.get("lm_head.weight", named["model.embed_tokens.weight"])
    return head_hash(head.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1).data)
