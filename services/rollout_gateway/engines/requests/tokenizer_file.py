"""Reads the tokenizer of a file twice: for whole texts, and for the middle of one. Imports no
torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from paceline.errors import ConfigError


def read_tokenizers(path: Path) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer of a file, and the same for the middle of a text: without the space that some
    put before a first word. Both are one object where nothing differs.

    Raises ConfigError for a file that holds no tokenizer.
    """
    try:
        spelled = json.loads(path.read_text(encoding="utf-8"))
        whole = _unlimited(Tokenizer.from_file(str(path)))
        stages = ("normalizer", "pre_tokenizer")
        within = {**spelled, **{name: _without_prefix(spelled.get(name)) for name in stages}}
        if all(within[name] == spelled.get(name) for name in stages):
            return whole, whole
        return whole, _unlimited(Tokenizer.from_str(json.dumps(within)))
    except Exception as error:  # the tokenizers package raises no class of its own
        raise ConfigError(f"{path} is no tokenizer: {error}") from error


def _unlimited(tokenizer: Tokenizer) -> Tokenizer:
    """Some files carry the lengths of a training run."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _without_prefix(stage: Any) -> Any:
    """A stage of a tokenizer that puts nothing before a text."""
    if not isinstance(stage, dict):
        return stage
    if stage.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    found = dict(stage)
    for inner in ("normalizers", "pretokenizers"):
        if inner in found:
            found[inner] = [_without_prefix(one) for one in found[inner]]
    if found.get("add_prefix_space"):
        found["add_prefix_space"] = False
    if found.get("type") == "Metaspace":
        found["prepend_scheme"] = "never"
    return found
