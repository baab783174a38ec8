"""Finds the models in a run's settings and resolves Hub ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.cli.run_files import merged
from paceline.local.hub import is_hub_id, model_directory

SECTIONS = ("gateway", "policy_trainer", "drafter_trainer")
"""Sections with a `model` setting."""


def found_models(
    files: Sequence[Path], overrides: Sequence[str], say: Callable[[str], None]
) -> list[str]:
    """Settings with the directory of every model that is named by its Hub id.

    Raises as `model_directory`.
    """
    tree = merged(files, overrides)
    found: dict[str, Path] = {}
    for section in SECTIONS:
        model = _model(tree.get(section))
        if model and model not in found and is_hub_id(model):
            found[model] = model_directory(model, say)
    return [
        f"{section}.model={found[model]}"
        for section in SECTIONS
        if (model := _model(tree.get(section))) in found
    ]


def _model(section: Any) -> str:
    model = section.get("model") if isinstance(section, dict) else None
    return model if isinstance(model, str) else ""
