"""Evaluates the tasks of a JSONL file through the gateway, n samples each, and compares the figures
with expected ones.

Prints a table and exits with 1 when a figure differs. See README.md for how to start the
gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import openai
from rich.console import Console
from rich.table import Table

from paceline.client import find_token, trace_headers

HERE = Path(__file__).parent
TOLERANCE = 5e-4


async def right_samples(
    client: openai.AsyncOpenAI, model: str, task: Mapping[str, str], n: int
) -> list[bool]:
    """Which of n samples are right: the last number of the answer is the task's.

    Sample i draws with seed i.
    """
    completion = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": task["prompt"]}],
        n=n,
        seed=0,
        temperature=1,
        max_tokens=64,
        extra_headers=trace_headers(),
    )
    texts = [choice.message.content or "" for choice in completion.choices]
    return [(re.findall(r"-?\d+", text) or [""])[-1] == task["answer"] for text in texts]


def pass_at(k: int, n: int, right: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold a right one (Chen et al.,
    2021).
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def figures(rights: Sequence[Sequence[bool]], n: int) -> dict[str, float]:
    """Accuracy over all samples, and pass@k for k = 1, 2, 4, ... up to n."""
    found = {"accuracy": sum(map(sum, rights)) / (n * len(rights))}
    for k in (2**power for power in range(n.bit_length()) if 2**power <= n):
        found[f"pass@{k}"] = sum(pass_at(k, n, sum(one)) for one in rights) / len(rights)
    return found


def show(
    tasks: Sequence[Mapping[str, str]], rights: Sequence[Sequence[bool]], found: Mapping[str, float]
) -> None:
    """A row for each task, and the figures."""
    table = Table("task", "right", "samples")
    for task, one in zip(tasks, rights, strict=True):
        table.add_row(
            task["task_id"],
            f"{sum(one)}/{len(one)}",
            " ".join("+" if right else "-" for right in one),
        )
    table.add_section()
    for name, value in found.items():
        table.add_row(name, f"{value:.4f}")
    Console().print(table)


async def evaluate(options: argparse.Namespace) -> dict[str, float]:
    """Generate answers to all tasks, at most `parallel` at once."""
    tasks = [
        json.loads(line)
        for line in options.tasks.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
    places = asyncio.Semaphore(options.parallel)
    token = options.token or find_token(options.url) or "none"
    async with openai.AsyncOpenAI(base_url=f"{options.url}/v1", api_key=token) as client:
        model = (await client.models.list()).data[0].id

        async def one(task: Mapping[str, str]) -> list[bool]:
            async with places:
                return await right_samples(client, model, task, options.n)

        rights = await asyncio.gather(*map(one, tasks))
    found = figures(rights, options.n)
    show(tasks, rights, found)
    return found


def mismatches(found: Mapping[str, float], expected: Mapping[str, float]) -> list[str]:
    """A line for every expected figure that was not found."""
    return [
        f"{name}: expected {value}, found {found.get(name, math.nan):.4f}"
        for name, value in expected.items()
        if not math.isclose(found.get(name, math.nan), value, abs_tol=TOLERANCE)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:7408", help="address of the gateway")
    parser.add_argument("--token", help="the gateway's token; else what is found")
    parser.add_argument("--tasks", type=Path, default=HERE / "tasks.jsonl")
    parser.add_argument("--n", type=int, default=4, help="samples of a task")
    parser.add_argument("--parallel", type=int, default=16, help="tasks at once")
    parser.add_argument(
        "--expected", type=Path, default=HERE / "expected.json", help="figures by name"
    )
    options = parser.parse_args()
    wrong = mismatches(
        asyncio.run(evaluate(options)), json.loads(options.expected.read_text(encoding="utf-8"))
    )
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
