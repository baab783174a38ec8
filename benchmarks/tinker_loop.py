"""Runs one RL loop of the public SDK `tinker` (an extra) against two services in turns: with a
drafter that learns from the loop's own samples, and without speculation. The goals are equal
tokens and ratios of speeds.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.options import above_zero
from benchmarks.result import BenchResult, Row, at_least, paired_ratio, ratio_goal, say
from paceline.errors import Unavailable
from paceline.local.patience import patient
from paceline.local.ports import free_ports
from paceline.tasks.file import TaskFile

DEMO = Path(__file__).parents[1] / "examples" / "demo"
MODEL = DEMO / "policy_start"
COTRAINED, WITHOUT = "co-trained drafter", "no speculation"
ARMS: Mapping[str, Mapping[str, object]] = {
    COTRAINED: {},
    WITHOUT: {"gateway.drafter": "off", "gateway.speculation.arms": '["off"]'},
}
_STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class TinkerServer:
    """A running service."""

    url: str
    key: str
    directory: Path
    process: subprocess.Popen[str]
    addresses: Mapping[str, str]


def started(
    directory: Path, model: Path = MODEL, config: Path | None = None, **settings: object
) -> TinkerServer:
    """Starts `paceline serve tinker` and waits for the lines with its URL and key.

    Raises Unavailable with its output if it ends before.
    """
    keys = ("gateway", "http", "policy_trainer", "drafter_trainer", "tinker", "tinker_http")
    ports = zip(keys, free_ports(len(keys)), strict=True)
    addresses = {key: f"127.0.0.1:{port}" for key, port in ports}
    given: dict[str, object] = {
        **{f"addresses.{key}": address for key, address in addresses.items()},
        "run.dir": directory,
        "run.id": "tinker",
        "telemetry.spans_dir": "",
        "policy_trainer.ranks": 2,
        **settings,
    }
    files = ["--config", str(config)] if config else []
    command = [sys.executable, "-m", "paceline.cli", "serve", "tinker", "--model", str(model)]
    words = [*files, *(f"{key}={value}" for key, value in given.items())]
    process = subprocess.Popen([*command, *words], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("export TINKER_API_KEY="):
            break
    else:
        raise Unavailable("the service has ended at its start", seen="".join(lines))
    token = (directory / "tokens" / "operator").read_text().strip()
    url = next(line for line in lines if "TINKER_BASE_URL=" in line).partition("=")[2].strip()
    return TinkerServer(url, f"tml-{token}", directory, process, addresses)


def stopped(served: TinkerServer) -> None:
    """Stops the service and waits for its end."""
    served.process.send_signal(signal.SIGTERM)
    served.process.wait(patient(_STOP_S))


@contextmanager
def session(served: TinkerServer) -> Iterator[Any]:
    """A session of the SDK."""
    import tinker

    client = tinker.ServiceClient(base_url=served.url, api_key=served.key)
    try:
        yield client
    finally:
        client.close("success").result()


@dataclass(frozen=True, slots=True)
class LoopStep:
    """One step of a loop."""

    sample_s: float
    step_s: float
    reward: float  # mean
    tokens: tuple[tuple[int, ...], ...]  # of each sample

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second of sampling."""
        return sum(map(len, self.tokens)) / self.sample_s


