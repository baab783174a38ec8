"""Runs one bench and prints its table: `python -m benchmarks NAME [--json FILE] ...`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Awaitable
from importlib import import_module
from pathlib import Path

import uvloop

from benchmarks.result import BenchResult
from paceline.errors import NotFound, PacelineError

BENCHES = {
    "transport": (
        "benchmarks.transport",
        "weights and hidden rows beside a raw TCP copy",
    ),
    "weights": (
        "benchmarks.weights.run",
        "full pushes and deltas of weights beside a copy in memory and a raw TCP copy",
    ),
    "e2e": (
        "benchmarks.e2e",
        "whole demo runs with and without a drafter",
    ),
    "hindsight": (
        "benchmarks.hindsight",
        "the default settings beside the best fixed choice of a drafter, on four workloads",
    ),
    "drafter": ("benchmarks.drafter", "five ways to have a drafter while the tasks change"),
    "adaptation": (
        "benchmarks.adaptation",
        "how fast a drafter follows a policy, by the settings of its training",
    ),
    "slot": (
        "benchmarks.slot",
        "training speed of a drafter beside the matrix products of its steps alone",
    ),
    "engine": (
        "benchmarks.engine.run",
        "the embedded engine beside transformers",
    ),
    "peers": (
        "benchmarks.peers.run",
        "the embedded engine beside transformers, llama.cpp and vLLM on a pretrained model",
    ),
    "bandit": ("benchmarks.bandit.run", "regret of bandits over recorded and synthetic rollouts"),
    "gateway": ("benchmarks.gateway.run", "the front door under load, beside LiteLLM's proxy"),
    "tracing": ("benchmarks.tracing", "CPU time that spans add to a gateway"),
    "growth": ("benchmarks.growth", "memory that a long run takes in the durable Redis"),
    "coordinator": (
        "benchmarks.coordinator",
        "events a second and latency of a decision, by slots; simulated runs of its machine",
    ),
    "scale": (
        "benchmarks.scale",
        "costs that grow with slots and hosts: simulated runs of 8 to 4,096 slots",
    ),
    "algorithms": (
        "benchmarks.algorithms",
        "accuracy that algorithms reach on the demo, with several seeds",
    ),
    "schedules": (
        "benchmarks.schedules",
        "whole demo runs under every schedule and placement: tokens trained a second, reward",
    ),
    "products": ("benchmarks.products", "float32 products of a layer on a CPU, beside torch's own"),
    "policy": ("benchmarks.policy.run", "a step of the policy trainer beside a plain loop"),
    "serving": (
        "benchmarks.serving",
        "latencies and tokens a second per TFLOPS of both engines, as CloudMatrix has them",
    ),
    "profiles": (
        "benchmarks.profiles",
        "accuracy, speed and updates of both engines under every profile",
    ),
    "trl": ("benchmarks.trl", "RL steps of a whole run beside TRL's, on a pretrained model"),
    "tinker": (
        "benchmarks.tinker_loop",
        "an RL loop by the Tinker SDK with a co-trained drafter beside no speculation",
    ),
    "sglang": ("benchmarks.sglang", "the SGLang engine beside the embedded one"),
}
"""Bench name -> its module and its line in the list. The module defines add_arguments(parser) and
async run(options) -> BenchResult.
"""


def main() -> None:
    """Runs the bench named on the command line; without a name it lists all benches."""
    name, *words = sys.argv[1:] or ["list"]
    if name in ("list", "-h", "--help"):
        print("usage: paceline bench NAME [--json FILE] ...    options: paceline bench NAME --help")
        for bench, (_, measures) in BENCHES.items():
            print(f"  {bench:10} {measures}")
        return
    try:
        run(name, words)
    except PacelineError as error:
        sys.stderr.write(f"bench {name}: {error}\n")
        raise SystemExit(2 if isinstance(error, NotFound) else 1) from error
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None


def run(name: str, words: list[str]) -> None:
    """Runs one bench. Raises NotFound for an unknown name, and any error of the bench."""
    if name not in BENCHES:
        raise NotFound("no such bench", seen=name, allowed=", ".join(BENCHES))
    module = import_module(BENCHES[name][0])
    parser = argparse.ArgumentParser(
        prog=f"paceline bench {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    module.add_arguments(parser)
    options = parser.parse_args(words)
    result = uvloop.run(_until_told(module.run(options)))
    result.print()
    if options.json is not None:
        result.write_json(options.json)


async def _until_told(work: Awaitable[BenchResult]) -> BenchResult:
    """Makes SIGTERM cancel the bench, as Ctrl-C does, so that the bench stops its runs."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


if __name__ == "__main__":
    main()
