"""Writes the demo's training tasks and its fixed held-out prompts; no held-out pair is trained in
either order.

Usage: python make_tasks.py [--family NAME] [--out DIR]
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
    parser.add_argument("--family", choices=gcd_chain.FAMILIES, default="three-digits")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to")
    options = parser.parse_args()
    family, out = gcd_chain.FAMILIES[options.family], options.out
    out.mkdir(parents=True, exist_ok=True)
    train = family.sample_tasks(TRAIN_TASKS, "train", TRAIN_SEED)
    write_tasks(out / "tasks_train.jsonl", train)
    heldout = family.sample_tasks(HELDOUT_TASKS, "heldout", HELDOUT_SEED)
    write_tasks(out / "tasks_heldout.jsonl", heldout)


if __name__ == "__main__":
    main()
