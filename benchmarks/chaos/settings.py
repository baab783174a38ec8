"""Settings of the run under faults."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.run_files import EXAMPLES, repository_root
from paceline.config.load import Tree, merge, read_tables

RUN_ID = "chaos"
PROMPTS, SAMPLES, TOKENS = 4, 4, 32


def settings(directory: Path, seed: int, steps: int, ports: list[int]) -> Tree:
    """The demo at its smallest: no evaluations, a checkpoint per step, a ledger that keeps
    everything.
    """
    root = repository_root()
    tree = read_tables(root / EXAMPLES / "demo.toml")
    for section, keys in tree.items():
        for key, value in keys.items():
            if isinstance(value, str) and value.startswith(str(EXAMPLES)):
                tree[section][key] = str(root / value)
    run = directory / "run"
    names = ("coordinator", "gateway", "policy_trainer", "drafter_trainer", "http")
    addresses = {name: f"127.0.0.1:{port}" for name, port in zip(names, ports, strict=False)}
    addresses["events"] = f"tcp://127.0.0.1:{ports[len(names)]}"
    merge(
        tree,
        {
            # the proxies receive, and break, all network traffic
            "run": {"id": RUN_ID, "dir": str(run), "seed": seed},
            "addresses": addresses,
            "telemetry": {"spans_dir": str(run / "spans")},
            "coordinator": {
                "steps": steps,
                "heldout_path": "",
                "prompts_per_step": PROMPTS,
                "samples_per_task": SAMPLES,
                "sampling": {"max_tokens": TOKENS},
            },
            "policy_trainer": {
                "checkpoint_interval_steps": 1,
                "ledger_keep": 1_000_000,
                "ranks": 2,
                "publish_deltas": "never",  # the proxies detect a push by its bytes (proxy.py)
            },
        },
    )
    return tree
