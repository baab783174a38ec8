"""Loads the tokenizer of a model directory in two forms: for whole texts and for text fragments."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from paceline.models.reading import TextFiles


def read_tokenizers(files: TextFiles) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer of a directory, and a twin for text in the middle of another text.

    The twin omits the space that some tokenizers put before a first word. Both are one object where
    nothing differs. Raises ConfigError for a directory without a tokenizer.
    """
    whole, spelled = files.tokenizer(), files.spelled
    stages = ("normalizer", "pre_tokenizer")
    within = {**spelled, **{name: _without_prefix(spelled.get(name)) for name in stages}}
    if all(within[name] == spelled.get(name) for name in stages):
        return whole, whole
    return whole, files.tokenizer(within)


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
