"""`python -m drafter_trainer.offline`: starts the ranks, prints what they tell, passes Ctrl-C on.

Imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import signal
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console

from drafter_trainer.offline.config import CONFIG_VARIABLE, OfflineConfig
from drafter_trainer.offline.progress import Progress
from paceline.errors import ConfigError, PacelineError
from paceline.local.patience import patient
from paceline.ranks.group import RankGroup
from paceline.speculators.kinds import SPECULATORS

START_DEADLINE_S = 120.0
SILENCE_DEADLINE_S = 3600.0
"""Longest wait for a word of the ranks: one step, or one batch of answers, of a large model on few
cores.
"""

HELP = """Train a drafter offline from conversations, for a warm start.

FILE lines: {"messages": [...]} under the model's chat template, {"prompt": ..., "response": ...},
or {"input_ids": [...], "loss_mask": [...]}; .jsonl, or .parquet with pyarrow installed.

Leaves OUT/checkpoint/speculator/{config.json, model.safetensors}, OUT/checkpoint/base/ when the
base model is trained too, and OUT/log.jsonl. Ctrl-C saves; the same command goes on where it
stopped.
"""

TRAINED = " | ".join(kind.name for kind in SPECULATORS.values() if kind.trained)

app = typer.Typer(add_completion=False, rich_markup_mode=None)
console = Console(stderr=True)


@app.command(help=HELP)
def train(
    data: Annotated[Path, typer.Option(help="a file, or a directory of files")],
    model: Annotated[Path, typer.Option(help="checkpoint directory of the target")],
    speculator: Annotated[
        str, typer.Option(help=f"{TRAINED}, or package.module:KIND of your own")
    ] = "eagle",
    options: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="option of the speculator")
    ] = None,
    out: Annotated[Path, typer.Option(help="directory of the run")] = Path("runs/drafter"),
    start: Annotated[
        Path | None, typer.Option("--from", help="drafter to start from, instead of fresh")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="optimiser steps; default: as many as --epochs need")
    ] = None,
    epochs: Annotated[int, typer.Option(help="passes over the data")] = 1,
    batch_tokens: Annotated[
        int, typer.Option(help="tokens of one optimiser step, over all ranks")
    ] = 8_192,
    row_tokens: Annotated[
        int, typer.Option(help="tokens of one forward; longer sequences are cut")
    ] = 2_048,
    window: Annotated[
        int, typer.Option(help="positions of a sequence the drafter learns from, drawn anywhere")
    ] = 512,
    lr: Annotated[float, typer.Option(help="learning rate of the speculator")] = 3e-4,
    warmup_steps: Annotated[int, typer.Option(help="steps of linear warm-up")] = 20,
    freeze_base_model: Annotated[
        bool, typer.Option(help="or train the model jointly, on cross-entropy")
    ] = True,
    base_lr: Annotated[float, typer.Option(help="learning rate of a model that is trained")] = 1e-5,
    speculator_weight: Annotated[
        float, typer.Option(help="of its loss in what a trained model learns from")
    ] = 1.0,
    dtype: Annotated[str, typer.Option(help="of a frozen model: float32 | bfloat16")] = "float32",
    regenerate: Annotated[
        bool, typer.Option(help="learn from the model's own answers to the prompts")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="of such an answer")] = 256,
    temperature: Annotated[float, typer.Option(help="of such an answer; 0 is greedy")] = 1.0,
    heldout_share: Annotated[
        float, typer.Option(help="share of sequences kept to judge by")
    ] = 0.05,
    draft_steps: Annotated[int, typer.Option(help="drafts judged per position")] = 5,
    eval_every: Annotated[int, typer.Option(help="steps between two judgements")] = 200,
    log_every: Annotated[int, typer.Option(help="steps between two lines on the terminal")] = 10,
    save_every: Annotated[int, typer.Option(help="steps between two checkpoints")] = 200,
    ranks: Annotated[
        int, typer.Option(help="processes that share model, drafter and rows (FSDP2)")
    ] = 1,
    threads_per_rank: Annotated[int, typer.Option(help="threads of each")] = 1,
    seed: Annotated[int, typer.Option(help="of weights, order, windows and answers")] = 0,
    resume: Annotated[bool, typer.Option(help="go on with the run in OUT")] = True,
) -> None:
    """See HELP."""
    given = dict(locals())
    try:
        given["options"] = parse_options(given["options"] or [])
        config = OfflineConfig.model_validate(given)
        code = asyncio.run(follow(config, Progress(console, config.log_every)))
    except ValidationError as error:
        first = error.errors()[0]
        _refuse(
            f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}; seen: {first['input']}"
        )
    except PacelineError as error:
        _refuse(str(error))
    raise typer.Exit(code)


def _refuse(text: str) -> None:
    console.print(f"paceline train-drafter: {text}", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(2)


def parse_options(texts: list[str]) -> dict[str, Any]:
    """`key=value` pairs; a value is a TOML value, else text.

    Raises ConfigError for one without a key.
    """
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, raw = text.partition("=")
        if not equals or not key:
            raise ConfigError("an option of the speculator is KEY=VALUE", seen=text)
        try:
            options[key] = tomllib.loads(f"value = {raw}")["value"]
        except tomllib.TOMLDecodeError:
            options[key] = raw
    return options


async def follow(config: OfflineConfig, progress: Progress) -> int:
    """Runs the ranks to their end. Exit code: 0, or 130 after Ctrl-C, when a checkpoint has been
    written.

    Raises ConfigError with what the ranks refuse, RankLost when one dies.
    """
    group = RankGroup(
        "drafter_trainer.offline.rank",
        config.ranks,
        config.threads_per_rank,
        log_dir=config.out / "logs",
        env={CONFIG_VARIABLE: config.model_dump_json()},
    )
    loop = asyncio.get_running_loop()
    async with group:
        await group.start(patient(START_DEADLINE_S))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, _ask_to_stop, group, progress)
        while True:
            _, payload = await group.receive(SILENCE_DEADLINE_S)
            message = json.loads(payload)
            if message["kind"] in ("done", "error"):
                await group.send(b"bye")
                break
            progress.show(message)
    if message["kind"] == "error":
        raise ConfigError(message["text"])
    return 0 if message["whole"] else 130


def _ask_to_stop(group: RankGroup, progress: Progress) -> None:
    progress.say("saving; the same command goes on from there")
    group.signal(signal.SIGTERM)


if __name__ == "__main__":
    app(prog_name="paceline train-drafter")
