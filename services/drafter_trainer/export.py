"""Writes a trained drafter as another engine's checkpoint: `paceline drafter export`.

A format is an engine. Silent errors of engines are avoided here. SGLang's EAGLE has a bias after
fc, drawn at random if the checkpoint has none. vLLM's has no such bias. Both skip unknown names.
The written files are read back and compared name by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import ConfigError, InvalidInput, PacelineError, WeightsError
from paceline.models.config import ModelConfig, architecture, read_config, read_config_json
from paceline.models.loading import DTYPES, read_tensors
from paceline.speculators import dflash, eagle, eagle3, lstm, mlp
from paceline.speculators.dflash import DflashNet
from paceline.speculators.eagle import EagleNet
from paceline.speculators.eagle3 import Eagle3Net
from paceline.speculators.kinds import SPECULATORS, find_kind, kind_of_checkpoint
from paceline.speculators.net import DraftNet, net_of
from paceline.speculators.recurrent import RecurrentNet


class Format(StrEnum):
    """The engine that reads the exported directory."""

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
    file: str = "model.safetensors"


def export_drafter(
    net: DraftNet,
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: ModelConfig,
    form: Format,
    dtype: torch.dtype | None = None,
) -> Exported:
    """Converts a native checkpoint to `form`; dtype None keeps the dtypes of its weights.

    `net` is DraftNet.read's result for the checkpoint; its config.json and tensors are given as
    stored. max_position_embeddings is the target's, since engines cut RoPE off there. Raises
    InvalidInput for a format that this kind lacks, naming the available formats.
    """
    name = architecture(raw)
    mappers = FORMATS.get(name, {})
    config = {**raw, "max_position_embeddings": target.max_position_embeddings}
    if form is Format.NATIVE:
        exported = Exported(config, dict(tensors))
    elif form in mappers:
        exported = mappers[form](net, config, net.own_tensors(tensors))
    else:
        raise InvalidInput(
            f"no engine of this name loads {name}",
            seen=form.value,
            allowed=[one.value for one in (*mappers, Format.NATIVE)],
        )

    return _cast(exported, dtype)


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
    return replace(exported, config=config, tensors=tensors)


def _eagle_sglang(net: EagleNet, config: dict[str, Any], own: dict[str, Tensor]) -> Exported:
    own.setdefault("fc.bias", own["fc.weight"].new_zeros(net.config.hidden_size))
    return Exported({**config, "fc_bias": True}, own)


def _eagle_vllm(net: EagleNet, config: dict[str, Any], own: dict[str, Tensor]) -> Exported:
    if bool(own.pop("fc.bias", torch.zeros(1)).any()):
        raise InvalidInput(
            "vLLM's EAGLE has no bias behind fc",
            seen="fc.bias",
            allowed="a drafter trained with fc_bias=false",
        )
    return Exported({**config, "fc_bias": False, "architectures": ["EagleLlamaForCausalLM"]}, own)


def _eagle3_sglang(net: Eagle3Net, config: dict[str, Any], own: dict[str, Tensor]) -> Exported:
    if net.options.norm_before_residual:
        raise InvalidInput(
            "SGLang's EAGLE-3 has the state before its norm as residual",
            seen="norm_before_residual=true",
            allowed="a drafter trained with norm_before_residual=false",
        )
    return Exported({**config, "tie_word_embeddings": False}, own)


def _eagle3_vllm(net: Eagle3Net, config: dict[str, Any], own: dict[str, Tensor]) -> Exported:
    # SGLang numbers a layer by its output; vLLM and CaptureSpec by its input.
    layers = {"eagle_aux_hidden_state_layer_ids": list(net.inner)}
    return Exported({**config, **layers, "tie_word_embeddings": False}, own)


def _dflash_sglang(net: DflashNet, config: dict[str, Any], own: dict[str, Tensor]) -> Exported:
    # The source may have the keys of dflash_config at its top, or its tensors under "model.".
    return Exported({**config, **net.config_json()}, own)


def _mlp_vllm(net: RecurrentNet, config: dict[str, Any], own: dict[str, Tensor]) -> Exported:
    return Exported({**config, **net.config_json()}, own)


def _lstm_arctic(net: RecurrentNet, config: dict[str, Any], own: dict[str, Tensor]) -> Exported:
    config = {**config, **net.config_json()}
    if config["method"] == "sum_lstm" and not config["tie_lstm_embs"]:
        raise InvalidInput(
            "Arctic's LSTM has one embedding for all gates",
            seen="tie_lstm_embs=false",
            allowed="a drafter trained with tie_lstm_embs=true",
        )
    copies = {name: own[source] for name, source in net.aliases().items()}
    return Exported(config, own | copies, file="pytorch_model.bin")


Mapper = Callable[[Any, dict[str, Any], dict[str, Tensor]], Exported]
"""(network, config.json, tensors under the network's names) -> the engine's checkpoint."""

FORMATS: dict[str, dict[Format, Mapper]] = {
    # Stock SGLang has EAGLE modules for these two families, vLLM for Llama only.
    eagle.ARCHITECTURES["llama"]: {Format.SGLANG: _eagle_sglang, Format.VLLM: _eagle_vllm},
    eagle.ARCHITECTURES["qwen2"]: {Format.SGLANG: _eagle_sglang},
    eagle3.ARCHITECTURE: {Format.SGLANG: _eagle3_sglang, Format.VLLM: _eagle3_vllm},
    dflash.ARCHITECTURE: {Format.SGLANG: _dflash_sglang},
    mlp.ARCHITECTURE: {Format.VLLM: _mlp_vllm},
    lstm.ARCHITECTURE: {Format.ARCTIC: _lstm_arctic},
}
"""Architecture in a native config.json -> its further formats. A new kind is one line."""


HELP = """Write a trained drafter as another engine's checkpoint.

sglang: EAGLE of Llama and Qwen2 (--speculative-algorithm EAGLE), EAGLE-3 (EAGLE3), DFlash (DFLASH).

vllm: EAGLE of Llama (method eagle; no bias behind fc), EAGLE-3 (eagle3), MLP speculator
(mlp_speculator).

arctic: LSTM speculator, for Snowflake's ArcticInference plugin of vLLM (method
arctic).

