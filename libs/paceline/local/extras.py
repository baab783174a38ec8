"""Checks that an extra's packages are installed before a process that needs them starts."""

from __future__ import annotations

from importlib.util import find_spec

from paceline.errors import ConfigError

MODULES = {
    "serve": ("torch", "transformers"),
    "train": ("torch", "transformers", "jaxtyping"),
    "ray": ("ray",),
}
"""Extra of pyproject.toml -> modules that prove its installation."""


def require_extra(extra: str, what: str) -> None:
    """Raises ConfigError with the install command if the extra is absent. `what`: its user, for the
    message.
    """
    absent = [module for module in MODULES[extra] if find_spec(module) is None]
    if absent:
        raise ConfigError(
            f"{what} needs {', '.join(absent)}: pip install 'paceline[{extra}]', or make setup in "
            "a clone",
            reason="NOT_INSTALLED",
        )
