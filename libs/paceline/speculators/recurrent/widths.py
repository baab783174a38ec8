"""Reads the widths of an LSTM drafter, "4096" or "4096.2048", and checks that they match.

The published loader, Arctic Inference's plug-in, cannot compute with widths that do not match. It
adds the token's embedding to the projected state in place. It multiplies and adds gates, memory and
norms elementwise, and broadcasts only single numbers. So two widths match if they are equal, or if
one is 1 where a single number applies to every place.

A stack's norm precedes its matrix, but has the matrix's output width. Embeddings and projections
therefore keep their width or shrink to 1. Only `inner_dim` of sum_rnn, with norms after its
matrices, may change it freely.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from paceline.errors import InvalidInput
from paceline.models.config import MAX_COUNT

Chain = tuple[int, ...]
"""Widths of a stack, from its first to its last."""


def parse_chain(given: object) -> Chain:
    """Widths of a number or of a text "4096.2048". Raises ValueError."""
    parts = str(given).split(".") if type(given) in (int, str) else [""]
    chain = tuple(int(part) if part.isascii() and part.isdigit() else 0 for part in parts)
    if not all(1 <= width <= MAX_COUNT for width in chain):
        raise ValueError('a width or a chain of them: "4096" or "4096.2048", each at least 1')
    return chain


def read_chain(raw: Mapping[str, Any], key: str) -> str:
    """A chain in a config.json, as text. Raises InvalidInput with the key."""
    try:
        return chain_text(parse_chain(raw.get(key)))
    except ValueError as error:
        raise InvalidInput(
            f"{key} is no width", seen=raw.get(key, "(none)"), allowed=str(error)
        ) from error


def chain_text(chain: Chain) -> str:
    """The text of a chain, in `parse_chain`'s form."""
    return ".".join(map(str, chain))


@dataclass(frozen=True, slots=True)
class Widths:
    """The three chains of a drafter."""

    inner: Chain
    """Widths of the state: the first is the width of a gate's or draft's sum, the last the head's
    input width.
    """
    proj: Chain
    """Widths of the projected state."""
    emb: Chain
    """Widths of embeddings; tables have the first width."""

    def check(self, method: str) -> None:
        """Raises InvalidInput with the first two widths that do not match."""
        for (name, width), (other, into), single in _meetings(self, method):
            if width != into and not (single and width == 1):
                raise InvalidInput(
                    f"{name} does not fit {other} in an LSTM drafter of {method}",
                    seen=width,
                    allowed=f"{into} or 1" if single else into,
                )


Named = tuple[str, int]


def _meetings(widths: Widths, method: str) -> Iterator[tuple[Named, Named, bool]]:
    """Pairs of widths that must match, and whether the first may be a single number."""
    summed, state = ("inner_dim[0]", widths.inner[0]), ("inner_dim[-1]", widths.inner[-1])
    if method == "sum_lstm":
        # sum_lstm has no stacks, so widths after the first are not read. The embedding is repeated
        # for the gates, and their sums are concatenated. A single number would therefore not be one
        # per gate.
        proj = ("proj_dim[0]", widths.proj[0])
        yield ("emb_dim[0]", widths.emb[0]), proj, False
        yield proj, state, True
        yield summed, state, True
        return
    for key, chain in (("emb_dim", widths.emb), ("proj_dim", widths.proj)):
        for place, (before, behind) in enumerate(pairwise(chain)):
            yield (f"{key}[{place + 1}]", behind), (f"{key}[{place}]", before), True
    proj = ("proj_dim[-1]", widths.proj[-1])
    yield ("emb_dim[-1]", widths.emb[-1]), proj, True
    yield proj, summed, True
