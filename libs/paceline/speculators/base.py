"""The interface of a speculator for an engine that drafts with it, and its inputs.

Terms: a slot is a cache row of the engine. Row t of a sequence is (hidden state of token t, token t
+ 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import DataLoss, MissingCapability
from paceline.models.cache import StaticCache
from paceline.models.decoder import DecoderWeights
from paceline.models.sampling import DrawParams


@dataclass(frozen=True, slots=True)
class CaptureSpec:
    """Hidden states of the target that a speculator needs, and their names in captured rows."""

    inner: tuple[int, ...] = ()
    """Ascending: i is the residual stream that enters decoder layer i, before any norm."""
    last: bool = True
    """The state after the final norm, the input of lm_head."""

    @property
    def layers(self) -> str:
        """Names of the states in their order in a row, "2,14,25,last"; empty if none is needed."""
        return ",".join((*map(str, self.inner), *(("last",) if self.last else ())))

    def width(self, hidden_size: int) -> int:
        """Width of a row in numbers."""
        return hidden_size * (len(self.inner) + self.last)

    def columns(self, layers: str, hidden_size: int) -> slice | list[int]:
        """Index of these states in the last dimension of rows with `layers`. Raises DataLoss with
        the names of states missing from the rows.
        """
        held, wanted = layers.split(","), self.layers.split(",") if self.layers else []
        if lacking := [name for name in wanted if name not in held]:
            message = f"captured rows lack states the drafter reads: {', '.join(lacking)}"
            seen = layers or "(none)"
            raise DataLoss(message, seen=seen, allowed=f"rows that hold {self.layers}")
        starts = [held.index(name) for name in wanted]
        first, count = min(starts, default=0), len(starts)
        if starts == list(range(first, first + count)):
            return slice(first * hidden_size, (first + count) * hidden_size)
        return [start * hidden_size + offset for start in starts for offset in range(hidden_size)]


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The engine's data of the sequences to draft for: B rows, S slots, C positions of capacity."""

    slots: Sequence[int]
    """[B] cache slots."""
    lengths: Sequence[int]
    """[B] number n of present tokens of each slot; the next token to draw has position n."""
    token_ids: Tensor
    """int64 [S, C]: present tokens of every slot, undefined from position n on."""
    hidden: Tensor
    """[S, C, W]: true hidden states of positions 0 .. n - 2, by SpeculatorSetup.layers; the last H
    columns are the states after the final norm. The state of token n - 1 is not computed yet.
    """
    prompts: Sequence[int] = ()
    """[B] prompt tokens of each sequence, after which its answer begins; (): unknown."""
    policy_version: int = 0
    """Policy version that draws the next tokens."""
    kv: StaticCache | None = None
    """The policy's keys and values of positions 0 .. n - 2. Those from n - 1 on may be overwritten.
    """
    draws: DrawParams | None = None
    """B rows: the settings of the draws to come, if `Speculator.uses_noise`."""


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Size of the draft for each row."""

    steps: int
    """Number of draft levels."""
    topk: int = 1
    """Children kept per node while drafting; 1: a chain."""
    nodes: int = 0
    """Most drafts, without the root; 0: a chain of `steps`."""
    floor: float = 0.0
    """A node with a lower probability of being reached need not be expanded."""

    @property
    def drafts(self) -> int:
        """Largest number of drafts."""
        return self.nodes or self.steps


@dataclass(frozen=True, slots=True)
class Drafts:
    """A speculator's proposal: per row a tree of N nodes under the row's last token, its root."""

    tokens: Tensor
    """int64 [B, N]; -1 for no node. A parent precedes its children; siblings differ."""
    scores: Tensor
    """float32 [B, N]: the drafter's probability of the node and all its ancestors, in (0, 1]."""
    parents: Tensor | None = None
    """int64 [B, N]: 0 for a child of the root, i + 1 for a child of node i.

    None: each node is the child of the previous one.
    """


class Speculator:
    """Proposes tokens for the next positions, with a state per slot. The defaults are those of a
    speculator without such a state and without weights.
    """

    trainable = False
    """True when weights can be swapped."""
    uses_noise = False
    """True if drafts use the requests' noise."""

    @property
    def capture(self) -> CaptureSpec:
        """Hidden states needed from the target."""
        raise NotImplementedError

    def propose(self, batch: DraftBatch, shape: DraftShape) -> Drafts:
        """Drafts for positions n, n + 1, ...: the most likely drafts that the speculator finds
        within the shape.

        Proposals never depend on the draws of verification, except by `DraftBatch.draws`, and need
        no `catch_up` before. States from own features are replaced by states from true hidden
        states.
        """
        raise NotImplementedError

    def catch_up(self, batch: DraftBatch) -> None:
        """Updates slots that are far behind, from `batch` alone, for any pause of this speculator.

        It is separate from `propose`, so that the cost of a pause does not count as the cost of a
        round.
        """

    def ended(self, batch: DraftBatch) -> None:
        """Reports complete sequences: the last chance to learn from their tokens."""

    def flush(self) -> None:
        """Drops everything learned from earlier sequences; weights stay."""

    def free(self, slot: int) -> None:
        """Clears a slot for another sequence."""

    def move(self, source: int, destination: int, length: int) -> None:
        """Moves the sequence of slot `source`, with `length` tokens, to slot `destination`."""

    def bind(self, target: DecoderWeights) -> None:
        """Uses embed_tokens and lm_head of this target from now on."""

    def release(self) -> None:
        """Frees copies of the target's weights until `bind`."""

    def load_state(self, directory: Path) -> object:
        """Reads a version beside the serving one; the result is for `commit_state`.

        Raises WeightsError, and MissingCapability if there are no weights.
        """
        raise MissingCapability("this speculator has no weights to swap", seen=directory)

    def commit_state(self, state: object) -> None:
        """Serves a state from `load_state`. Raises MissingCapability if there are no weights."""
        raise MissingCapability("this speculator has no weights to swap")


@dataclass(frozen=True, slots=True)
class SpeculatorSetup:
    """Inputs for building any speculator."""

    target: DecoderWeights
    slots: int
    capacity: int
    """Positions per slot."""
    dtype: torch.dtype
    seed: int
    directory: Path | None = None
    """Directory of trained weights; None: new weights."""
    layers: str = "last"
    """Names of the columns of DraftBatch.hidden, see CaptureSpec.layers."""
    steps: int = 0
    """Most draft levels of its arms; 0: unknown."""
    answer_versions: int = 0
    """Policy versions after which an answer is dropped; 0: only answers of the serving policy
    count.
    """
