"""SGLang's own module of DFlash loads every tensor of an exported drafter and reads its keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from random_models import save_random
from sglang_served import CPU_KERNELS

from paceline.local.patience import patient
from paceline.models.config import read_config
from paceline.services.drafter_trainer.export import Format, export_checkpoint
from paceline.speculators.dflash import DflashNet, DflashOptions

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

LOADED = """
import json, sys
from safetensors.torch import load_file
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.runtime_context import get_parallel
from transformers import AutoConfig

folder = sys.argv[1]
tensors = load_file(folder + "/model.safetensors")
with get_parallel().override(tp_size=1, tp_rank=0):
    model = DFlashDraftModel(AutoConfig.from_pretrained(folder))
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    model.load_weights(tensors.items())
print(json.dumps({
    "loaded": all(bool(one.isfinite().all()) for one in model.parameters()),
    "numbers": sum(one.numel() for one in model.parameters()),
    "block_size": model.block_size,
    "states": model.num_context_features,
    "layers": model.draft_config.target_layer_ids,
    "mask": model.draft_config.mask_token_id,
}))
"""


def test_sglang_loads_every_tensor_of_an_exported_drafter(tmp_path: Path) -> None:
    save_random(tmp_path / "model", "qwen3", num_hidden_layers=5)
    options = DflashOptions(block_size=4, layers=2, mask_token_id=90)
    net = DflashNet.fresh(read_config(tmp_path / "model"), options, seed=1)
    net.save(tmp_path / "drafter")
    export_checkpoint(tmp_path / "drafter", tmp_path / "model", tmp_path / "out", Format.SGLANG)
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": str(CPU_KERNELS), "SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        timeout=patient(180),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    numbers = sum(torch.Size(shape).numel() for shape in net.shapes().values())
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "loaded": True,
        "numbers": numbers,
        "block_size": 4,
        "states": 3,
        "layers": [entered - 1 for entered in net.shape.inner],
        "mask": 90,
    }
