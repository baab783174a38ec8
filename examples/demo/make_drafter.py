"""Trains a drafter on the start policy alone, offline: the frozen drafter that a co-trained one is
compared with.

Rollouts come from the embedded engine, their hidden states are captured as in a run, and the
drafter trainer's own learner takes exactly `--steps` optimiser steps over about `--tokens`
positions in all. `drafter_trained/` is made from `policy_start/` by this script's defaults.

Usage: python make_drafter.py [--steps N] [--tokens N] [--model DIR] [--out DIR] [--seed 0]
[--rollouts 4096]
       [--tasks FILE] [--heldout FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from tokenizers import Tokenizer

from drafter_trainer.config import DrafterTrainerConfig
from drafter_trainer.learn.heads import load_policy_head
from drafter_trainer.learn.learner import DrafterLearner
from drafter_trainer.rows.batcher import pack
from drafter_trainer.rows.buffer import FeatureBuffer
from drafter_trainer.rows.sample import FeatureSample
from paceline.config import load_config
from paceline.models.config import read_config
from paceline.speculators.eagle.net import EagleNet
from paceline.tasks import Task, TaskCursor, read_tasks
from paceline.trajectory import SpeculationStats, request_seed
from rollout_gateway.engines.base import Engine
from rollout_gateway.engines.embedded.build import build_embedded
from rollout_gateway.engines.embedded.spec import EmbeddedSpec
from rollout_gateway.engines.nouns import Chunk, Request
from rollout_gateway.engines.sampling import Sampling

HERE = Path(__file__).parent
SIBLINGS, MAX_TOKENS, PROBES = 8, 224, 64
PROBE_ARM, PROBE_SEED = "eagle:5_1_6", 20_000


class Rows:
    """Captured rows by request; the engine's sink, without a ring."""

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[int, npt.NDArray[np.uint8]]]] = {}

    def write(
        self,
        request_ids: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.uint32],
        token_ids: npt.NDArray[np.uint32],
        policy_version: int,
        hidden: npt.NDArray[np.uint8],
        parents: npt.NDArray[np.uint32] | None = None,
    ) -> int:
        """Keeps every row."""
        for request_id, position, row in zip(
            request_ids.tolist(), positions.tolist(), hidden, strict=True
        ):
            self._parts.setdefault(request_id, []).append((position, row.copy()))
        return len(request_ids)

    def take(self, request_id: int) -> torch.Tensor:
        """[R, H] fp32 rows of one request in the order of their positions, each once."""
        rows = dict(self._parts.pop(request_id))
        ordered = np.stack([rows[position] for position in sorted(rows)])
        return torch.from_numpy(ordered.view(np.float32).copy())


def roll_out(
    engine: Engine,
    tokenizer: Tokenizer,
    tasks: Sequence[Task],
    siblings: int,
    *,
    seed: int,
    step: int,
    arm: str = "off",
) -> dict[int, tuple[Request, Chunk]]:
    """Every task `siblings` times at T=1; request id -> request and its last chunk."""
    requests: dict[int, Request] = {}
    for task in tasks:
        prompt = tuple(tokenizer.encode(task.prompt).ids)
        for sample in range(siblings):
            sampling = Sampling(
                seed=request_seed(seed, step, task.task_id, sample), max_tokens=MAX_TOKENS
            )
            number = len(requests) + 1
            requests[number] = Request(
                number, prompt, sampling, capture=arm == "off", forced_arm=arm
            )
            engine.enqueue(requests[number])
    done: dict[int, tuple[Request, Chunk]] = {}
    while engine.has_work:
        for chunk in engine.step():
            if chunk.finish is not None:
                done[chunk.request_id] = (requests[chunk.request_id], chunk)
    return done