@dataclass(frozen=True, slots=True)
class Loop:
    """A policy-gradient loop on tasks with a known answer at the end of a response.

    A step depends on tokens and rewards alone. Log-probs of samples differ in their last bits by
    the batch in which the engine has drawn them, and a loss on them would spread that.
    """

    tasks: Path = DEMO / "tasks_train.jsonl"
    steps: int = 30
    prompts: int = 8  # of a step
    samples: int = 16  # of a prompt
    max_tokens: int = 360
    temperature: float = 1.0
    learning_rate: float = 1e-3

    def run(self, client: Any, model: Path = MODEL) -> Iterator[LoopStep]:
        """Yields each step once its weights are saved."""
        training = client.create_lora_training_client(str(model), rank=16, seed=1).result()
        encode, tasks = training.get_tokenizer(), TaskFile(self.tasks)
        sampling = training.save_weights_and_get_sampling_client().result()
        for step in range(self.steps):
            places = range(step * self.prompts, (step + 1) * self.prompts)
            chosen = [tasks[place % len(tasks)] for place in places]
            begun = time.monotonic()
            groups = self._sampled(sampling, encode, [task.prompt for task in chosen], step)
            sampled = time.monotonic()
            data, rewards = [], []
            for task, (prompt, answers) in zip(chosen, groups, strict=True):
                texts = [encode.decode(one.tokens, skip_special_tokens=True) for one in answers]
                own = [float(text.rstrip().endswith(task.answer)) for text in texts]
                rewards += own
                for one, reward in zip(answers, own, strict=True):
                    data.append(_datum(prompt, one, reward - fmean(own)))
            self._train(training, data)
            sampling = training.save_weights_and_get_sampling_client().result()
            drawn = tuple(tuple(one.tokens) for _, answers in groups for one in answers)
            ended = time.monotonic()
            yield LoopStep(sampled - begun, ended - begun, fmean(rewards), drawn)

    def _sampled(
        self, sampling: Any, tokenizer: Any, prompts: Sequence[str], seed: int
    ) -> list[tuple[list[int], Any]]:
        import tinker

        params = tinker.SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, seed=seed << 20
        )
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in prompts]
        going = [
            sampling.sample(tinker.ModelInput.from_ints(one), self.samples, params) for one in ids
        ]
        answers = [one.result().sequences for one in going]
        return list(zip(ids, answers, strict=True))

    def _train(self, training: Any, data: list[Any]) -> None:
        import tinker

        done = training.forward_backward(data, "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=self.learning_rate)).result()
        done.result()


def _datum(prompt: Sequence[int], answer: Any, advantage: float) -> Any:
    import tinker

    tokens, before = [*prompt, *answer.tokens], len(prompt) - 1
    inputs: dict[str, Any] = {
        "target_tokens": tokens[1:],
        "weights": [0.0] * before + [advantage] * len(answer.tokens),
    }
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--model", type=Path, default=MODEL, help="directory of the policy")
    parser.add_argument("--config", type=Path, help="settings; the demo's for the demo's model")
    parser.add_argument("--tasks", type=Path, default=Loop().tasks, help="task file")
    parser.add_argument("--rounds", type=above_zero(int), default=3, help="loops of each service")
    parser.add_argument("--steps", type=above_zero(int), default=30, help="steps of a loop")
    parser.add_argument("--max-tokens", type=above_zero(int), default=360, help="of a sample")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings of both services"
    )


async def run(options: argparse.Namespace) -> BenchResult:
    """Runs all loops. Raises Unavailable and the SDK's errors."""
    return await asyncio.to_thread(_run, options)


def _run(options: argparse.Namespace) -> BenchResult:
    config = options.config or (DEMO / "demo.toml" if options.model == MODEL else None)
    loop = Loop(tasks=options.tasks, steps=options.steps, max_tokens=options.max_tokens)
    found: dict[str, list[LoopStep]] = {arm: [] for arm in ARMS}
    for number in range(options.rounds):
        for arm in (*ARMS,) if number % 2 == 0 else reversed((*ARMS,)):
            given = {**dict(one.split("=", 1) for one in options.overrides), **ARMS[arm]}
            with tempfile.TemporaryDirectory() as folder:
                served = started(Path(folder) / "run", options.model, config, **given)
                try:
                    with session(served) as client:
                        made = list(loop.run(client, options.model))
                finally:
                    stopped(served)
            found[arm] += made
            say(f"round {number}, {arm}: {median(one.tokens_per_s for one in made):.0f} tokens/s")
    equal = [a.tokens == b.tokens for a, b in zip(*found.values(), strict=True)]
    # The first half of a loop is left out: the drafter has just begun to learn.
    late = {
        arm: [one for at, one in enumerate(made) if at % options.steps >= options.steps // 2]
        for arm, made in found.items()
    }
    ours, theirs = late[COTRAINED], late[WITHOUT]
    speed = paired_ratio([a.tokens_per_s for a in ours], [b.tokens_per_s for b in theirs])
    steps = paired_ratio([1 / a.step_s for a in ours], [1 / b.step_s for b in theirs])
    goals = [
        at_least("steps with equal tokens", len(equal), sum(equal)),
        ratio_goal("sampled tokens/s", 1.2, speed),
        ratio_goal("loop steps/s", 1.0, steps),
    ]
    rows: list[Row] = [_row(arm, made) for arm, made in late.items()]
    return BenchResult("the second halves of RL loops by the Tinker SDK", rows, goals)


def _row(arm: str, made: Sequence[LoopStep]) -> Row:
    return {
        "arm": arm,
        "steps": len(made),
        "sampled tokens/s": median(one.tokens_per_s for one in made),
        "loop steps/s": median(1 / one.step_s for one in made),
        "s of sampling": median(one.sample_s for one in made),
        "mean reward": fmean(one.reward for one in made),
    }
