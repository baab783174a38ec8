"""Under which names the model is asked for. Owns the refusal of any other."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import NotFound
from paceline.services.rollout_gateway.gateway import Gateway

ANY = "*"
"""Among the names of the configuration: every name is the model's."""


class ModelNotFound(NotFound):
    """A model that is not served."""

    reason = "MODEL_NOT_FOUND"
    field = "model"


def model_names(gateway: Gateway) -> Sequence[str]:
    """The model's own name first, then those of gateway.api.model_names."""
    return (gateway.model, *(name for name in gateway.config.api.model_names if name != ANY))


def check_model(gateway: Gateway, name: str | None) -> None:
    """Raises ModelNotFound for a name that is none of the model's; None asks for whatever is
    served, and the directory that the model came from names it too.
    """
    names, config = model_names(gateway), gateway.config
    if name is None or name in (config.model, *names) or ANY in config.api.model_names:
        return
    raise ModelNotFound("the model is not served here", seen=name[:100], allowed=", ".join(names))