def collect(options: argparse.Namespace, tokenizer: Tokenizer, buffer: FeatureBuffer) -> None:
    """Fills the buffer with `--rollouts` samples of the start policy."""
    rows = Rows()
    spec = EmbeddedSpec(
        model_dir=str(options.model),
        drafter="off",
        threads=torch.get_num_threads(),
        max_batch=128,
        max_sequence_tokens=256,
        features_dtype="float32",
    )
    engine = build_embedded(spec, rows)
    head = load_policy_head(options.model, 0).hash
    cursor = TaskCursor(read_tasks(options.tasks), options.seed)
    step = 0
    while len(buffer) < options.rollouts:
        done = roll_out(engine, tokenizer, cursor.draw(16), SIBLINGS, seed=options.seed, step=step)
        for request_id, (request, chunk) in sorted(done.items()):
            hidden = rows.take(request_id)
            tokens = torch.tensor((*request.prompt, *chunk.token_ids))[: len(hidden) + 1]
            generated = torch.arange(len(tokens)) >= len(request.prompt)
            if len(hidden) >= 2:
                session = f"{step}-{request_id}"
                buffer.add(
                    FeatureSample(
                        session, step, 0, head, hidden, tokens, generated, hidden.shape[1]
                    )
                )
        step += 1
    engine.close()


def train(options: argparse.Namespace, buffer: FeatureBuffer) -> DrafterLearner:
    """`--steps` optimiser steps in micro-batches of equal size."""
    config = load_config(DrafterTrainerConfig, "drafter_trainer", [HERE / "demo.toml"])
    net = EagleNet(read_config(options.model), seed=options.seed)
    learner = DrafterLearner(net, config.optimizer, micro_batches=config.micro_batches_per_step)
    head = load_policy_head(options.model, 0)
    micro_steps = options.steps * config.micro_batches_per_step
    began = time.monotonic()
    for number in range(micro_steps):
        left = (options.tokens - learner.total_tokens) / (micro_steps - number)
        samples = buffer.draw(max(32, round(left / 0.8)), recency=1.0, known={head.hash})
        result = learner.micro_step(pack(samples, window=config.buffer.window), head)
        if result.stepped and learner.total_steps % 50 == 0:
            print(
                f"step {learner.total_steps}: loss {result.loss:.4f}, "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
    return learner


def probe(options: argparse.Namespace, tokenizer: Tokenizer) -> float:
    """Acceptance length on fixed held-out prompts of the start policy, bonus token included."""
    spec = EmbeddedSpec(
        model_dir=str(options.model),
        drafter=str(options.out),
        threads=torch.get_num_threads(),
        max_batch=PROBES,
        max_sequence_tokens=256,
        arms=("off", PROBE_ARM),
    )
    engine = build_embedded(spec)
    tasks = read_tasks(options.heldout)[:PROBES]
    done = roll_out(engine, tokenizer, tasks, 1, seed=PROBE_SEED, step=0, arm=PROBE_ARM)
    engine.close()
    return sum((chunk.speculation for _, chunk in done.values()), SpeculationStats()).accept_length


def main() -> None:
    """Rolls out, trains, saves and measures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=900, help="optimiser steps")
    parser.add_argument("--tokens", type=int, default=200_000, help="positions trained on, in all")
    parser.add_argument("--model", type=Path, default=HERE / "policy_start")
    parser.add_argument(
        "--tasks", type=Path, default=HERE / "tasks_train.jsonl", help="prompts of the rollouts"
    )
    parser.add_argument(
        "--heldout", type=Path, default=HERE / "tasks_heldout.jsonl", help="prompts of the probe"
    )
    parser.add_argument("--out", type=Path, default=HERE / "drafter_trained")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=4096, help="samples of the start policy")
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(options.seed)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    buffer = FeatureBuffer(
        max_samples=options.rollouts,
        byte_budget=1 << 30,
        heldout_every=1 << 31,
        heldout_samples=1,
        seed=options.seed,
    )
    collect(options, tokenizer, buffer)
    print(f"{len(buffer)} rollouts, {buffer.tokens} positions", flush=True)
    learner = train(options, buffer)
    learner.snapshot().save(options.out)
    accepted = probe(options, tokenizer)
    (options.out / "probe.json").write_text(json.dumps({"accept_length": accepted}) + "\n")
    print(
        f"{learner.total_steps} steps, {learner.total_tokens} positions; "
        f"acceptance length {accepted:.2f} on {PROBES} held-out prompts; {options.out}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
