"""Writes a trained drafter as another engine's checkpoint: `paceline drafter export`.

paceline.speculators.export has the requirements of each engine. The written files are read back and
compared name by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import ConfigError, PacelineError, WeightsError
from paceline.models.config import read_config, read_config_json
from paceline.models.loading import DTYPES, read_tensors
from paceline.speculators.export import Exported, Format, export_drafter
from paceline.speculators.kinds import SPECULATORS, find_kind, kind_of_checkpoint
from paceline.speculators.loading import net_of

HELP = """Write a trained drafter as another engine's checkpoint.

sglang: EAGLE of Llama and Qwen2 (--speculative-algorithm EAGLE), EAGLE-3 (EAGLE3), DFlash (DFLASH).

vllm: EAGLE of Llama (method eagle; no bias behind fc), EAGLE-3 (eagle3), MLP speculator
(mlp_speculator).

arctic: LSTM speculator of either method, for Snowflake's ArcticInference plugin of vLLM (method
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
