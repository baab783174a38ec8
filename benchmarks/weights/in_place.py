"""Measures an update in an engine, under each profile.

The update is read, rounded and staged while the former version serves. It is then copied into the
storages that serve.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.engine.injected import write_random_model
from benchmarks.result import Row, paired_ratio
from benchmarks.weights.costs import timed
from paceline.models.config import read_config
from paceline.models.in_place import ServedModel, StagedWeights, serve_staged, storages
from paceline.models.profiles import ROUNDED

WIDTHS = ((4096, 11008), (1024, 2752), (256, 688))
"""Hidden and inner sizes of models; their layers have 202, 12.6 and 0.8 million weights."""
VOCABULARY, POSITIONS = 512, 64


def shape_of(millions: float) -> dict[str, int]:
    """Sizes of a Llama of about `millions` million weights, as wide as a whole layer allows."""
    for hidden, inner in WIDTHS:
        layers = round(millions * 1e6 / (4 * hidden * hidden + 3 * hidden * inner))
        if layers:
            break
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": max(1, layers),
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "vocab_size": VOCABULARY,
    }


def served_in_place(millions: float, repeats: int) -> list[Row]:
    """Makes a row for each profile that this machine can compute, of a model in bf16."""
    rows: list[Row] = []
    profiles = [one for one in ROUNDED if find_spec("torchao") or "int8" not in one]
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        write_random_model(Path(folder), shape_of(millions), 0, torch.bfloat16)
        for profile in ("", *profiles):
            rows.append(_row(f"{millions:g}M", Path(folder), profile, repeats))
    return rows


def _row(size: str, folder: Path, profile: str, repeats: int) -> Row:
    plain = ServedModel(read_config(folder), torch.bfloat16, POSITIONS)
    model = plain.under(profile)
    weights = model.load(folder)
    nbytes = sum(one.nbytes for one in storages(weights).values())
    source, target = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    staged: list[StagedWeights] = []
    prepare, commit, copy = list[float](), list[float](), list[float]()
    for _ in range(repeats + 1):  # the first is warm-up
        staged.clear()
        prepare.append(timed(lambda: staged.append(model.staged(folder))))
        commit.append(timed(partial(serve_staged, weights, staged[0])))
        copy.append(timed(partial(target.copy_, source)))
    return {
        "section": "served in place",
        "weights": size,
        "profile": profile or "bfloat16",
        "MB": nbytes / 1e6,
        "prepare s": statistics.median(prepare[1:]),
        "commit s": statistics.median(commit[1:]),
        "commit GB/s": nbytes / statistics.median(commit[1:]) / 1e9,
        "speed / copy": str(paired_ratio(copy[1:], commit[1:])),
    }
