"""Trains a drafter on a policy's own answers, offline, and measures it.

The answers come from the embedded engine, `paceline drafter train` learns from them. So
`drafter_start/` was made for `policy_start/`, `drafter_trained/` for `policy_trained/`, and the
frozen drafters that benches compare with.

Usage: python make_drafter.py [--steps N] [--tokens N] [--answers N] [--model DIR] [--out DIR]
       [--speculator eagle] [--tasks FILE] [--heldout FILE] [--system TEXT] [--max-tokens N]
       [--seed 0] [--only-answers FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer

from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import Chunk, Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.tasks import MESSAGES, Columns, Task, draw_tasks
from paceline.tasks.file import read_tasks
from paceline.trajectory import SpeculationStats, request_seed

HERE = Path(__file__).parent
MAX_TOKENS, CONTEXT, TASKS_AT_ONCE, PROBES = 380, 400, 128, 64
CHAT_CONTEXT, CHATS_AT_ONCE = 512, 16
PROBE_SHAPE, PROBE_SEED = "5_1_6", 20_000
LEARNING = ("--lr", "2.5e-3", "--warmup-steps", "20", "--heldout-share", "0.02")


def build_engine(options: argparse.Namespace, drafter: str, *arms: str) -> Engine:
    """An engine of the model."""
    return EmbeddedEngine(
        EmbeddedSpec(
            model_dir=str(options.model),
            drafter=drafter,
            arms=arms,
            threads=torch.get_num_threads(),
            max_batch=CHATS_AT_ONCE if options.system else TASKS_AT_ONCE,
            max_sequence_tokens=CHAT_CONTEXT if options.system else CONTEXT,
        )
    )


def prompts_of(options: argparse.Namespace) -> Callable[[Task], Sequence[int]]:
    """The tokens of a task's prompt, under the model's chat template with a system prompt."""
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    if not options.system:
        return lambda task: tokenizer.encode(task.prompt).ids
    from transformers import AutoTokenizer  # takes seconds to import

    template = AutoTokenizer.from_pretrained(options.model)

    def of_chat(task: Task) -> Sequence[int]:
        asked = json.loads(task.metadata[MESSAGES])
        text = template.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    return of_chat


def answers(
    engine: Engine,
    options: argparse.Namespace,
    tasks: Sequence[Task],
    *,
    seed: int,
    arm: str = "off",
) -> Iterator[tuple[Request, Chunk]]:
    """An answer to each task at T=1, as they end: the request and its last chunk."""
    prompt_of, longest = prompts_of(options), options.max_tokens
    requests: dict[int, Request] = {}
    for number, task in enumerate(tasks):
        sampling = Sampling(seed=request_seed(seed, number, task.task_id, 0), max_tokens=longest)
        requests[number] = Request(number, tuple(prompt_of(task)), sampling, forced_arm=arm)
        engine.enqueue(requests[number])
    while engine.has_work:
        for chunk in engine.step():
            if chunk.finish is not None:
                yield requests[chunk.request_id], chunk


def write_answers(options: argparse.Namespace, path: Path) -> None:
    """`count` answers to tasks in the order of a run, in the format of `drafter train`."""
    known = read_tasks(options.tasks, Columns(system_prompt=options.system))
    tasks = list(islice(draw_tasks(known, options.seed), options.answers))
    engine = build_engine(options, "off")
    with path.open("w", encoding="utf-8") as file:
        for request, chunk in answers(engine, options, tasks, seed=options.seed):
            ids = [*request.prompt, *chunk.token_ids]
            mask = [0] * len(request.prompt) + [1] * len(chunk.token_ids)
            file.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
    engine.close()


def train(options: argparse.Namespace, data: Path, out: Path) -> Path:
    """`--steps` steps over about `--tokens` positions in all; the drafter's directory."""
    tokens = str(max(32, round(options.tokens / options.steps)))
    sizes = ("--steps", str(options.steps), "--batch-tokens", tokens, "--row-tokens", tokens)
    places = ("--data", str(data), "--model", str(options.model), "--out", str(out))
    command = (sys.executable, "-m", "paceline.cli.main", "drafter", "train")
    often = ("--eval-every", "500", "--save-every", "100000", "--log-every", "100")
    kind = ("--speculator", options.speculator, "--seed", str(options.seed))
    subprocess.run((*command, *places, *sizes, *LEARNING, *often, *kind), check=True)
    return out / "checkpoint" / "speculator"


def probe(options: argparse.Namespace) -> float:
    """Acceptance length on fixed held-out prompts, bonus token included."""
    arm = f"{options.speculator}:{PROBE_SHAPE}"
    engine = build_engine(options, str(options.out), "off", arm)
    tasks = read_tasks(options.heldout, Columns(system_prompt=options.system))[:PROBES]
    ended = list(answers(engine, options, tasks, seed=PROBE_SEED, arm=arm))
    engine.close()
    return sum((chunk.speculation for _, chunk in ended), SpeculationStats()).accept_length


def options_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line, or these words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="optimiser steps")
    parser.add_argument("--tokens", type=int, default=512_000, help="positions trained on, in all")
    parser.add_argument("--answers", type=int, default=6000, help="answers to learn from")
    parser.add_argument("--model", type=Path, default=HERE / "policy_start")
    parser.add_argument("--speculator", default="eagle", help="kind of the drafter")
    parser.add_argument(
        "--tasks", type=Path, default=HERE / "tasks_train.jsonl", help="that are answered"
    )
    parser.add_argument(
        "--heldout", type=Path, default=HERE / "tasks_heldout.jsonl", help="tasks of the probe"
    )
    parser.add_argument("--out", type=Path, default=HERE / "drafter_start")
    parser.add_argument("--system", default="", help="system prompt: tasks are chats")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="of an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only-answers", type=Path, help="write the answers there, train nothing")
    return parser.parse_args(words)


def main() -> None:
    """Draws answers, trains, saves and measures."""
    options = options_of()
    if options.only_answers is not None:
        write_answers(options, options.only_answers)
        return
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "answers.jsonl"
        write_answers(options, data)
        shutil.copytree(train(options, data, Path(folder) / "run"), options.out, dirs_exist_ok=True)
    accepted = probe(options)
    (options.out / "probe.json").write_text(json.dumps({"accept_length": accepted}) + "\n")
    print(f"acceptance length {accepted:.2f} on {PROBES} held-out prompts; {options.out}")


if __name__ == "__main__":
    main()
