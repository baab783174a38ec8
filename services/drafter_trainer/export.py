"""Writes a trained drafter as another engine's checkpoint: `paceline drafter export`.

A format is an engine. Silent errors of engines are avoided here. SGLang's EAGLE has a bias after
fc, drawn at random if the checkpoint has none. vLLM's has no such bias. Both skip unknown names.
The written files are read back and compared name by name.
"""

import json
from collections.abc import Callable, Mapping
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
from paceline.speculators import dflash, eagle, eagle3, lstm
from paceline.speculators.eagle3 import Eagle3Net
from paceline.speculators.kinds import SPECULATORS, find_kind, kind_of_checkpoint
from paceline.speculators.net import DraftNet, net_of
from paceline.speculators.vocabulary import MAP_DTYPES


class Format(StrEnum):
    """The engine that reads the exported directory."""

    SGLANG = "sglang"
    VLLM = "vllm"
    ARCTIC = "arctic"
    NATIVE = "native"


HOT_VOCABULARY = "token_map.pt"
"""The draft vocabulary of an EAGLE drafter for SGLang's --speculative-token-map."""
Exported = tuple[dict[str, Any], dict[str, Tensor]]
"""config.json and tensors of a checkpoint of one format."""


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
        exported = config, dict(tensors)
    elif form in mappers:
        exported = mappers[form](net, config, net.own_tensors(tensors))
    else:
        allowed = [one.value for one in (*mappers, Format.NATIVE)]
        raise InvalidInput(f"no engine of this name loads {name}", seen=form.value, allowed=allowed)

    return _cast(exported, dtype)


def _cast(exported: Exported, dtype: torch.dtype | None) -> Exported:
    # Tied tensors stay one storage, which torch.save writes once.
    config, given = exported
    turned: dict[int, Tensor] = {}
    for tensor in given.values():
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        turned.setdefault(id(tensor), tensor.detach().to(wanted).contiguous())
    tensors = {name: turned[id(tensor)] for name, tensor in given.items()}
    stored = next((t.dtype for t in tensors.values() if t.is_floating_point()), torch.float32)
    return {**config, "torch_dtype": str(stored).removeprefix("torch.")}, tensors


def _eagle_sglang(net: eagle.EagleNet, config: dict[str, Any], own: dict[str, Tensor]) -> Exported:
    own, config = _plain_eagle(net, config, own)
    own.setdefault("fc.bias", own["fc.weight"].new_zeros(net.config.hidden_size))
    return {**config, "fc_bias": True}, own


