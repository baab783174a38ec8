"""Loads and writes causal language models as Hugging Face directories."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.models.reading import TEMPLATE_FOLDER
from paceline.tensors import TensorLayout, safetensors_header
from paceline.training.shards import named_tensor

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".index.json")


def load_causal_lm(directory: Path, dtype: torch.dtype) -> Any:
    """The transformers module of a directory, on the CPU. Raises ConfigError if it has no model."""
    from transformers import AutoModelForCausalLM  # takes seconds to import, and only ranks need it

    try:
        return AutoModelForCausalLM.from_pretrained(
            directory,
            local_files_only=True,
            use_safetensors=True,
            dtype=dtype,
            attn_implementation="sdpa",
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no model can be loaded from {directory}: {error}", seen=directory
        ) from error


def write_causal_lm(
    weights: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, Sequence[int]],
    start: Path,
    directory: Path,
) -> None:
    """Writes fp32 weights with the other files of the start model.

    `weights` are in the order of `shapes`; at most one of the tensors is in memory at a time.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in start.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHT_FILES):
            shutil.copyfile(path, directory / path.name)
    templates = start / TEMPLATE_FOLDER
    if templates.is_dir():
        shutil.copytree(templates, directory / TEMPLATE_FOLDER, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    described = json.dumps({**config, "dtype": "float32"}, indent=2)
    (directory / "config.json").write_text(described, encoding="utf-8")
    layouts = [TensorLayout(name, "F32", tuple(shape)) for name, shape in shapes.items()]
    with (directory / "model.safetensors").open("wb") as file:
        file.write(safetensors_header(layouts, {"format": "pt"}))
        for (name, tensor), layout in zip(weights, layouts, strict=True):
            one = named_tensor(name, tensor.contiguous())
            assert one.layout == layout, f"{one.layout} is written in the place of {layout}"
            file.write(one.view)
