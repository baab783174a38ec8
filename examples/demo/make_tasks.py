"""Writes the demo's training tasks and its fixed held-out prompts; no held-out pair is trained in
either order.

Usage: python make_tasks.py [--out DIR]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gcd_chain

from paceline.tasks import write_tasks

HERE = Path(__file__).parent
TRAIN_TASKS, TRAIN_SEED = 2000, 1
HELDOUT_TASKS, HELDOUT_SEED = 512, 2


def main() -> None:
    parser = argparse.ArgumentParser(description="Write tasks_train.jsonl and tasks_heldout.jsonl.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    write_tasks(out / "tasks_train.jsonl", gcd_chain.sample_tasks(TRAIN_TASKS, "train", TRAIN_SEED))
    write_tasks(
        out / "tasks_heldout.jsonl", gcd_chain.sample_tasks(HELDOUT_TASKS, "heldout", HELDOUT_SEED)
    )


if __name__ == "__main__":
    main()
