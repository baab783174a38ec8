"""Lists the profiles: which numbers the layers' matrices are kept in, what shares a scale, and what
multiplies them. Imports no torch, so that settings can be checked by it.

Embedding, norms, biases and head are in the serving dtype under every profile. A profile's name is
what spans of tokens say that the engine computed with (`DrawSpan.number_format`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.errors import ConfigError, InvalidInput
from paceline.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Profile:
    """How the matrices of the layers are kept and multiplied."""

    name: str
    weight_dtype: str  # torch's name of it
    scale_per: Literal["", "row", "matrix"]  # rows [N] of W [N, K]; "": there are no scales
    activations: str  # numbers that x is rounded to before the product; "": none, x stays
    cpu: str  # what multiplies there
    cuda: str


_PLAIN = "one product in the serving dtype"
_CAST = "cast to the serving dtype, one product, scales on the result"
_FP8 = "torch._scaled_mm on tensor cores (8.9 and newer), x rounded to e4m3 per token"
PROFILES = {
    one.name: one
    for one in (
        Profile("float32", "float32", "", "", _PLAIN, _PLAIN),
        Profile("bfloat16", "bfloat16", "", "", _PLAIN, _PLAIN),
        Profile(
            "int8",
            "int8",
            "row",
            "",
            f"bfloat16 and few rows: torch's fused kernel; else {_CAST}",
            _CAST,
        ),
        Profile(
            "int8_w8a8",
            "int8",
            "row",
            "int8 per token",
            "VNNI: torch._int_mm; else whole numbers in float32, which is exact",
            "torch._int_mm on tensor cores",
        ),
        Profile("fp8_channel", "float8_e4m3fn", "row", "", _CAST, _FP8),
        Profile("fp8_tensor", "float8_e4m3fn", "matrix", "", _CAST, _FP8),
    )
}
ROUNDED = tuple(one.name for one in PROFILES.values() if one.scale_per)
"""Names of those that round to fewer bits than any serving dtype has."""


FINE = frozenset(
    one.name for one in PROFILES.values() if one.weight_dtype == "int8" and not one.activations
)
"""Names of those under which log-probs move least. Under the others, and under what SGLang rounds
to, whose names are its own (fp8, w8a8_int8, bfloat16+kv_fp8_e4m3), they move several times as far.
"""
FILE = ".json"
"""What a setting ends with that names a file of `paceline profile`."""


def check_profile(name: str) -> str:
    """The profile of a version set as it is; "": not rounded. Raises InvalidInput for another."""
    if name and name not in ROUNDED:
        raise InvalidInput("no such profile", seen=name, allowed=f"'', {', '.join(ROUNDED)}")
    return name


def profile_name(value: str) -> str:
    """The name that a setting comes to; a file is not checked beyond what it names. Raises
    ConfigError.
    """
    if not check_profile_name(value).endswith(FILE):
        return value
    name = _read(Path(value)).get("profile")
    if name not in ROUNDED:
        raise ConfigError(f"{value} names no profile", seen=repr(name), allowed=", ".join(ROUNDED))
    return str(name)


def check_profile_name(value: str) -> str:
    """A setting as it is: "", a name, or a file. Raises ConfigError for another name."""
    if value and value not in ROUNDED and not value.endswith(FILE):
        raise ConfigError("no such profile", seen=value, allowed=_ALLOWED)
    return value


def chosen_profile(value: str, config: ModelConfig, start: Callable[[], str]) -> Profile | None:
    """The profile of a setting; None for "": matrices stay in the serving dtype.

    `start` gives the hash of the weights that the engine starts with (`hash_of_start`): a file
    belongs to these, and to every policy that training makes of them. It is asked for files alone,
    since it takes a second a gigabyte. Raises ConfigError for a name that is none, and for a file
    that cannot be read or was measured on a model of another shape or of other weights.
    """
    name = profile_name(value)
    if not value.endswith(FILE):
        return PROFILES[name] if name else None
    found = _read(Path(value))
    model = found.get("model")
    if model != model_words(config):
        raise ConfigError(
            f"{value} is a profile of another model", seen=model, allowed=model_words(config)
        )
    measured, weights = found.get("weights", "none"), start()
    if measured != weights:
        raise ConfigError(
            f"{value} was measured on other weights", seen=measured, allowed=f"{weights}, or a name"
        )
    return PROFILES[name]


def model_words(config: ModelConfig) -> str:
    """The shape of a model, as profiles name it."""
    return (
        f"{config.family}, {config.num_layers} layers of {config.hidden_size}, "
        f"{config.num_heads} heads over {config.num_kv_heads} of {config.head_dim}, "
        f"inner {config.intermediate_size}, vocabulary {config.vocab_size}"
    )


_ALLOWED = f"'', {', '.join(ROUNDED)}, or a file of `paceline profile` (*{FILE})"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no profile in {path}", seen=str(error), allowed="a file of `paceline profile`"
        ) from error
    return found if isinstance(found, dict) else {}