def _plain_eagle(
    net: eagle.EagleNet, config: dict[str, Any], own: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if net.options.norms:
        message = "EAGLE-1 has no norms of its inputs"
        allowed = "a drafter trained with norms=false"
        raise InvalidInput(message, seen="norms=true", allowed=allowed)
    return _with_whole_head(own, config)


def _eagle_vllm(net: eagle.EagleNet, config: dict[str, Any], own: dict[str, Tensor]) -> Exported:
    own, config = _plain_eagle(net, config, own)
    if bool(own.pop("fc.bias", torch.zeros(1)).any()):
        message = "vLLM's EAGLE has no bias after fc"
        raise InvalidInput(message, seen="fc.bias", allowed="fc_bias=false in training")
    return {**config, "fc_bias": False, "architectures": ["EagleLlamaForCausalLM"]}, own


def _eagle3_sglang(net: Eagle3Net, config: dict[str, Any], own: dict[str, Tensor]) -> Exported:
    if net.options.norm_before_residual:
        message = "SGLang's EAGLE-3 has the state before its norm as residual"
        allowed = "a drafter trained with norm_before_residual=false"
        raise InvalidInput(message, seen="norm_before_residual=true", allowed=allowed)
    return {**config, "tie_word_embeddings": False}, own


def _eagle3_vllm(net: Eagle3Net, config: dict[str, Any], own: dict[str, Tensor]) -> Exported:
    # SGLang numbers a layer by its output; vLLM and CaptureSpec by its input.
    layers = {"eagle_aux_hidden_state_layer_ids": list(net.inner)}
    return {**config, **layers, "tie_word_embeddings": False}, own


def _described(net: DraftNet, config: dict[str, Any], own: dict[str, Tensor]) -> Exported:
    # The source may have the keys of dflash_config at its top, or its tensors under "model.".
    own, config = _with_whole_head(own, {**config, **net.config_json()})
    return config, own


def _with_whole_head(
    own: dict[str, Tensor], config: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Without the draft vocabulary of a drafter with the target's head: engines read it from a file
    of their own, or draft all tokens.
    """
    own = {name: one for name, one in own.items() if name not in MAP_DTYPES}
    return own, {key: value for key, value in config.items() if key != "draft_vocab_size"}


def _lstm_arctic(net: lstm.LstmNet, config: dict[str, Any], own: dict[str, Tensor]) -> Exported:
    config = {**config, **net.config_json()}
    if not config["tie_lstm_embs"]:
        message = "Arctic's LSTM has one embedding"
        raise InvalidInput(message, seen="tie_lstm_embs=false", allowed="true in training")
    copies = {name: own[source] for name, source in net.aliases().items()}
    return config, own | copies


Mapper = Callable[[Any, dict[str, Any], dict[str, Tensor]], Exported]
"""(network, config.json, tensors under the network's names) -> the engine's checkpoint."""

FORMATS: dict[str, dict[Format, Mapper]] = {
    # Stock SGLang has EAGLE modules for these two families, vLLM for Llama only.
    eagle.ARCHITECTURES["llama"]: {Format.SGLANG: _eagle_sglang, Format.VLLM: _eagle_vllm},
    eagle.ARCHITECTURES["qwen2"]: {Format.SGLANG: _eagle_sglang},
    eagle3.ARCHITECTURE: {Format.SGLANG: _eagle3_sglang, Format.VLLM: _eagle3_vllm},
    dflash.ARCHITECTURE: {Format.SGLANG: _described},
    lstm.ARCHITECTURE: {Format.ARCTIC: _lstm_arctic},
}
"""Architecture in a native config.json -> its further formats. A new kind is one line."""


HELP = """Write a trained drafter as another engine's checkpoint.

sglang: EAGLE of Llama and Qwen2 (--speculative-algorithm EAGLE), EAGLE-3 (EAGLE3), DFlash (DFLASH).

vllm: EAGLE of Llama without a bias (method eagle), EAGLE-3 (eagle3).

arctic: LSTM, for Snowflake's ArcticInference plugin of vLLM (method arctic).

native: every kind, for `serve gateway --drafter DIR` and `drafter train --from DIR`.
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
    form: Annotated[Format, typer.Option("--format", help="engine that loads it")] = Format.NATIVE,
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
        message = "the output directory is not empty"
        raise ConfigError(message, seen=out, allowed="a new or empty directory")

    target, raw, tensors = read_config(model), read_config_json(source), read_tensors(source)
    kinds = [find_kind(speculator)] if speculator else SPECULATORS.values()
    kind = net_of(kind_of_checkpoint(source, kinds))
    # Its network reads it whole first, which is stricter than any loader.
    net = kind.read(source, target)
    exported = export_drafter(net, raw, tensors, target, form, dtype)
    config, made = exported
    out.mkdir(parents=True, exist_ok=True)
    if form is Format.SGLANG and isinstance(net, eagle.EagleNet) and net.token_ids is not None:
        torch.save(net.token_ids.tolist(), out / HOT_VOCABULARY)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if form is Format.ARCTIC:
        file = out / "pytorch_model.bin"
        torch.save(made, file)
        written = torch.load(file, weights_only=True)  # noqa: TID251 - the file of this call
    else:
        save_file(made, out / "model.safetensors", metadata={"format": "pt"})
        written = read_tensors(out)

    for name, tensor in made.items():
        if written[name].dtype != tensor.dtype or not torch.equal(written[name], tensor):
            raise WeightsError(f"tensor {name} was not written as it was", seen=name)
    if form is Format.NATIVE:
        kind.read(out, target)
    return exported


if __name__ == "__main__":
    app(prog_name="paceline drafter export")
