"""Looks whether what an extra brings is installed, before a process that needs it is started."""

from __future__ import annotations

from importlib.util import find_spec

from paceline.errors import ConfigError

MODULES = {
    "serve": ("torch", "transformers"),
    "train": ("torch", "transformers", "jaxtyping"),
    "ray": ("ray",),
}
"""Extra of pyproject.toml -> modules by which one knows that it is there."""


def require_extra(extra: str, what: str) -> None:
    """what: who needs it. Raises ConfigError with the line that installs it."""
    absent = [module for module in MODULES[extra] if find_spec(module) is None]
    if absent:
        raise ConfigError(
            f"{what} needs {', '.join(absent)}: pip install 'paceline[{extra}]', or make setup in "
            "a clone",
            reason="NOT_INSTALLED",
        )
