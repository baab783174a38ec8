"""Lists the profiles: the number format of the layers' matrices, their scales and their products.

Imports no torch, so that settings can use it. Embedding, norms, biases and head have the serving
dtype under every profile. A span of tokens records the profile's name as its number format
(`DrawSpan.number_format`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Profile:
    """The storage and multiplication of the layers' matrices."""

    name: str
    weight_dtype: str  # torch's name of the dtype
    scale_per: Literal["", "row", "matrix"]  # rows [N] of W [N, K]; "": there are no scales
    activations: str  # number format of x in the product; "": x is unrounded
    cpu: str  # implementation of the product
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
"""Profiles that round to fewer bits than any serving dtype."""


FINE = frozenset(
    one.name for one in PROFILES.values() if one.weight_dtype == "int8" and not one.activations
)
"""Profiles with the smallest shift of log-probs. Other profiles shift log-probs several times as
far. So do SGLang's own formats (fp8, w8a8_int8, bfloat16+kv_fp8_e4m3).
"""


def check_profile(name: str) -> str:
    """The profile of a version set as it is; "": not rounded. Raises InvalidInput for another."""
    if name and name not in ROUNDED:
        raise InvalidInput("no such profile", seen=name, allowed=f"'', {', '.join(ROUNDED)}")
    return name


def chosen_profile(name: str) -> Profile | None:
    """The profile of a setting; None for "": matrices stay in the serving dtype.

    Raises InvalidInput for another name.
    """
    return PROFILES[check_profile(name)] if name else None
