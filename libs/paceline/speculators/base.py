"""Declares what a speculator does for the engine that drafts with it, and what it reads.

Words: a slot is a cache row of the engine. A row t of a sequence is (hidden state of token t, token
t + 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from paceline.errors import DataLoss
from paceline.models.decoder import DecoderWeights


@dataclass(frozen=True, slots=True)
class CaptureSpec:
    """Which hidden states of the target a speculator needs, and what they are called in captured
    rows.
    """

    inner: tuple[int, ...] = ()
    """Ascending: i is the residual stream that enters decoder layer i, before any norm."""
    last: bool = True
    """The state after the final norm, the input of lm_head."""
    convention: str = "post_norm"
    """The final norm has been applied to `last`."""

    @property
    def layers(self) -> str:
        """Names of the states in their order in a row, "2,14,25,last"; empty when none is
        needed.
        """
        return ",".join((*map(str, self.inner), *(("last",) if self.last else ())))

    def width(self, hidden_size: int) -> int:
        """Numbers of a row."""
        return hidden_size * (len(self.inner) + self.last)

    def columns(self, layers: str, hidden_size: int) -> slice | list[int]:
        """Where these states stand in rows that hold `layers`, to index the last dimension with.

        Raises DataLoss naming the states that such rows lack.
        """
        held, wanted = layers.split(","), self.layers.split(",") if self.layers else []
        if lacking := [name for name in wanted if name not in held]:
            message = f"captured rows lack states the drafter reads: {', '.join(lacking)}"
            raise DataLoss(
                message, seen=layers or "(none)", allowed=f"rows that hold {self.layers}"
            )
        starts = [held.index(name) for name in wanted]
        first, count = min(starts, default=0), len(starts)
        if starts == list(range(first, first + count)):
            return slice(first * hidden_size, (first + count) * hidden_size)
        return [start * hidden_size + offset for start in starts for offset in range(hidden_size)]


class DraftSampler(Protocol):
    """Draws a chain's tokens instead of taking the most likely ones; keeps what it drew from."""

    def __call__(self, logits: Tensor, level: int) -> Tensor:
        """int64 [B] drawn from the drafter's logits [B, V] for the level, 0 for position n."""
        ...


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """What the engine knows of the sequences to draft for; B rows, S slots, C positions of
    capacity.
    """

    slots: Sequence[int]
    """[B] cache slots."""
    lengths: Sequence[int]
    """[B] known tokens n of each slot; the next token to draw stands at position n."""
    token_ids: Tensor
    """int64 [S, C]: known tokens of every slot, garbage from position n on."""
    hidden: Tensor
    """[S, C, W]: true hidden states of positions 0 .. n - 2, by SpeculatorSetup.layers; the last H
    columns are those after the final norm. The state of token n - 1 is not known yet.
    """
    sampler: DraftSampler | None = None
    """How tokens of a chain are chosen by speculators that have a distribution; None: the most
    likely.
    """
    prompts: Sequence[int] = ()
    """[B] tokens of each sequence that were asked, behind which its answer begins; (): not known.
    """
    policy_version: int = 0
    """Of the policy that draws the next tokens."""


@dataclass(frozen=True, slots=True)
class DraftShape:
    """How much to draft for each row."""

    steps: int
    """Levels of drafts."""
    topk: int = 1
    """Children of a node that are kept while drafting; 1: a chain."""
    nodes: int = 0
    """Drafts at most, the root not counted; 0: a chain of `steps`."""
    floor: float = 0.0
    """A node that is likely to be reached with less than this probability need not be drafted on.
    """

    @property
    def drafts(self) -> int:
        """Drafts at most."""
        return self.nodes or self.steps


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a speculator proposes: a tree per row under the row's last known token, its root; N
    nodes besides it.
    """

    tokens: Tensor
    """int64 [B, N]; -1 where there is none. A parent stands before its children; siblings differ.
    """
    scores: Tensor
    """float32 [B, N]: the drafter's probability of the node and all its ancestors, in (0, 1]."""
    parents: Tensor | None = None
    """int64 [B, N]: 0 for a child of the root, i + 1 for one of node i.

    None: each node is the child of the last.
    """


class Speculator(Protocol):
    """Proposes tokens for the next positions. Keeps what it needs per slot."""

    @property
    def trainable(self) -> bool:
        """True when weights can be swapped."""
        ...

    @property
    def capture(self) -> CaptureSpec:
        """Hidden states needed of the target."""
        ...

    def catch_up(self, batch: DraftBatch) -> None:
        """Bring slots that are far behind up to date from `batch` alone, however long this
        speculator has been off.

        Apart from `propose`, so that what a pause costs is not counted as the cost of a round.
        """
        ...

    def propose(self, batch: DraftBatch, shape: DraftShape) -> Drafts:
        """Drafts for positions n, n + 1, ...; the most likely ones the speculator finds within the
        shape.

        What is proposed never depends on the draws of verification. Needs no `catch_up` before it.
        States kept from own features are replaced by those from true hidden states.
        """
        ...

    def ended(self, batch: DraftBatch) -> None:
        """These sequences are complete: the last chance to learn from their tokens."""
        ...

    def flush(self) -> None:
        """Forget what earlier sequences taught; weights stay."""
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
        """Read a version beside the serving one; the result goes to `commit_state`.

        Raises WeightsError.
        """
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
    layers: str = "last"
    """Names of the columns of DraftBatch.hidden, see CaptureSpec.layers."""
    steps: int = 0
    """Levels of drafts that its arms ask for at most; 0: not known."""
    answer_versions: int = 0
    """Policy versions after which an answer is forgotten; 0: those of the serving policy count."""
