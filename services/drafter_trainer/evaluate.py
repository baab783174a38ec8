"""Judging a candidate on held-out rows, in pieces short enough to be preempted. Owns the comparison, no promotion."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafter_trainer.batcher import pack
from drafter_trainer.gate import Judgement, accepted_tokens, judge
from drafter_trainer.heads import PolicyHead
from drafter_trainer.sample import FeatureSample
from paceline.speculators import DraftNet, PackedRow

PIECE_POSITIONS = 192


@torch.inference_mode()
def chain_matches(net: DraftNet, row: PackedRow, head: PolicyHead, steps: int) -> Tensor:
    """[N, K] bool at the N valid positions of a row: did draft k of a greedy chain equal the policy's own token?

    Teacher-forced on the true tokens, which is the engine's chain as far as all drafts before were right. Drafts past
    the end of a document count as misses.
    """
    net.bind(head.embed_tokens, head.lm_head)
    matches = []
    for step, logits in enumerate(net.chain_logits(row, steps)):
        there, inside = row.ahead(step)
        matches.append((logits.argmax(-1) == row.draft_tokens[there]) & inside)
    return torch.stack(matches, dim=1)[row.valid]


class GateJob:
    """One comparison of a frozen candidate with the serving drafter; `advance` until `done`."""

    def __init__(
        self,
        candidate: DraftNet,
        serving: DraftNet,
        samples: Sequence[FeatureSample],
        head: PolicyHead,
        *,
        steps: int,
        window: int,
    ) -> None:
        self._nets = (candidate, serving)
        self._pieces = _pieces(samples, window)
        self._steps, self._window = steps, window
        self._accepted: tuple[list[npt.NDArray[np.int64]], list[npt.NDArray[np.int64]]] = ([], [])
        self._documents: list[npt.NDArray[np.int64]] = []
        self._offset = 0
        self.head = head

    @property
    def done(self) -> bool:
        """All pieces compared."""
        return not self._pieces

    def advance(self) -> None:
        """Compares the next piece."""
        samples = self._pieces.pop()
        row = pack(samples, window=self._window)
        for net, accepted in zip(self._nets, self._accepted, strict=True):
            accepted.append(accepted_tokens(chain_matches(net, row, self.head, self._steps).numpy()))
        self._documents.append(row.documents[row.valid].numpy() + self._offset)
        self._offset += len(samples)

    def judgement(self, *, resamples: int) -> Judgement:
        """The outcome; call when done."""
        candidate, serving = (np.concatenate(accepted) for accepted in self._accepted)
        return judge(candidate, serving, np.concatenate(self._documents), resamples=resamples)


def _pieces(samples: Sequence[FeatureSample], window: int) -> list[list[FeatureSample]]:
    pieces: list[list[FeatureSample]] = [[]]
    for sample in samples:
        if pieces[-1] and sum(min(s.positions, window) for s in pieces[-1]) + sample.positions > PIECE_POSITIONS:
            pieces.append([])
        pieces[-1].append(sample)
    return [piece for piece in pieces if piece]