native: every kind, for `paceline serve gateway --drafter DIR` and `paceline drafter train --from
DIR`.
"""


class Dtype(StrEnum):
    """Dtypes of exported weights."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help=HELP)
def export(
    source: Annotated[
        Path, typer.Option("--from", help="drafter: config.json and model.safetensors", exists=True)
    ],
    model: Annotated[
        Path, typer.Option(help="checkpoint directory of the target it drafts for", exists=True)
    ],
    out: Annotated[Path, typer.Option(help="directory to write; must be new or empty")],
    form: Annotated[Format, typer.Option("--format", help="who is to load it")] = Format.NATIVE,
    dtype: Annotated[
        Dtype | None, typer.Option(help="dtype of the weights; default: as stored")
    ] = None,
    speculator: Annotated[
        str | None, typer.Option(help="package.module:KIND of a speculator of your own")
    ] = None,
) -> None:
    """See HELP."""
    try:
        export_checkpoint(source, model, out, form, DTYPES[dtype] if dtype else None, speculator)
    except PacelineError as error:
        typer.echo(f"paceline drafter export: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"{out}: loads in {form}, read back and equal", err=True)


def export_checkpoint(
    source: Path,
    model: Path,
    out: Path,
    form: Format,
    dtype: torch.dtype | None = None,
    speculator: str | None = None,
) -> Exported:
    """Reads the drafter `source` of the target `model`, writes it into `out` and reads it back.
    Raises InvalidInput, WeightsError or DataLoss for an unsuitable drafter, ConfigError when `out`
    is not empty.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigError(
            "the output directory is not empty", seen=out, allowed="a new or empty directory"
        )

    target, raw, tensors = read_config(model), read_config_json(source), read_tensors(source)
    kinds = [find_kind(speculator)] if speculator else SPECULATORS.values()
    kind = net_of(kind_of_checkpoint(source, kinds))
    # Its network reads it whole first, which is stricter than any loader.
    exported = export_drafter(kind.read(source, target), raw, tensors, target, form, dtype)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(exported.config, indent=2) + "\n", encoding="utf-8")
    if exported.file.endswith(".bin"):
        torch.save(exported.tensors, out / exported.file)
        written: Mapping[str, Tensor] = torch.load(  # noqa: TID251 - what was just written
            out / exported.file, weights_only=True
        )
    else:
        save_file(exported.tensors, out / exported.file, metadata={"format": "pt"})
        written = read_tensors(out)

    _compare(exported, written)
    if form is Format.NATIVE:
        kind.read(out, target)
    return exported


def _compare(exported: Exported, written: Mapping[str, Tensor]) -> None:
    """Raises WeightsError unless the files equal the exported tensors."""
    for name, tensor in exported.tensors.items():
        if written[name].dtype != tensor.dtype or not torch.equal(written[name], tensor):
            raise WeightsError(f"tensor {name} was not written as it was", seen=name)


if __name__ == "__main__":
    app(prog_name="paceline drafter export")
