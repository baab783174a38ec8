"""Checks the model name of requests against the served names."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import NotFound
from paceline.services.rollout_gateway.gateway import Gateway

ANY = "*"
"""Configured name that accepts every model name."""


class ModelNotFound(NotFound):
    """A model that is not served."""

    reason = "MODEL_NOT_FOUND"
    field = "model"


def model_names(gateway: Gateway) -> Sequence[str]:
    """The model's own name first, then the names of gateway.api.model_names."""
    return (gateway.model, *(name for name in gateway.config.api.model_names if name != ANY))


def check_model(gateway: Gateway, name: str | None) -> None:
    """Raises ModelNotFound for any other name than the served names and the configured model
    directory. None or an empty name selects the served model.
    """
    names, config = model_names(gateway), gateway.config
    if not name or name in (config.model, *names) or ANY in config.api.model_names:
        return
    raise ModelNotFound("the model is not served here", seen=name[:100], allowed=", ".join(names))
