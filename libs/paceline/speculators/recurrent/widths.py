"""Reads the widths of an LSTM drafter, "4096" or "4096.2048", and says which of them fit.

A width that does not fit is one that the published loader, Arctic Inference's plug-in, cannot
compute either. It adds the token's embedding into the projected state in place, multiplies and adds
gates, memory and norms number by number, and all that widens there is a single number. Hence `fit`:
equal, or 1 where one number goes to every place. A stack's norm stands before its matrix but is
made with the width behind it, so that embeddings and projections keep their width or shrink to 1.
Only `inner_dim` of sum_rnn, whose norms stand behind their matrices, may change it at will.
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
    """A chain of a config.json, as text. Raises InvalidInput naming the key."""
    try:
        return chain_text(parse_chain(raw.get(key)))
    except ValueError as error:
        raise InvalidInput(
            f"{key} is no width", seen=raw.get(key, "(none)"), allowed=str(error)
        ) from error


def chain_text(chain: Chain) -> str:
    """What `parse_chain` reads."""
    return ".".join(map(str, chain))


@dataclass(frozen=True, slots=True)
class Widths:
    """The three chains of a drafter."""

    inner: Chain
    """Of the state: the first is what a gate or a draft sums up to, the last what the head reads.
    """
    proj: Chain
    """Of what the state is projected to."""
    emb: Chain
    """Of embeddings: tables have the first."""

    def check(self, method: str) -> None:
        """Raises InvalidInput naming the first two widths that do not fit."""
        for (name, width), (other, into), single in _meetings(self, method):
            if width != into and not (single and width == 1):
                raise InvalidInput(
                    f"{name} does not fit {other} in an LSTM drafter of {method}",
                    seen=width,
                    allowed=f"{into} or 1" if single else into,
                )


Named = tuple[str, int]


def _meetings(widths: Widths, method: str) -> Iterator[tuple[Named, Named, bool]]:
    """What meets what, and whether a single number would do for the first."""
    summed, state = ("inner_dim[0]", widths.inner[0]), ("inner_dim[-1]", widths.inner[-1])
    if method == "sum_lstm":
        # No stacks there: what stands behind a first width is not read. The embedding is repeated
        # for the gates, whose sums lie beside each other: a single number would not be one a gate.
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
