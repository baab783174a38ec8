"""Measures profiles of a model and writes a file of each: `paceline profile`."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import replace
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
from paceline.services.rollout_gateway.profile_accuracy import MARKER, HeldOut
from paceline.tasks import open_tasks

HELP = """Round a model by profiles, and measure each against float32.

Prints a line for each, the model as it is first: mean and worst relative error of its matrices,
mean and 99th percentile of the gap of log-probs (nats), KL, the share of held-out tasks that is
answered right (with --tasks, by the rule math_answer) and its ratio to that of the model as it is,
size, tokens a second, and what an update takes. With --out every profile's file is written to
<out>/<profile>.json, with the error of each matrix, which gateway.engine.embedded.profile takes for
this model.
"""
_HEAD = (
    "profile",
    "error",
    "worst",
    "gap",
    "99 %",
    "KL",
    "accuracy",
    "",
    "MiB",
    "",
    "tok/s",
    "",
    "prepare ms",
    "commit ms",
)
RANDOM_TOKENS = 8
"""Of a prompt where there is no file of them."""
HELD_OUT = "tasks_heldout.jsonl"
"""Taken where it lies beside the model's directory, as it does in the demo."""


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help=HELP)
def profile(
    model: Annotated[Path, typer.Argument(help="checkpoint directory", exists=True)],
    names: Annotated[
        list[str] | None, typer.Argument(help=f"{' | '.join(ROUNDED)}; default: all")
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(
            help="file of tasks whose prompts are taken and whose answers are checked; default: "
            f"{HELD_OUT} beside the model's directory, else random tokens"
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="how many, decoded together")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="tokens drawn behind each")] = 32,
    answers: Annotated[
        int, typer.Option(min=0, help="tasks of the file that are answered; 0: none")
    ] = 64,
    answer_tokens: Annotated[int, typer.Option(min=1, help="of an answer, at most")] = 384,
    marker: Annotated[
        str, typer.Option(help="the answer of a response follows the last of these")
    ] = MARKER,
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
        file = tasks or _neighbour(model)
        chosen = _prompts(model, file, prompts)
        reports = [
            measure_profile(model, name, chosen, tokens=tokens, dtype=dtype, threads=threads)
            for name in ("", *wanted)
        ]
        held_out = _held_out(file, answers, answer_tokens, marker)
        if held_out.tasks:
            reports = asyncio.run(_answered(reports, held_out, model, threads))
    except PacelineError as error:
        typer.echo(f"paceline profile: {error}", err=True)
        raise typer.Exit(2) from error
    _tell(reports, file, out)


def _tell(reports: Sequence[ProfileReport], file: Path | None, out: Path | None) -> None:
    """Prints them, and writes those of profiles where there is a directory for them."""
    first = reports[0]
    asked = f", {first.answered} tasks of {file} answered" if first.answered else ""
    typer.echo(f"{first.model}; {first.dtype}, {first.tokens} tokens drawn{asked}")
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


def _neighbour(model: Path) -> Path | None:
    found = model.resolve().parent / HELD_OUT
    return found if found.is_file() else None


def _held_out(file: Path | None, count: int, tokens: int, marker: str) -> HeldOut:
    """The first tasks of a file, of those that have an answer to compare with."""
    first = open_tasks(str(file))[:count] if file is not None else []
    return HeldOut([task for task in first if task.answer], tokens, marker)


async def _answered(
    reports: Sequence[ProfileReport], held_out: HeldOut, model: Path, threads: int
) -> list[ProfileReport]:
    """The reports with accuracies; the first one is of the model as it is."""
    shares = [
        await held_out.accuracy_of(model, one.profile, dtype=one.dtype, threads=threads)
        for one in reports
    ]
    return [
        replace(one, answered=len(held_out.tasks), accuracy=share, plain_accuracy=shares[0])
        for one, share in zip(reports, shares, strict=True)
    ]


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
                *_accuracies(one),
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


def _accuracies(one: ProfileReport) -> tuple[str, str]:
    """The share that is answered right, and its ratio to the plain model's."""
    if one.accuracy is None:
        return "-", "-"
    kept = f"{one.accuracy / one.plain_accuracy:.2f}" if one.plain_accuracy else "-"
    return f"{one.accuracy:.3f}", kept


if __name__ == "__main__":
    app(prog_name="paceline profile")
