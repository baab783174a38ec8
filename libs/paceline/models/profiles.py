"""Lists the profiles: the number format of the layers' matrices, their scales and their products.

Imports no torch, so that settings can use it. Embedding, norms, biases and head have the serving
dtype under every profile. A span of tokens records the profile's name as its number format
(`DrawSpan.number_format`).
"""

from dataclasses import dataclass
from typing import Literal

from paceline.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Profile:
    """The storage and multiplication of the layers' matrices."""

    name: str
    weight_dtype: str  # torch's name of the dtype
    scale_per: Literal["row", "matrix"]  # rows [N] of W [N, K]


PROFILES = {
    one.name: one
    for one in (
        Profile("int8", "int8", "row"),
        Profile("int8_w8a8", "int8", "row"),  # activations are rounded too
        Profile("fp8_channel", "float8_e4m3fn", "row"),
        Profile("fp8_tensor", "float8_e4m3fn", "matrix"),
    )
}
"""The products of each profile are in models/quantised.py."""
ROUNDED = tuple(PROFILES)
"""Profiles that round to fewer bits than any serving dtype."""
FINE = frozenset({"int8"})
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
