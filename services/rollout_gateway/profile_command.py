"""Measures profiles of a model and writes a file of each: `paceline profile`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from paceline.errors import ConfigError, PacelineError
from paceline.models.config import read_config
from paceline.models.loading import DTYPES
from paceline.models.profiles import ROUNDED
from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.services.rollout_gateway.engines.embedded.profile_report import (
    ProfileReport,
    Prompts,
    measure_profile,
)
from paceline.tasks import open_tasks

HELP = """Round a model by profiles, and measure each against float32.

Prints a line for each, the model as it is first: mean and worst relative error of its matrices,
mean and 99th percentile of the gap of log-probs (nats), KL, size, tokens a second, and what an
update takes. With --out every profile's
file is written to <out>/<profile>.json, with the error of each matrix, which
gateway.engine.embedded.profile takes for models of the same shape.
"""
_HEAD = (
    "profile",
    "error",
    "worst",
    "gap",
    "99 %",
    "KL",
    "MiB",
    "",
    "tok/s",
    "",
    "prepare ms",
    "commit ms",
)
RANDOM_TOKENS = 8
"""Of a prompt where there is no file of them."""


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help=HELP)
def profile(
    model: Annotated[Path, typer.Argument(help="checkpoint directory", exists=True)],
    names: Annotated[
        list[str] | None, typer.Argument(help=f"{' | '.join(ROUNDED)}; default: all")
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(help="file of tasks whose prompts are taken; default: random tokens"),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="how many, decoded together")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="tokens drawn behind each")] = 32,
    dtype: Annotated[
        str, typer.Option(help=f"what the engine computes with: {' | '.join(DTYPES)}")
    ] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="compute threads")] = 1,
    out: Annotated[Path | None, typer.Option(help="directory for the files")] = None,
) -> None:
    """See HELP."""
    try:
        wanted = _wanted(names or [])
        if dtype not in DTYPES:
            raise ConfigError("no such dtype", seen=dtype, allowed=", ".join(DTYPES))
        chosen = _prompts(model, tasks, prompts)
        reports = [
            measure_profile(model, name, chosen, tokens=tokens, dtype=dtype, threads=threads)
            for name in ("", *wanted)
        ]
    except PacelineError as error:
        typer.echo(f"paceline profile: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"{reports[0].model}; {dtype}, {reports[0].tokens} tokens drawn")
    typer.echo("\n".join(report_lines(reports)))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for one in reports[1:]:
            one.write(out / f"{one.profile}.json")


def _wanted(names: list[str]) -> list[str]:
    for name in names:
        if name not in ROUNDED:
            raise ConfigError("no such profile", seen=name, allowed=", ".join(ROUNDED))
    return names or list(ROUNDED)


def _prompts(model: Path, tasks: Path | None, count: int) -> Prompts:
    if tasks is None:
        generator = torch.Generator().manual_seed(0)
        size = (count, RANDOM_TOKENS)
        ids = torch.randint(read_config(model).vocab_size, size, generator=generator)
        return [tuple(row) for row in ids.tolist()]
    codec = TextCodec(model)
    return [codec.encode(task.prompt) for task in open_tasks(str(tasks))[:count]]


def report_lines(reports: Sequence[ProfileReport]) -> list[str]:
    """A table with a line for each; the first one's bytes and speed count as 1."""
    plain, rows = reports[0], [_HEAD]
    for one in reports:
        errors = [matrix.relative for matrix in one.matrices]
        rows.append(
            (
                one.profile or one.dtype,
                f"{statistics.fmean(errors):.2%}" if errors else "-",
                f"{max(errors):.2%}" if errors else "-",
                f"{one.gap_mean:.2g}",
                f"{one.gap_upper:.2g}",
                f"{one.divergence:.2g}",
                f"{one.bytes / 2**20:.2f}",
                f"{one.bytes / plain.bytes:.2f}",
                f"{one.tokens_per_s:.0f}",
                f"{one.tokens_per_s / plain.tokens_per_s:.2f}",
                f"{1e3 * one.prepare_s:.0f}",
                f"{1e3 * one.commit_s:.1f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


if __name__ == "__main__":
    app(prog_name="paceline profile")
