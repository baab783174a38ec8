"""What a speculator is, to the engine that drafts with it and to the trainer that feeds it. Owns the protocols only.

Words: a slot is a cache row of the engine. A row t of a sequence is (hidden state of token t, token t + 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from paceline.models.decoder import DecoderWeights


@dataclass(frozen=True, slots=True)
class CaptureSpec:
    """Which hidden states of the target a speculator needs."""

    layers: str = "last"
    """"last": one row of H numbers per token; "" : none."""
    convention: str = "post_norm"
    """"post_norm": after the final norm, the input of lm_head."""


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """What the engine knows of the sequences to draft for; B rows, S slots, C positions of capacity."""

    slots: Sequence[int]
    """[B] cache slots."""
    lengths: Sequence[int]
    """[B] known tokens n of each slot; the next token to draw stands at position n."""
    token_ids: Tensor
    """int64 [S, C]: known tokens of every slot, garbage from position n on."""
    hidden: Tensor
    """[S, C, H]: true hidden states of positions 0 .. n - 2; the state of token n - 1 is not known yet."""


class Speculator(Protocol):
    """Proposes tokens for the next positions. Keeps what it needs per slot."""

    @property
    def name(self) -> str:
        """Name in the arms, e.g. "eagle"."""
        ...

    @property
    def trainable(self) -> bool:
        """True when weights can be swapped."""
        ...

    @property
    def capture(self) -> CaptureSpec:
        """Hidden states needed of the target."""
        ...

    def catch_up(self, batch: DraftBatch) -> None:
        """Bring slots that are far behind up to date from `batch` alone, however long this speculator has been off.

        Apart from `propose`, so that what a pause costs is not counted as the cost of a round.
        """
        ...

    def propose(self, batch: DraftBatch, steps: int) -> Tensor:
        """Drafts int64 [B, steps] for positions n .. n + steps - 1; -1 where there is nothing to propose.

        Needs no `catch_up` before it. States kept from own features are replaced by those from true hidden states.
        """
        ...

    def free(self, slot: int) -> None:
        """Forget a slot: another sequence may use it next."""
        ...

    def move(self, source: int, destination: int, length: int) -> None:
        """The sequence of slot `source` (length known tokens) now lives in slot `destination`."""
        ...

    def bind(self, target: DecoderWeights) -> None:
        """Use embed_tokens and lm_head of this target from now on."""
        ...

    def load_state(self, directory: Path) -> object:
        """Read a version beside the serving one; the result goes to `commit_state`. Raises WeightsError."""
        ...

    def commit_state(self, state: object) -> None:
        """Serve a state that `load_state` returned."""
        ...


@dataclass(frozen=True, slots=True)
class SpeculatorSetup:
    """What every speculator is built from."""

    target: DecoderWeights
    slots: int
    capacity: int
    """Positions per slot."""
    dtype: torch.dtype
    seed: int
    directory: Path | None = None
    """Trained weights; None: fresh."""
