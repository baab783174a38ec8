"""Makes policy_trained from a finished demo run: its newest checkpoint in bf16, with the tokenizer.

Usage: python export_policy.py --run ../../runs/demo-0-1 [--out policy_trained]
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def newest_checkpoint(run: Path) -> Path:
    """The checkpoint with the highest policy version; FileNotFoundError when the run has none."""
    found = sorted(
        run.glob("checkpoints/policy/step-*"), key=lambda path: int(path.name.removeprefix("step-"))
    )
    if not found:
        raise FileNotFoundError(
            f"no checkpoints/policy/step-* in {run}; is it the directory of a demo run?"
        )
    return found[-1]


def export(checkpoint: Path, out: Path) -> None:
    """Writes weights in bf16, config and tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to(torch.bfloat16)
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    (out / "config.json").write_text(
        json.dumps({**config, "dtype": "bfloat16"}, indent=2, sort_keys=True) + "\n"
    )
    for name in COPIED:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Export the policy of a demo run in bf16.")
    parser.add_argument("--run", type=Path, required=True, help="directory of a finished demo run")
    parser.add_argument("--out", type=Path, default=HERE / "policy_trained", help="where to write")
    options = parser.parse_args()
    checkpoint = newest_checkpoint(options.run)
    export(checkpoint, options.out)
    print(f"{options.out}: {checkpoint.name} of {options.run}")


if __name__ == "__main__":
    main()
