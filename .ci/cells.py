"""Writes the cells of tables in the generated pages."""

from __future__ import annotations


def escaped(text: str) -> str:
    """Text in a cell: a bar would end it, and what stands in angles would be taken for HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;")
