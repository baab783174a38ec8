"""Runs `paceline drafter train`: starts the ranks, prints their news, and forwards Ctrl-C. Imports
no torch.
"""

import asyncio
import inspect
import json
import signal
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from paceline.config.load import value_of
from paceline.errors import ConfigError, PacelineError
from paceline.local import hub, patience
from paceline.ranks.group import RankGroup
from paceline.services.drafter_trainer.config import OfflineConfig

START_DEADLINE_S = 120.0
SILENCE_DEADLINE_S = 3600.0
"""Maximum wait for a message of the ranks, seconds: one step or one batch of answers of a large
model on few cores.
"""

HELP = """Train a drafter offline from conversations, for a warm start.

FILE lines: {"messages": [...]} under the model's chat template, {"prompt": ..., "response": ...},
or {"input_ids": [...], "loss_mask": [...]}; .jsonl, or .parquet.

Leaves OUT/checkpoint/speculator/{config.json, model.safetensors} and OUT/log.jsonl. Ctrl-C saves;
the same command goes on where it stopped.
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def train(**given: Any) -> None:
    """See HELP."""
    try:
        given["options"] = parse_options(given["options"] or [])
        given["model"] = hub.model_directory(str(given["model"]), _print)
        code = asyncio.run(follow(OfflineConfig.model_validate(given)))
    except (ValidationError, PacelineError) as error:
        text = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            text = f"{_flag(str(first['loc'][0]))}: {first['msg']}; seen: {first['input']}"
        _print(f"paceline drafter train: {text}")
        raise typer.Exit(2) from error
    raise typer.Exit(code)


def _print(text: str) -> None:
    typer.echo(text, err=True)


def _flag(name: str) -> str:
    return {"start": "--from", "kind": "--optimizer"}.get(name, f"--{name.replace('_', '-')}")


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """A setting as a parameter of the command."""
    kind: Any = list[str] | None if name == "options" else field.annotation
    default: Any = inspect.Parameter.empty if field.is_required() else field.default
    flags = [] if kind is bool else [_flag(name)]  # typer adds --no-... to a flag without a name
    metavar = "KEY=VALUE" if name == "options" else None
    option = typer.Option(*flags, help=field.description, metavar=metavar)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if name == "options" else default,
        annotation=Annotated[kind, option],
    )


_parameters = [
    _parameter(name, field)
    for name, field in sorted(
        OfflineConfig.model_fields.items(), key=lambda one: not one[1].is_required()
    )
    if name not in ("betas", "weight_decay")
]
train.__dict__["__signature__"] = inspect.Signature(_parameters)
train.__annotations__ = {one.name: one.annotation for one in _parameters}  # typer reads both
app.command(help=HELP)(train)


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Parses `key=value` pairs; a value is a TOML value, else text. Raises ConfigError for a pair
    without a key.
    """
    pairs = [text.partition("=") for text in texts]
    for key, equals, _ in pairs:
        if not equals or not key:
            raise ConfigError("an option of the speculator is KEY=VALUE", seen=key)
    return {key: value_of(raw) for key, _, raw in pairs}


async def follow(config: OfflineConfig) -> int:
    """Runs the ranks to their end. Returns the exit code: 0, or 130 after Ctrl-C and a written
    checkpoint.

    Raises ConfigError for a run that the ranks reject, RankLost when a rank dies.
    """
    group = RankGroup(
        "paceline.services.drafter_trainer.offline.rank",
        config.ranks,
        config.threads_per_rank,
        log_dir=config.out / "logs",
        config=config,
    )

    def stop() -> None:
        _print("saving; the same command resumes")
        group.signal(signal.SIGTERM)

    async with group:
        await group.start(patience.patient(START_DEADLINE_S))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        while True:
            _, payload = await group.receive(SILENCE_DEADLINE_S)
            message = json.loads(payload)
            if message["kind"] in ("done", "error"):
                group.send(b"bye")
                break
            if message["kind"] != "trained" or message["step"] % config.log_every == 0:
                _print(line_of(message))

    if message["kind"] == "error":
        raise ConfigError(message["text"])
    return 0 if message["whole"] else 130


def line_of(message: dict[str, Any]) -> str:
    """A message of rank 0 as a line: its kind, then its figures by name."""
    figures = {name: value for name, value in message.items() if name != "kind"}
    return f"{message['kind']}: " + ", ".join(f"{n} {_shown(v)}" for n, v in figures.items())


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return f"{value:.4f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    app(prog_name="paceline drafter train")
